"""This module defines the types of the arguments and options that the verbs take."""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli.completion import Shell, overrides, plans, print_completion, runs, techniques
from headrace.core.errors import ConfigError, nearest
from headrace.core.limits import MOST


def _print_version(asked: bool) -> None:
    if asked:
        print(f"headrace {__version__}")
        raise typer.Exit


def _check_name(checkpoint: str | None) -> str | None:
    """Return the name of a checkpoint; refuse any other text, such as a path.

    Raises:
        ConfigError: the text is neither step-N nor latest nor best.
    """
    if checkpoint is None or re.fullmatch("step-[0-9]+|latest|best", checkpoint):
        return checkpoint
    number = re.search("[0-9]+", checkpoint)
    near = "best" if nearest(checkpoint, ("best", "latest")) == "best" else "latest"
    raise ConfigError(
        f"--checkpoint {checkpoint!r} names none: they are step-N, latest and best",
        f"--checkpoint {f'step-{int(number[0])}' if number else near}",
    )


def share_of(option: str, text: str, of: str, least: float, most: float) -> float:
    """Return the share that a text such as 30% names, as a fraction.

    Args:
        option: the option that has it.
        text: what the user gave.
        of: what it is a share of.
        least: the least percentage.
        most: the most.

    Raises:
        ConfigError: it names none within these; the nearest that works is given.
    """
    number = text.strip().removesuffix("%")
    try:
        percent = float(number)
    except ValueError:
        percent = math.nan
    if not least <= percent <= most or not text.strip().endswith("%"):
        near = least if math.isnan(percent) else min(max(percent, least), most)
        raise ConfigError(
            f"{option} {text!r} is no share of {of}: it is {least:g}% to {most:g}%",
            f"{option} {near:g}%",
        )
    return percent / 100


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]
Completion = Annotated[
    Shell | None,
    typer.Option(
        "--completion",
        callback=print_completion,
        is_eager=True,
        help="Print what makes a shell complete words.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, as in batch.tokens=16384", autocompletion=overrides),
]
With = Annotated[
    list[str] | None,
    typer.Option("--with", help="Add a technique.", autocompletion=techniques),
]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", help="Remove a technique.", autocompletion=techniques),
]
PlanName = Annotated[
    str, typer.Argument(help="A recipe's name or a TOML file.", autocompletion=plans)
]
RunName = Annotated[
    Path, typer.Argument(help="A run: runs/NAME, or its NAME.", autocompletion=runs)
]
Adapter = Annotated[
    str, typer.Option(help="Put this adapter on the run's base: a run, a folder, or a name.")
]
Epochs = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=10_000,
        help="Passes over the data; 3 where neither the plan nor a word says when to end.",
    ),
]
Checkpoint = Annotated[
    str | None, typer.Option(help="step-N, latest or best.", callback=_check_name)
]
TextTokens = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="At most this many tokens of the validation text."),
]
DeviceName = Annotated[
    str, typer.Option(help="A GPU that is not here, as NVIDIA H200; its rates are assumed.")
]
