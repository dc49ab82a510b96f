"""This module holds the verbs under `headrace check`, of which `mup` is the only one."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import Json, Overrides, PlanName, With, Without
from headrace.cli.terminal import exit_codes, make_progress, show_json
from headrace.core.errors import EXIT_DONE, EXIT_FAILED
from headrace.core.limits import WIDEST_CHECKED
from headrace.core.loading import loading

check = typer.Typer(no_args_is_help=True)


@check.callback()
def _before_verbs() -> None:
    """Check whether what a plan relies on holds."""


@check.command("mup")
def mup(
    plan: PlanName,
    overrides: Overrides = None,
    *,
    with_: With = None,
    without: Without = None,
    widest: Annotated[
        int, typer.Option(min=8, max=1 << 20, help="The widest of four widths.")
    ] = WIDEST_CHECKED,
    output: Annotated[
        Path | None, typer.Option("--out", help="Folder of the picture, as a page and as JSON.")
    ] = None,
    json: Json = False,
) -> None:
    """Check whether activations move as far at every width, as muP promises."""
    with exit_codes(json):
        with loading():
            from headrace.cli.plans import named_plan
            from headrace.tuner.mup_check import check_mup, format_check, write_check
        wanted = named_plan(plan, overrides, with_, without, verb="check mup")
        progress = make_progress(json)
        try:
            checked = check_mup(wanted, widest=widest, progress=progress)
        finally:
            progress.close()
        page = None if output is None else write_check(checked, output)
        code = EXIT_DONE if checked.passes else EXIT_FAILED
        if json:
            show_json({**checked.to_dict(), "page": None if page is None else str(page)}, code)
        else:
            print(format_check(checked))
            if page is not None:
                print(f"picture: {page}")
    if code:
        raise typer.Exit(code)
