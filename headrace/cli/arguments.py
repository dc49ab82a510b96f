"""What the verbs of the command line take: plans by name, techniques, overrides."""

import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from headrace import __version__
from headrace.assemble.build import NOT_OF_WEIGHTS
from headrace.assemble.context import choose_device, elsewhere, make_context
from headrace.cli.terminal import console, is_first, probe_progress
from headrace.core.errors import ConfigError, HeadraceError, nearest
from headrace.core.files import toml_values
from headrace.core.layers import left_to_weights
from headrace.core.remedy import mend
from headrace.costs.machine import Machine
from headrace.model.adapter import load_pretrained
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context, installed
from headrace.probes.at_hand import rates
from headrace.recipes import read_recipe


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"headrace {__version__}")
        raise typer.Exit


def _check_name(checkpoint: str | None) -> str | None:
    """Refuse what names no checkpoint, as a path that leads elsewhere.

    Raises:
        ConfigError: it is none of the names.
    """
    if checkpoint is None or re.fullmatch("step-[0-9]+|latest|best", checkpoint):
        return checkpoint
    number = re.search("[0-9]+", checkpoint)
    near = "best" if nearest(checkpoint, ("best", "latest")) == "best" else "latest"
    raise ConfigError(
        f"--checkpoint {checkpoint!r} names none: they are step-N, latest and best",
        f"--checkpoint {f'step-{int(number[0])}' if number else near}",
    )


Version = Annotated[
    bool,
    typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, as in batch.tokens=16384")]
With = Annotated[list[str] | None, typer.Option("--with", help="Add a technique.")]
Without = Annotated[list[str] | None, typer.Option("--without", help="Remove a technique.")]
PlanName = Annotated[str, typer.Argument(help="A recipe's name or a TOML file.")]
RunName = Annotated[Path, typer.Argument(help="A run: runs/NAME, or its NAME.")]
Checkpoint = Annotated[
    str | None, typer.Option(help="step-N, latest or best.", callback=_check_name)
]
DeviceName = Annotated[
    str, typer.Option(help="A GPU that is not here, as NVIDIA H200; its rates are assumed.")
]


def catalogue() -> Catalogue:
    """Every technique and family that is installed."""
    return installed()


def named_plan(
    name: str, overrides: list[str] | None = None, add: list[str] | None = None,
    drop: list[str] | None = None, *, verb: str = "train",
) -> Plan:  # fmt: skip
    """The plan of that name, with what the command line changes in it.

    Raises:
        ConfigError: there is none, and what to give the verb; or it is not well formed.
    """
    text, said = read_recipe(name, verb), overrides or []
    plan = Plan.read(text, catalogue(), overrides=said, with_=add or (), without=drop or ())
    left = left_to_weights(toml_values(text, name), said)
    if any(word.partition("=")[0].strip() == "model.pretrained" for word in said):
        _weigh(plan, left, said)
    return plan


def _weigh(plan: Plan, left: dict[str, Any], said: list[str]) -> None:
    """Tell what given weights decide against a plan's file, and refuse what is said against them.

    Args:
        plan: with the weights.
        left: keys of the file that are left to them, with its values.
        said: the command line's overrides.

    Raises:
        ConfigError: an override contradicts them.
    """
    folder = plan.model.pretrained
    try:
        weights, _ = load_pretrained(Path(folder))
    except HeadraceError:  # a resume may not need them; who reads them says what is wrong
        return
    own = {f"model.{key}": value for key, value in dict(weights).items()}
    own |= {"data.tokenizer": folder, "data.vocab": weights.vocab}
    asked = {word.partition("=")[0].strip() for word in said}
    trains = "data.vocab" in asked and "data.tokenizer" not in asked
    if trains and plan.data.vocab != weights.vocab:
        raise ConfigError(
            f"data.vocab = {plan.data.vocab} is of a tokenizer that is trained here, and the one "
            f"of the weights of {folder} has {weights.vocab} entries",
            mend(f"data.vocab={weights.vocab}").otherwise("leave it out"),
        )
    idle = {f"model.{key}" for key in NOT_OF_WEIGHTS}
    other = [
        f"{key} {value} -> {own[key]}"
        for key, value in left.items()
        if key not in idle and own.get(key, value) != value
    ]
    if other and is_first():
        told = f"the weights of {folder} decide, not the plan's file: {', '.join(other)}"
        console.print(told, markup=False, soft_wrap=True)


def place(plan: Plan, device_name: str = "") -> tuple[Context, Machine]:
    """Where a plan would run, and the rates there: probed, else assumed, else probed now.

    Raises:
        UnsupportedError: its device is not here, or nothing is known of `device_name`.
    """
    if device_name:
        there = elsewhere(make_context(plan, torch.device("cpu")), device_name)
        return there, Machine.assumed(device_name)
    device = choose_device(plan)
    return make_context(plan, device), rates_here(device)


def rates_here(device: torch.device) -> Machine:
    """The rates of a device that is here, measured now where nothing else tells them.

    Raises:
        ConfigError: what was kept of it is damaged.
    """
    return rates(device, probe_progress)
