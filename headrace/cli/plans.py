"""The plan that a command line names, and where it would run."""

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
        note(told)


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
