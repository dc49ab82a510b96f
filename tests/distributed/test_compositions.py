"""Every composition equals the same plan unsharded in one process: loss, gradients, weights.

Ranks add numbers in another order, and some techniques magnify rounding: a sign, a code of 8 bits,
an adapter that starts near zero. So what is allowed is TOLERANCE_FP32 or, where it is more,
MAGNIFIED times what the plan in one process answers to weights that are moved by one unit in their
last place.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from cases import COMPOSITIONS
from composition import Composition, Outcome, differences, run
from house import MAGNIFIED, TOLERANCE_FP32

from headrace.parallel.world import World

KINDS = ("loss", "gradients", "weights")
_KEYS: dict[str, Composition] = {}


@lru_cache(maxsize=64)
def _alone(key: str, nudged: bool) -> Outcome:
    return run(_KEYS[key], World(), alone=True, nudged=nudged)[1]


def reference(composition: Composition, *, nudged: bool = False) -> Outcome:
    """The same plan in one process; compositions that share it share the work."""
    key = composition.plan(alone=True).to_toml()
    _KEYS.setdefault(key, composition)
    return _alone(key, nudged)


def beyond(found: Outcome, composition: Composition) -> dict[str, float]:
    """What is further from the reference than rounding explains."""
    wanted = reference(composition)
    off = differences(found, wanted)
    if max(off.values()) <= TOLERANCE_FP32:
        return {}
    answers = differences(reference(composition, nudged=True), wanted)
    limits = {
        kind: max([TOLERANCE_FP32,
                   *(MAGNIFIED * by for what, by in answers.items() if what.startswith(kind))])
        for kind in KINDS
    }  # fmt: skip
    return {
        f"{what} (limit {limits[what.split()[0]]:.2g})": round(by, 9)
        for what, by in off.items()
        if not by <= limits[what.split()[0]]
    }


@pytest.mark.parametrize(
    "composition",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * c.slow) for c in COMPOSITIONS],
)
def test_equals_one_process(composition: Composition, told: Callable[..., Any]) -> None:
    found = told(composition)
    assert not found.errors, found.errors[0]
    assert not found.refusals, found.refusals[0]
    wrong = beyond(found.outcome(), composition)
    assert not wrong, f"beyond rounding: {wrong}"
