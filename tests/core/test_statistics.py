"""Check ratios, tests and scores against tables, hand-computed numbers and simulations."""

import math
import random
from statistics import fmean, stdev

import pytest

from headrace.core.statistics import (
    Interval,
    accept,
    break_even_steps,
    drifted,
    look_error,
    no_worse,
    order_abba,
    paired_ratio,
    seeds_better,
    seeds_enough,
    seeds_error,
    seeds_ratio,
    t_two_sided,
)

INF = math.inf


@pytest.mark.parametrize(
    ("level", "freedom", "t"),
    [  # printed tables of Student's t
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 4, 2.776),
        (0.95, 10, 2.228),
        (0.95, 30, 2.042),
        (0.99, 5, 4.032),
        (0.80, 7, 1.415),
        (0.999, 1, 636.619),
        (0.95, 1000, 1.962),
        (0.5, 2, math.sqrt(2 / 3)),
    ],
)
def test_t_is_that_of_the_tables(level: float, freedom: int, t: float) -> None:
    assert t_two_sided(level, freedom) == pytest.approx(t, rel=3e-4)


# --- two plans, timed in turn ----------------------------------------------------------------


def test_a_ratio_is_the_mean_of_the_pairs_logs() -> None:
    found = paired_ratio([2 * math.exp(0.1), 2 * math.exp(-0.1)], [1.0, 1.0])
    half = 12.7062 * 0.1  # the deviation, 0.1 sqrt 2, over sqrt 2
    assert found.value == pytest.approx(2) and found.n == 2
    assert math.log(found.high / 2) == pytest.approx(half, rel=1e-4)
    assert math.log(2 / found.low) == pytest.approx(half, rel=1e-4)


def test_a_trimmed_ratio_forgets_blocks_that_are_off() -> None:
    """Tukey's and McLaughlin's interval: of 8 pairs 1 goes at both ends, so t(5) is 2.571."""
    logs = [0.10, 0.11, 0.12, 0.09, 0.10, 0.11, 0.9, -0.5]
    a, ones = [math.exp(log) for log in logs], [1.0] * 8
    found = paired_ratio(a, ones, trimmed=True)
    kept = [0.09, 0.09, 0.10, 0.10, 0.11, 0.11, 0.12, 0.12]
    half = 2.5706 * stdev(kept) / (6 / 8) / math.sqrt(8)
    assert math.log(found.value) == pytest.approx(0.105) and found.n == 8
    assert math.log(found.high) - 0.105 == pytest.approx(half, rel=1e-4)
    assert paired_ratio(a, ones).low < 0.85 < 1.08 < found.low
    assert paired_ratio(a[:7], ones[:7], trimmed=True) == paired_ratio(a[:7], ones[:7])


def test_a_trimmed_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw, held = random.Random(1), {8: 0, 10: 0, 14: 0}
    for n in held:
        for _ in range(1500):
            a = [math.exp(draw.gauss(0, 0.01)) for _ in range(n)]
            held[n] += paired_ratio(a, [1.0] * n, trimmed=True).holds(1.0)
    assert all(0.92 < hits / 1500 < 0.97 for hits in held.values()), held


def _timed(rounds: int, a_s: float, b_s: float, drift: float) -> dict[str, list[list[float]]]:
    blocks: dict[str, list[list[float]]] = {"A": [], "B": []}
    for place, side in enumerate(order_abba(rounds)):
        seconds = (a_s if side == "A" else b_s) * math.exp(drift * place)
        blocks[side].append([seconds] * 5)
    return blocks


