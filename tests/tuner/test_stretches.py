"""Do two plans learn the same, as stretches that begin with the same state tell?"""

from dataclasses import replace
from statistics import fmean

import pytest
from numpy.random import default_rng
from two_readings import CUDA, judged, reading

from headrace.tuner.equality import (
    BRIEF_STEPS,
    LEAST_STEPS,
    NOISE,
    SLOWER,
    STATE_STEPS,
    STRETCH,
    STRETCHES,
    by_stretches,
    equality,
    least_steps,
)
from headrace.tuner.judge import WorthMoreSteps
from headrace.tuner.readings import Reading


def stretched(
    share: float, scatter: float, count: int, seed: int = 0, added: float = 1e-4
) -> tuple[Reading, Reading]:
    """Return two readings: losses that fall by 0.02 a step, and so much of that lost, with noise.

    Args:
        share: of its learning that the second loses.
        scatter: of the lags, in nats.
        count: stretches.
        seed: of the noise.
        added: nats by which the second's losses are higher at the same weights.
    """
    draw, steps = default_rng(seed), 20 + STRETCH * count
    before, after = reading(steps=steps), reading(0.5, steps=steps)
    before.losses = [9.0 - 0.02 * i for i in range(steps + 1)]
    after.losses = [loss + added for loss in before.losses[:-1]]
    lag = share * 0.02 * STRETCH
    after.lags = [lag + scatter * draw.standard_normal() for _ in range(count)]
    after.shares_state = True
    return before, after


@pytest.mark.parametrize(
    ("share", "scatter", "added", "verdict", "says"),
    [
        (0.002, 0.0003, 0.002, "better", "all of the interval"),
        (-0.05, 0.0003, -0.02, "better", "all of the interval"),
        (0.03, 0.0003, 0.002, "different", "learns 3.03% less (2.9"),
        (0.002, 0.0003, 0.02, "different", "it adds +0.0200 nats"),
        (0.0, 0.02, 0.002, "not shown", "1% are allowed, and that it keeps to them is not shown"),
    ],
)
def test_stretches_from_the_same_state_show_what_is_learned(
    share: float, scatter: float, added: float, verdict: str, says: str
) -> None:
    rules = replace(CUDA, rounding="operands")
    before, after = stretched(share, scatter, STRETCHES, added=added)
    found = judged(after, before, "approximate", rules)
    assert found.verdict == verdict and says in found.reason, found.reason
    assert ((found.enough or 0) > len(after.losses)) == (verdict == "not shown")
    few = judged(replace(after, lags=after.lags[:-1]), before, "approximate", rules)
    assert few.verdict == "not shown" and few.enough == len(after.losses) + STRETCH
    broken = judged(
        replace(after, lags=[*after.lags[1:], float("nan")]), before, "approximate", rules
    )
    assert broken.verdict == "different" and broken.reason == "its loss is not finite"
    flat = replace(before, losses=[6.0] * len(before.losses))
    said = judged(after, flat, "approximate", rules).reason
    assert "hardly anything was learned in 128 steps" in said
    own = judged(replace(after, shares_state=False), before, "approximate", rules)
    assert own.loss == pytest.approx(added), (
        "two trainings of their own are compared by their losses"
    )


def test_no_stretch_is_left_out() -> None:
    """Check that the first of fifteen count as the last do."""
    before, after = stretched(0.0, 1e-4, 2 * STRETCHES - 1)
    for lost, verdict in ((1, "same"), (7, "not shown"), (12, "different")):
        for lags in (slice(lost), slice(-lost, None)):
            found = replace(after, lags=[*after.lags])
            found.lags[lags] = [0.02 * STRETCH] * lost
            assert equality(before, found, "approximate", "operands").verdict == verdict


@pytest.mark.parametrize(("off", "verdict"), [(1, "same"), (2, "not shown")])
def test_one_stretch_out_of_all_proportion_decides_nothing(off: int, verdict: str) -> None:
    """Check one and two of eight that are off by a third of what a stretch learns."""
    for lag in (0.1, -0.1):
        before, after = stretched(0.0, 1e-3, STRETCHES)
        after.lags[:off] = [lag] * off
        assert equality(before, after, "approximate", "operands").verdict == verdict


