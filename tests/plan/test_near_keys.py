"""A key that is not there: its guess is near, and the value offered with it is taken."""

import re
import shlex
from functools import cache
from typing import Any

import pytest

from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.core.remedy import leave_out
from headrace.plan.plan import Plan

BASE = "goal.steps = 10\nschedule.steps = 10\nschedule.warmup_steps = 0\n"
VALUES = ("0.5", "-3", "1e12", "1e30", "7", "true", "abc", "[1, 2]", "[]")
"""What may stand behind a key that was mistyped."""


KNOWN = cache(catalogue)
"""All techniques, looked for once: these tests read thousands of plans."""


def read(*overrides: str) -> Plan:
    return Plan.read(BASE, KNOWN(), overrides=overrides)


def keys() -> list[str]:
    """Return every dotted key of the tables of a plan."""
    found = []
    for name, field in Plan.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        found += [f"{name}.{key}" for key in inner] if inner else []
    return found


def refusal(*overrides: str) -> ConfigError | None:
    try:
        read(*overrides)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("value", VALUES)
def test_what_is_offered_for_a_mistyped_key_is_taken(value: str) -> None:
    tried = 0
    for key in keys():
        error = refusal(f"{key}x={value}")
        assert error is not None and "has no key" in error.message, key
        if error.remedy != leave_out(f"{key}x"):
            ways = shlex.split(error.remedy.text)
            again = refusal(*ways)  # by a whole plan it may be, as a batch that is no rows
            assert again is None or not re.search(r"= \S+: |no key", again.message), (key, ways)
            tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("optimizer.beta1=0.5", "optimizer.betas=[0.5,0.95]"),
        ("optimizer.beta2=0.5", "optimizer.betas=[0.9,0.5]"),
        ("optimizer.beta1=7", "optimizer.betas=[0.9,0.95]"),
        ("checkpoint.keep=1e12", "checkpoint.keep_last=1000000000000"),
        ("checkpoint.keep=1e30", "checkpoint.keep_last=1000000000000000"),
        ("checkpoint.keep=-3", "checkpoint.keep_last=1"),
        ("checkpoint.keep_last=99999999999999999999", "leave out checkpoint.keep_last"),
        ("nonsense=1", "leave out nonsense"),
        ("sed=1", "seed=1"),
    ],
)
def test_the_value_that_is_offered_is_near(override: str, remedy: str) -> None:
    error = refusal(override)
    assert error is not None and " ".join(shlex.split(error.remedy.text)) == remedy


def test_a_plan_made_in_python_guesses_no_key_that_is_far() -> None:
    nonsense: Any = {"nonsense": 1}
    with pytest.raises(ConfigError) as error:
        Plan(**nonsense)
    assert "did you mean" not in error.value.message and "seed" in error.value.message
