"""This module holds the verb `import`, which makes a plan of another trainer's config."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli.arguments import Json
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import exit_codes, show_json, show_table
from headrace.core.errors import ConfigError
from headrace.core.files import printable, shell, write_whole

if TYPE_CHECKING:
    from headrace.migrate.draft import Imported

Trainer = Literal["torchtitan", "nanochat", "axolotl", "litgpt"]
MOST_RANKS = 1 << 20


def import_config(
    trainer: Annotated[Trainer, typer.Argument(help="Whose config it is.")],
    file: Annotated[
        Path,
        typer.Argument(
            help="torchtitan's TOML, axolotl's or litgpt's YAML; of nanochat a script with the "
            "command that starts base_train, or the JSON beside a checkpoint."
        ),
    ],
    *,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, and print keys.")] = None,
    ranks: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="Processes that the config was run on.")
    ] = 1,
    json: Json = False,
) -> None:
    """Make a plan of another trainer's config, and say of every key what became of it.

    The plan goes to standard output as TOML, and the keys to standard error.
    """
    with exit_codes(json):
        imported = _imported(trainer, file, ranks)
        if out is not None:
            _write(out, imported.toml)
        if json:
            show_json(
                {
                    "trainer": trainer,
                    "plan": None if out is None else str(out),
                    "toml": imported.toml,
                    "keys": [line.to_dict() for line in imported.lines],
                }
            )
            return
        if out is None:
            print(imported.toml, end="")
            print(_summary(imported), file=sys.stderr)
            for line in _left(imported):
                print(f"  {line}", file=sys.stderr)
            return
        show_table(HEAD, _rows(imported))
        print(_summary(imported))
        print(f"  try: headrace plan {shell(out)}")


HEAD = ("key", "value", "fate", "in the plan", "")
"""The head of the table of keys."""


def _imported(trainer: Trainer, file: Path, ranks: int) -> "Imported":
    """Return the plan that a config becomes.

    Raises:
        ConfigError: the file is no config of the trainer, or no plan can be made of it.
        UnsupportedError: its model is none that Headrace builds.
    """
    from importlib import import_module

    module = import_module(f"headrace.migrate.{trainer}")
    draft = getattr(module, f"import_{trainer}")(file, ranks)
    return draft.finish(catalogue(), printable(file))


def _write(out: Path, toml: str) -> None:
    """Write the plan where nothing stands yet.

    Raises:
        ConfigError: something stands there, or its folder is missing.
    """
    if out.exists() or not out.parent.is_dir():
        what = "exists" if out.exists() else "has no folder"
        near = out.with_name(f"{out.stem}-imported.toml").name
        raise ConfigError(f"--out {printable(out)} {what}", f"--out {shell(near)}")
    write_whole(out, toml)


def _summary(imported: "Imported") -> str:
    """Return how many keys have each fate, in one line."""
    from headrace.migrate.draft import Fate

    words = {
        Fate.CARRIED: "carried",
        Fate.NEAREST: "carried as what comes nearest",
        Fate.IDLE: "ask for nothing here",
        Fate.LEFT: "not carried",
        Fate.ADDED: "added",
    }
    return "; ".join(f"{imported.count(fate)} {word}" for fate, word in words.items())


def _left(imported: "Imported") -> list[str]:
    """Return a line for each key that is not carried as it was."""
    from headrace.migrate.draft import Fate, shown

    texts = {Fate.LEFT: "not carried", Fate.NEAREST: "nearest"}
    return [
        f"{texts[line.fate]}: {line.key} = {shown(line.value)}: {line.why}"
        for line in imported.lines
        if line.fate in texts
    ]


def _rows(imported: "Imported") -> list[list[str]]:
    """Return the table's rows, one a key."""
    from headrace.migrate.draft import shown

    return [
        [line.key, shown(line.value) if line.key else "", line.fate, " ".join(line.words), line.why]
        for line in imported.lines
    ]
