"""Every composition equals the same plan unsharded in one process: loss, gradients, weights.

Ranks add numbers in another order, and some techniques magnify rounding: a sign, a code of 8 bits,
an adapter that starts near zero. So what is allowed is TOLERANCE_FP32 or, where it is more,
MAGNIFIED times the most that the plan in one process answers to weights that are moved by one unit
in their last place.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from cases import COMPOSITIONS
from cases_in_halves import IN_HALVES
from cases_of_adapters import OF_ADAPTERS
from cases_of_experts import SHARING_ROWS
from cases_of_recipes import RECIPES
from composition import Composition, Outcome, differences, run
from house import MAGNIFIED, TOLERANCE_FP32

from headrace.parallel.world import World

KINDS = ("loss", "gradients", "weights")
NUDGES = 6
"""A code of 8 bits mostly swallows a nudge, and now and then another code comes of it."""
_KEYS: dict[str, Composition] = {}


@lru_cache(maxsize=64)
def _alone(key: str, nudged: int) -> Outcome:
    return run(_KEYS[key], World(), alone=True, nudged=nudged)[1]


def reference(composition: Composition, *, nudged: int = 0) -> Outcome:
    """Run the same plan in one process; compositions that share it share the work."""
    key = composition.plan(alone=True).to_toml()
    _KEYS.setdefault(key, composition)
    return _alone(key, nudged)


def beyond(found: Outcome, composition: Composition) -> dict[str, float]:
    """What is further from the reference than rounding explains."""
    wanted = reference(composition)
    off = differences(found, wanted, freed="optimizer_in_backward" in composition.techniques)
    limits = dict.fromkeys(KINDS, TOLERANCE_FP32)
    for nudged in range(NUDGES + 1):
        if nudged:
            answers = differences(reference(composition, nudged=nudged), wanted)
            for what, by in answers.items():
                kind = what.split()[0]
                limits[kind] = max(limits[kind], MAGNIFIED * by)
        wrong = {what: by for what, by in off.items() if not by <= limits[what.split()[0]]}
        if not wrong:
            break
    return {f"{w} (limit {limits[w.split()[0]]:.2g})": round(by, 9) for w, by in wrong.items()}


@pytest.mark.parametrize(
    "composition",
    [
        pytest.param(c, id=c.name, marks=[pytest.mark.slow] * c.slow)
        for c in (*COMPOSITIONS, *IN_HALVES, *OF_ADAPTERS, *SHARING_ROWS, *RECIPES)
    ],
)
def test_equals_one_process(composition: Composition, told: Callable[..., Any]) -> None:
    found = told(composition)
    assert not found.errors, found.errors[0]
    assert not found.refusals, found.refusals[0]
    if composition.approximate or composition.rounded:
        assert_inside_the_band(found.outcome(), composition)
        return
    wrong = beyond(found.outcome(), composition)
    assert not wrong, f"beyond rounding: {wrong}"


@pytest.mark.parametrize(
    "composition", [pytest.param(c, id=c.name) for c in SHARING_ROWS if not c.slow]
)
def test_ranks_that_share_rows_count_the_choices_of_whole_rows(
    composition: Composition, told: Callable[..., Any]
) -> None:
    said = [rank["evidence"]["mixture_of_experts"] for rank in told(composition).ranks]
    tokens = composition.micro_rows * composition.length
    assert {one["numbers"]["tokens"] for one in said} == {float(tokens)}
    ranks = composition.mesh["context"]
    for at in range(0, len(said), ranks):
        assert all(one == said[at] and one["active"] for one in said[at : at + ranks])


def assert_inside_the_band(found: Outcome, composition: Composition) -> None:
    """Compare every gradient of the first step, by L2."""
    wanted = reference(composition)
    band = composition.rounded or max(t.band for t in composition.plan().techniques.values())
    far = {
        name: float((found.gradients[name] - right).norm() / right.norm())
        for name, right in wanted.gradients.items()
    }
    assert band > 0 and max(far.values()) <= band, far
    assert abs(found.losses[0] - wanted.losses[0]) <= 0.01 * wanted.losses[0]
