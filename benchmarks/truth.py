"""Print how right predictions and verdicts were, computed from the rows in results/ alone.

    python benchmarks/truth.py                            # a table, and notes below it
    python benchmarks/truth.py --json                     # every number, by its name
    python benchmarks/truth.py --page docs/how-right.md   # the page, with its pictures

`scoring/` has what each number must be, how it is counted, and the page.
"""

from pathlib import Path
from typing import Annotated

import typer
from scoring import HEAD, compute, notes, table
from scoring.page import write

from headrace.cli.terminal import exit_codes, show_json, show_table

RESULTS = Path(__file__).resolve().parent.parent / "results"
"""The folder of receipts of this checkout."""


def main(
    *,
    results: Annotated[Path, typer.Option(help="The folder of receipts.")] = RESULTS,
    page: Annotated[Path | None, typer.Option(help="Write it as a page with pictures.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print how right predictions and verdicts were, computed from the receipts."""
    with exit_codes(json):
        numbers = compute(results)
        written = write(results, page) if page else []
        if json:
            show_json(numbers)
        else:
            show_table(list(HEAD), [list(row) for row in table(numbers)])
            print("\n".join([*notes(numbers), *map(str, written)]))


if __name__ == "__main__":
    typer.run(main)
