"""This module holds the verb `headrace data inspect`: what text holds, before it is prepared."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.arguments import Json
from headrace.cli.terminal import exit_codes, make_progress, note, show_json, show_table
from headrace.core.loading import loading

if TYPE_CHECKING:
    from headrace.data.inspection.record import Inspection

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z0-9_]+)+=")


def inspect(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders, globs, stdlib or hf:NAME; and key=value."),
    ] = None,
    *,
    plan: Annotated[str, typer.Option(help="A recipe or a TOML file: how text is read.")] = "demo",
    page: Annotated[Path | None, typer.Option(help="Write a page with pictures here.")] = None,
    json: Json = False,
) -> None:
    """Say what text holds: lengths, scripts, repeats, tokens, and what a plan makes of it."""
    with exit_codes(json):
        words = sources or []
        overrides = [word for word in words if _OVERRIDE.match(word)]
        named = [word for word in words if word not in overrides]
        with loading():
            from headrace.cli.plans import named_plan
            from headrace.data.inspection.run import inspect_data
            from headrace.train.interrupts import Preparing
        progress = make_progress(json)
        try:
            with Preparing():
                wanted = named_plan(plan, overrides, verb="data inspect --plan")
                asked = any(word.startswith("data.sources=") for word in overrides)
                read = wanted.source_list if asked or not named else tuple(named)
                inspection = inspect_data(read, wanted.data, progress=progress.task)
        finally:
            progress.close()
        written = None
        if page is not None:
            from headrace.report.inspection import inspection_page
            from headrace.report.page import write_page

            written = write_page(page, inspection_page(inspection))
        if json:
            where = {} if written is None else {"page": str(written)}
            show_json(inspection.to_dict() | where)
            return
        _show(inspection)
        if written is not None:
            note(f"page: {written}")


def _show(inspection: "Inspection") -> None:
    """Print an inspection as tables."""
    from headrace.data.inspection import words

    show_table(["what", "value"], words.facts(inspection))
    for title, head, rows in words.tables(inspection):
        print()
        show_table(head, rows, title)
    for line in words.lines(inspection):
        note(line)