def test_stretches_in_which_nothing_is_learned_show_in_their_own_losses() -> None:
    """Three of fifteen are left out of the lags' mean; what their steps lose is not."""
    before, after = stretched(0.0, 1e-4, 2 * STRETCHES - 1)
    after.lags[:3] = [0.02 * STRETCH] * 3
    for stretch in range(3):
        for step in range(STRETCH):
            after.losses[20 + STRETCH * stretch + step] += 0.02 * step
    assert equality(before, after, "approximate", "operands").verdict != "same"


def test_a_limit_that_is_exceeded_by_what_was_surely_learned_alone_is_not() -> None:
    """Where batches differ, 1% of the most that may have been learned is the limit to exceed."""
    draw = default_rng(0)
    verdicts = []
    for share in (0.0105, 0.05):
        before, after = stretched(share, 1e-6, STRETCHES)
        noise = 0.4 * draw.standard_normal(len(before.losses))
        before.losses = [loss + n for loss, n in zip(before.losses, noise, strict=True)]
        after.losses = [loss + 1e-4 for loss in before.losses[:-1]]
        verdicts.append(equality(before, after, "approximate", "operands").verdict)
    assert verdicts == ["not shown", "different"]


@pytest.mark.parametrize(("share", "most"), [(0.02, 0.02), (0.05, 0.0)])
def test_little_that_was_learned_between_other_batches_shows_nothing(
    share: float, most: float
) -> None:
    """Check 300 changes that lose more than is allowed, of 0.05 nats beside a scatter of 0.1."""
    passed = []
    for seed in range(300):
        draw = default_rng(1000 + seed)
        before, after = stretched(share, 1e-5, STRETCHES, seed)
        before.losses = [6 - 4e-4 * i + 0.1 * draw.standard_normal() for i in range(148)]
        after.losses = [loss + 1e-5 for loss in before.losses]
        after.lags = [lag / 50 for lag in after.lags]
        passed.append(equality(before, after, "approximate", "operands").verdict == "same")
    assert fmean(passed) <= most


def test_stretches_are_asked_of_what_rounds_operands_and_adds_no_noise() -> None:
    before, after = reading(), replace(reading(0.5), shares_state=True)
    operands = replace(CUDA, rounding="operands")
    for effect, rules, asked in (
        ("approximate", operands, True),
        ("approximate", CUDA, False),
        ("exact", operands, False),
        ("approximate", replace(operands, shown=True), False),
    ):
        gain = WorthMoreSteps(effect, rules)  # type: ignore[arg-type]
        assert gain.asks_stretches == gain.by_stretches(replace(after, beside=before)) == asked
    for noise, asked in ((NOISE, False), (-NOISE, True)):  # smaller gradients have no noise more
        after.firsts = [one._replace(total=1 + noise) for one in before.firsts]
        assert by_stretches(before, after) == asked
    assert not by_stretches(before, reading(0.5)), "they are in processes of their own"
    assert least_steps("operands", together=True) == STRETCH * STRETCHES > BRIEF_STEPS
    assert least_steps("state", together=True) == STATE_STEPS
    assert least_steps("operands", NOISE, together=True) == LEAST_STEPS


@pytest.mark.parametrize(("share", "most", "least"), [(SLOWER, 0.03, 0.0), (0.0, 1.0, 0.9)])
def test_how_often_stretches_are_taken_for_the_same(
    share: float, most: float, least: float
) -> None:
    """Check the share of 300 noisy trainings that pass, with a hundredth lost and with nothing."""
    noise = 0.4 * SLOWER * 0.02 * STRETCH
    passed = [
        equality(*stretched(share, noise, STRETCHES, seed), "approximate", "operands").verdict
        == "same"
        for seed in range(300)
    ]
    assert least <= fmean(passed) <= most