def test_a_steady_drift_leaves_the_ratio_and_is_seen_at_the_ends() -> None:
    assert order_abba(2) == list("ABBAABBA")
    blocks = _timed(2, 0.110, 0.100, drift=0.01)
    found = paired_ratio(blocks["A"], blocks["B"])
    assert found.value == pytest.approx(1.1, rel=1e-12) and found.low < 1.1 < found.high
    one_sided = fmean(map(fmean, blocks["A"][2:])) / fmean(map(fmean, blocks["B"][:2]))
    assert one_sided > 1.13  # what A after B would have told
    assert drifted(blocks["A"][0], blocks["A"][-1], 0.05)
    assert not drifted(blocks["A"][0], blocks["A"][-1], 0.08)
    assert drifted(1.08, 1.0, 0.05)  # faster at the end is a drift too


def test_one_slow_step_moves_nothing_and_a_mean_is_the_callers_to_give() -> None:
    a, b = [[1.0, 1.01, 1.02]] * 4, [[0.9, 0.91, 0.92]] * 4
    slow = [[0.9, 0.91, 50.0], *b[1:]]
    assert paired_ratio(a, slow).value == pytest.approx(paired_ratio(a, b).value)
    by_mean = paired_ratio(a, [fmean(block) for block in slow]).value
    assert by_mean == pytest.approx((1.01 / 17.27) ** 0.25 * (1.01 / 0.91) ** 0.75)


def test_a_noisy_block_leaves_it_undecided() -> None:
    a, b = [1.0] * 6, [0.95] * 6
    assert accept(paired_ratio(a, b), 0.01) == "better"
    assert accept(paired_ratio(b, a), 0.01) == "worse"
    assert accept(paired_ratio(a, [*b[:5], 1.4]), 0.01) == "undecided"
    assert accept(paired_ratio(a[:1], b[:1]), 0.01) == "undecided"  # one pair tells no noise
    assert accept(paired_ratio(a, b), 0.06) == "undecided"  # a gain, and not one that counts


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw, held = random.Random(0), {0.95: 0, 0.8: 0}
    for _ in range(1000):
        a = [math.exp(draw.gauss(0.2, 0.02)) for _ in range(6)]
        b = [math.exp(draw.gauss(0.0, 0.02)) for _ in range(6)]
        for level in held:
            held[level] += paired_ratio(a, b, level).holds(math.exp(0.2))
    assert 0.93 < held[0.95] / 1000 < 0.97 and 0.77 < held[0.8] / 1000 < 0.83


def test_tuning_is_paid_back() -> None:
    assert break_even_steps(480, 0.5, 0.4) == pytest.approx(4800)
    assert break_even_steps(480, 0.4, 0.4) == break_even_steps(480, 0.4, 0.5) == INF


@pytest.mark.parametrize(
    ("mean", "verdict"), [(0.0, "no worse"), (0.02, "worse"), (-0.5, "no worse")]
)
def test_a_mean_is_shown_to_be_no_worse(mean: float, verdict: str) -> None:
    """Four batches of two: their means deviate by 0.00115, so t(3) of 0.05 gives 2.353 of half."""
    row = [mean + off for off in (0.001, 0.001, -0.001, -0.001, 0.001, 0.001, -0.001, -0.001)]
    found = no_worse(row, 0.01, 0.95, batches=4)
    assert found.verdict == verdict and found.mean == pytest.approx(mean)
    assert found.half == pytest.approx(2.3534 * 0.0011547 / 2, rel=1e-4)
    assert no_worse([5.0, *row], 0.01, 0.95, batches=4) == found, "no whole batch"
    centre = max(mean, 0.0) / 2
    wide = no_worse([centre + 20 * (one - mean) for one in row], 0.01, 0.95, batches=4)
    assert wide.verdict == "not shown" and wide.enough > 8 * len(row)


@pytest.mark.parametrize("like", [0.0, 0.5])
def test_a_mean_at_the_margin_is_taken_for_none_as_often_as_it_says(like: float) -> None:
    """Check that a mean at the margin passes in under 7% of 1,000 rows, correlated or not."""
    draw, passed = random.Random(1), 0
    for _ in range(1000):
        row, last = [], 0.0
        for _ in range(160):
            last = like * last + draw.gauss(0, 0.01 * math.sqrt(1 - like * like))
            row.append(0.01 + last)
        passed += no_worse(row, 0.01, 0.95).verdict == "no worse"
    assert passed / 1000 < 0.07


