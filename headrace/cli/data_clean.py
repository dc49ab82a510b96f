"""This module holds the verbs `data dedup` and `data decontaminate`, which need no plan.

Their words are sources, and keys of a plan's table `data`, as `data.text_key=body`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.arguments import Json
from headrace.cli.terminal import exit_codes, make_progress, show_json, show_table
from headrace.core.loading import loading

if TYPE_CHECKING:
    from headrace.data.cleaning import StepName

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCES", help="Files, folders, globs, stdlib or hf:NAME; and data.KEY=VALUE."
    ),
]
To = Annotated[
    Path | None, typer.Option("--to", help="Write what remains into this new folder, as .jsonl.")
]
Against = Annotated[
    list[str], typer.Option("--against", help="An evaluation set; give it again for more.")
]


def dedup(words: Words, *, to: To = None, json: Json = False) -> None:
    """Find documents that are there already, and write the text without them."""
    _clean(words, "deduplication", {}, to, json)


def decontaminate(words: Words, *, against: Against, to: To = None, json: Json = False) -> None:
    """Find text of evaluation sets, and write the text without it."""
    _clean(words, "decontamination", {"against": against}, to, json)


def _clean(
    words: list[str], step: "StepName", table: dict[str, Any], to: Path | None, json: bool
) -> None:
    """Clean the sources as a table of a plan's `data` says, and print what fell."""
    with exit_codes(json):
        with loading():
            from headrace.data.cleaned import clean
            from headrace.data.command_words import read_words
            from headrace.train.interrupts import Preparing
        progress = make_progress(json)
        try:
            with Preparing():
                data = read_words(words, {step: table})
                cleaned = clean(data, step, to, progress=progress.task)
                for document in cleaned.left_out:
                    progress.note(document.line())
                for fell, other in cleaned.report.examples:
                    progress.note(f"fell: {fell}\n  for: {other}")
        finally:
            progress.close()
        if json:
            show_json(cleaned.to_dict())
        else:
            rows = [[key, str(value)] for key, value in cleaned.rows().items()]
            show_table(["what", "value"], rows)
