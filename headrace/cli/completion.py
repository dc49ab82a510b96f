"""Complete words of a command line in bash, zsh and fish; nothing here waits for torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import typer

Shell = Literal["bash", "zsh", "fish"]


def print_completion(shell: str | None) -> None:
    """Print the script with which a shell completes the words of `headrace`, and end.

    Args:
        shell: its name; None where it was not asked for.

    Raises:
        typer.Exit: the script was printed.
    """
    if shell is None:
        return
    from typer.completion import get_completion_script  # pyright: ignore[reportPrivateImportUsage]

    names = {"prog_name": "headrace", "complete_var": "_HEADRACE_COMPLETE", "shell": shell}
    print(get_completion_script(**names))
    raise typer.Exit


def plans(incomplete: str) -> Iterator[str]:
    """Yield the recipes, the plan files here, and those of runs that begin so."""
    from headrace.recipes import recipes

    files = [*Path().glob("*.toml"), *Path("runs").glob("*/plan.toml")]
    names = [*recipes(), *map(str, sorted(files))]
    yield from (name for name in names if name.startswith(incomplete))


def runs(incomplete: str) -> Iterator[str]:
    """Yield the names of runs under `runs` that begin so."""
    names = sorted(file.parent.name for file in Path("runs").glob("*/plan.toml"))
    yield from (name for name in names if name.startswith(incomplete))


def techniques(incomplete: str) -> Iterator[str]:
    """Yield the names of techniques that begin so, as the matrix of pairs has them."""
    file = Path(__file__).parents[1] / "catalogue" / "matrix.json"
    pairs = json.loads(file.read_text())["pairs"]
    names = sorted({name for pair in pairs for name in pair.split()})
    yield from (name for name in names if name.startswith(incomplete))


def overrides(incomplete: str) -> Iterator[str]:
    """Yield the keys of a plan that begin so, each with the `=` behind it."""
    from headrace.plan.plan import Plan

    table, fields = incomplete.rpartition(".")[0], dict(Plan.model_fields)
    if table:
        kind = fields[table].annotation if table in fields else None
        fields = dict(getattr(kind, "model_fields", {}))
    for name, field in fields.items():
        inside = hasattr(field.annotation, "model_fields") or name == "techniques"
        whole = f"{table}.{name}" if table else name
        if whole.startswith(incomplete):
            yield f"{whole}{'.' if inside else '='}"
