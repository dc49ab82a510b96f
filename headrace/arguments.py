"""What the verbs of the command line take: plans by name, techniques, overrides."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from headrace import __version__, probes
from headrace.context import choose_device, elsewhere, make_context
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.core.technique import Catalogue, Context, installed
from headrace.recipes import read_recipe


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"headrace {__version__}")
        raise typer.Exit


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
Checkpoint = Annotated[str | None, typer.Option(help="step-N, latest or best.")]
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
    text = read_recipe(name, verb)
    return Plan.read(
        text, catalogue(), overrides=overrides or (), with_=add or (), without=drop or ()
    )


def place(plan: Plan, device_name: str = "") -> tuple[Context, Machine]:
    """Where a plan would run, and the rates there: probed, else assumed.

    Raises:
        UnsupportedError: its device is not here, or nothing is known of `device_name`.
    """
    if device_name:
        there = elsewhere(make_context(plan, torch.device("cpu")), device_name)
        return there, Machine.assumed(device_name)
    device = choose_device(plan)
    context = make_context(plan, device)
    return context, probes.cached(device) or Machine.assumed(context.device_name)