# --- seeds -----------------------------------------------------------------------------------


def times(logs: object) -> list[float]:
    """Return seconds to a target, 10 s times e to the power of each given logarithm."""
    return [10 * math.exp(log) for log in logs]  # type: ignore[attr-defined]


def test_two_samples_of_two_seeds_have_two_degrees_of_freedom() -> None:
    """The spread is 0.0707 of either side, so t is its gain over that; t(2) of 0.01 is 6.965."""
    theirs = times([0.0, 0.1])
    for gain, sure in ((0.49, False), (0.50, True)):
        ours = times([-gain, 0.1 - gain])
        assert (seeds_error(ours, theirs) < 0.01) == sure
        assert seeds_better(ours, theirs, 2, 0.975) == sure  # of which 0.4 are spent
        assert not seeds_better(theirs, ours, 2)
    found = seeds_ratio(times([-0.5, -0.4]), theirs)  # t(2) of 0.95 is 4.303
    assert found is not None and found.n == 2
    assert math.log(found.low) == pytest.approx(0.5 - 4.3027 * 0.0707107, rel=1e-4)


def test_pairs_count_from_five_seeds_on() -> None:
    theirs = [100.0, 200.0, 50.0, 400.0, 80.0]  # an hour in which the machine was slow
    ours = [90.0, 184.0, 45.5, 356.0, 72.0]  # each 8% to 11% less
    assert seeds_better(ours, theirs, 5)
    assert not seeds_better(ours, theirs[::-1], 5)  # the same numbers, other pairs
    assert not seeds_better(theirs, ours, 5) and not seeds_better(ours[:4], theirs[:4], 4)
    found = seeds_ratio(ours, theirs)
    assert found is not None and 1.05 < found.low < found.value < found.high < 1.2


def test_seeds_that_happen_to_lie_close_are_not_believed() -> None:
    """Two runs may end at the same evaluation; 2% is the least that seeds are taken to differ."""
    assert not seeds_better([9.0] * 2, [10.0] * 2, 2)  # t is 0.105 / 0.02
    assert seeds_better([8.0] * 2, [10.0] * 2, 2)
    assert seeds_better([9.0] * 3, [10.0] * 3, 3)


def test_the_looks_share_the_error() -> None:
    for most in (1, 2, 3, 5, 7, 20):
        shares = [look_error(n, most, 0.01) for n in range(1, most + 1)]
        assert sum(shares) == pytest.approx(0.004) and shares[-1] > 0
    shares = [look_error(n, 7, 1 / 0.4) for n in range(1, 8)]
    assert shares == pytest.approx([0, 0.4, 0.25, 0, 0.1, 0, 0.25])


def accepted_share(
    draws: int, gain: float, ours: float, theirs: float, hour: float = 0.0
) -> tuple[float, float]:
    """The share of changes that seven seeds show, and the mean seeds that those took.

    Args:
        draws: changes.
        gain: of each, the logarithm of the time before over after.
        ours: standard deviation of a run's logarithm with the change.
        theirs: without.
        hour: of what both runs of a pair share.
    """
    draw, taken = random.Random(1), []
    for _ in range(draws):
        one: list[float] = []
        two: list[float] = []
        for seed in range(1, 8):
            both = draw.gauss(0, hour)
            one += times([both + draw.gauss(0, theirs)])
            two += times([both + draw.gauss(-gain, ours)])
            if seeds_better(two, one, 7):
                taken.append(seed)
                break
    return len(taken) / draws, sum(taken) / max(1, len(taken))


