"""This module reads the plan that a command line names, and finds where it would run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace.assemble.build import NOT_OF_WEIGHTS
from headrace.assemble.context import choose_device, elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import is_first, note, probe_progress
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.files import toml_values
from headrace.core.layers import left_to_weights
from headrace.core.remedy import mend
from headrace.costs.machine import Machine
from headrace.model.adapter import load_pretrained
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.probes.at_hand import rates
from headrace.recipes import read_recipe


def named_plan(
    name: str,
    overrides: list[str] | None = None,
    add: list[str] | None = None,
    drop: list[str] | None = None,
    *,
    verb: str = "train",
) -> Plan:
    """Return the plan of that name, with the changes of the command line.

    Raises:
        ConfigError: there is no such plan, and the remedy says what to give the verb; or the plan
            is not well formed.
    """
    text, overrides = read_recipe(name, verb), overrides or []
    plan = Plan.read(text, catalogue(), overrides=overrides, with_=add or (), without=drop or ())
    left = left_to_weights(toml_values(text, name), overrides)
    if any(word.partition("=")[0].strip() == "model.pretrained" for word in overrides):
        _weigh(plan, left, overrides)
    return plan


def _weigh(plan: Plan, left: dict[str, Any], overrides: list[str]) -> None:
    """Print where pretrained weights override a plan's file; refuse what contradicts them.

    Args:
        plan: the plan, which names the weights.
        left: the keys of the plan's file that the weights decide, with the file's values.
        overrides: the `key=value` words of the command line.

    Raises:
        ConfigError: an override contradicts the weights.
    """
    folder = plan.model.pretrained
    try:
        weights, _ = load_pretrained(Path(folder))
    except HeadraceError:  # a resume may not need them; their reader reports what is wrong
        return
    own = {f"model.{key}": value for key, value in weights.model_dump().items()}
    own |= {"data.tokenizer": folder, "data.vocab": weights.vocab}
    asked = {word.partition("=")[0].strip() for word in overrides}
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
        note(f"the weights of {folder} decide, not the plan's file: {', '.join(other)}")


def place(plan: Plan, device_name: str = "") -> tuple[Context, Machine]:
    """Return where a plan would run, and the rates of that device.

    The rates are assumed for the device that `device_name` names. Without a name they are those of
    the plan's device here: see `rates_here`.

    Raises:
        UnsupportedError: the plan's device is not here, or no rates are known for `device_name`.
    """
    if device_name:
        there = elsewhere(make_context(plan, torch.device("cpu")), device_name)
        return there, Machine.assumed(device_name)
    device = choose_device(plan)
    return make_context(plan, device), rates_here(device)


def laid_out(plan: Plan, show: Callable[[str], None]) -> Plan:
    """Return a plan of `mesh.auto = true` with a layout of the processes that were started.

    Args:
        plan: any plan; one that names its layout is returned as it is.
        show: called with each line about the choice.

    Raises:
        ConfigError, UnsupportedError: no layout can run here, or none is predicted to fit.
    """
    if not plan.mesh.auto:
        return plan
    from headrace.predict.mesh import choose_mesh

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = choose_mesh(plan, ranks, *place(plan), catalogue())
    for line in chosen.lines:
        show(line)
    return chosen.plan


def rates_here(device: torch.device, *, sure: bool = False) -> Machine:
    """Return the rates of a device of this machine: measured, else assumed, else measured now.

    Args:
        device: the device.
        sure: a free GPU is measured now even where its datasheet's rates could be assumed.

    Raises:
        ConfigError: the file of its measured rates is damaged.
    """
    return rates(device, probe_progress, sure=sure)
