"""Read plans by name, and find the plan that a caller means."""

from collections.abc import Iterable
from pathlib import Path

from headrace.cli.catalogue import catalogue
from headrace.plan.plan import Plan
from headrace.recipes import read_recipe

AnyPlan = Plan | str | Path
"""A plan, the name of a recipe, or the path of a TOML file."""


def read_plan(
    name: str | Path,
    *overrides: str,
    with_: Iterable[str] = (),
    without: Iterable[str] = (),
) -> Plan:
    """Return the plan of a recipe or of a TOML file, with changes as the command line takes them.

    Args:
        name: the name of a recipe, as "demo", or the path of a TOML file.
        *overrides: words `key=value`, as "model.layers=6". Values are TOML, bare words are text.
        with_: names of techniques to add with their defaults.
        without: names of techniques to remove.

    Raises:
        ConfigError: there is no such recipe or file, or the plan is not well formed.
    """
    return Plan.read(
        read_recipe(str(name)), catalogue(), overrides=overrides, with_=with_, without=without
    )


def plan_of(plan: AnyPlan) -> Plan:
    """Return a plan that is given as itself, by name or by path; see `read_plan`."""
    return plan if isinstance(plan, Plan) else read_plan(plan)