@pytest.mark.parametrize(
    ("ours", "theirs", "hour", "most"),
    [
        pytest.param(0.1, 0.1, 0.0, 0.01, marks=pytest.mark.slow),
        pytest.param(0.03, 0.12, 0.0, 0.01, marks=pytest.mark.slow),
        (0.05, 0.05, 0.1, 0.01),
        (0.3, 0.05, 0.0, 0.01),
    ],
    ids=["alike", "four times as wide", "the machine drifts", "six times as wide"],
)
def test_what_does_nothing_is_shown_once_in_a_hundred_at_most(
    ours: float, theirs: float, hour: float, most: float
) -> None:
    """Check how many of 4,000 changes without gain pass, to two standard errors (0.003)."""
    share, _ = accepted_share(4000, 0.0, ours, theirs, hour)
    assert share <= most + 0.003


@pytest.mark.parametrize(
    ("ratio", "spread", "least", "seeds"),
    [
        (1.75, 0.04, 0.999, 2.6),
        (1.75, 0.08, 0.997, 3.4),
        (1.2, 0.04, 0.95, 4.7),
        (1.1, 0.04, 0.6, 7.0),
    ],
)
def test_few_seeds_show_a_large_effect(
    ratio: float, spread: float, least: float, seeds: float
) -> None:
    share, taken = accepted_share(1000, math.log(ratio), spread, spread)
    assert share >= least and taken <= seeds


def test_the_seeds_that_should_show_a_gain() -> None:
    """Simulated: with as many, four of five times it is shown at the last look."""
    spread, gain = 0.05, 0.12
    theirs = times([-spread / math.sqrt(2), spread / math.sqrt(2)])
    enough = seeds_enough([t * math.exp(-gain) for t in theirs], theirs)
    assert enough == 8
    draw, shown = random.Random(1), 0
    for _ in range(1000):
        one, two = (times([draw.gauss(m, spread) for _ in range(enough)]) for m in (0, -gain))
        shown += seeds_error(two, one) < look_error(enough, enough, 0.01)
    assert 0.7 < shown / 1000 < 0.92
    assert seeds_enough(theirs, theirs) is None and seeds_enough([9.99] * 2, [10.0] * 2) is None


def test_failures_are_infinitely_slow() -> None:
    fine, slower = [1.0, 1.1, 0.9, 1.05, 0.95], [1.5, 1.7, 1.3, 1.6, 1.4]
    assert seeds_better(fine, slower, 5)
    assert seeds_error([*fine[:4], INF], slower) == 1  # ours failed alone
    assert seeds_error([*fine, INF], [*slower, INF]) == seeds_error(fine, slower)  # tells nothing
    assert seeds_error(fine, [*slower[:4], INF]) < 0.01  # theirs alone: a win
    assert seeds_error(slower, [*fine[:4], INF]) > 0.1  # one win without a size, four losses
    assert seeds_error(fine, [INF] * 5) == 2 / 32 and seeds_error([INF] * 5, [INF] * 5) == 1
    sized = [1.05, 1.35, INF, INF, INF, INF]  # the sign test's 1 of 64 decides
    assert seeds_error([1.0] * 6, sized) == 2 / 64
    assert seeds_ratio([INF, 1.0], [1.0, INF]) is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: paired_ratio([1.0], [1.0, 2.0]),
        lambda: paired_ratio([], []),
        lambda: paired_ratio([[1.0, 0.0, 0.0]], [[1.0]]),
        lambda: paired_ratio([1.0, 1.1], [1.0, 1.0], 95),
        lambda: seeds_error([math.nan, 1.0], [INF, 1.0]),
        lambda: seeds_better([1.0], [1.0], 1, 1.0),
        lambda: seeds_better([1.0] * 3, [1.0] * 3, 2),
        lambda: no_worse([0.0] * 7, 0.01, 0.95, 8),
        lambda: accept(Interval(1, 1, 1, 2), -0.1),
        lambda: order_abba(0),
        lambda: t_two_sided(0.95, 0),
    ],
)
def test_misuse_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError):
        wrong()  # type: ignore[operator]
