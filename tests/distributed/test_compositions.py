"""Every composition equals the same plan unsharded in one process: loss, gradients, weights."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from cases import COMPOSITIONS
from composition import Composition, Outcome, differences, run

from headrace.parallel.world import World


@lru_cache(maxsize=64)
def _alone(key: str) -> Outcome:
    return run(_KEYS[key], World(), alone=True)[1]


_KEYS: dict[str, Composition] = {}


def reference(composition: Composition) -> Outcome:
    """The same plan in one process; compositions that share it share the work."""
    key = composition.plan(alone=True).to_toml()
    _KEYS.setdefault(key, composition)
    return _alone(key)


@pytest.mark.parametrize(
    "composition",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * c.slow) for c in COMPOSITIONS],
)
def test_equals_one_process(composition: Composition, told: Callable[..., Any]) -> None:
    found = told(composition)
    assert not found.errors, found.errors[0]
    assert not found.refusals, found.refusals[0]
    off = differences(found.outcome(), reference(composition))
    wrong = {what: round(by, 9) for what, by in off.items() if not by <= composition.tolerance}
    assert not wrong, f"beyond {composition.tolerance}: {wrong}"
