"""Easy rows come first, a row comes again only when no open one waits, and any row stands alone."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from headrace.data.mixture import deal
from headrace.data.order import BlockedOrder, MixtureOrder
from headrace.data.paced_order import PacedOrder, plan_legs
from headrace.plan.curriculum import CurriculumConfig, Pacing

ROWS = 1500
CASES = [(1, 4, 30), (7, 1, 500), (97, 5, 40), (300, 16, 250), (200, 3, 900)]
"""(units, stages, rows until all are open): few and many passes before that."""


def _scores(units: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=units).astype(np.float32)
    return np.round(values, 1)  # many are equal


def _stages(pacing: Pacing, stages: int, ends: int) -> list[tuple[int, float]]:
    knobs = CurriculumConfig(pacing=pacing, start=0.1, stages=stages)
    return knobs.open_shares(ends)


@pytest.mark.parametrize(
    ("pacing", "first"),
    [("linear", "easy"), ("root", "hard"), ("step", "easy"), ("exponential", "easy")],
)
@pytest.mark.parametrize(("units", "stages", "ends"), CASES)
def test_rows_come_from_what_is_open_and_as_evenly_as_that_allows(
    pacing: Pacing, units: int, stages: int, ends: int, first: str
) -> None:
    scores, shares = _scores(units), _stages(pacing, stages, ends)
    order = PacedOrder([scores], shares, seed=3, hard_first=first == "hard", run_rows=ROWS)
    _, unit = order(0, ROWS)
    hardness = np.sort(scores if first == "easy" else -scores)
    seen: Counter[int] = Counter()
    now: set[int] = set()  # rows of the pass that runs
    begun = 0
    opens = {begin: min(units, int(np.ceil(share * units))) for begin, share in shares}
    count, ranks = 0, np.argsort(order.pacers[0].sorted)
    for row, one in enumerate(unit.tolist()):
        count = opens.get(row, count)
        own = scores[one] if first == "easy" else -scores[one]
        assert own <= hardness[count - 1] and ranks[one] < count
        if len(now) == count or not row:  # all that is open was read
            now, begun = set(), begun + 1
        assert one not in now  # none comes again while an open one waits
        now.add(one)
        seen[one] += 1
        if row % 97 == 0:
            assert order.passes(row + 1) == begun
    assert order.closed(0, ends // 2) == 0
    # From where all are open, and the pass that ran there is over, each epoch has every row once.
    last = [leg.first for leg in order.pacers[0].legs][-1]
    whole = (ROWS - last) // units
    assert whole and Counter(unit[last : last + whole * units].tolist()) == dict.fromkeys(
        range(units), whole
    )
    # Any row alone is the same, in any order.
    for row in (0, 1, ends - 1, ends, ROWS - 1, 10**6):
        assert order(row, 1)[1] == order(max(0, row - 3), 7)[1][min(row, 3)]


@pytest.mark.parametrize("first", ["easy", "hard"])
@pytest.mark.parametrize(("units", "ends"), [(300, 90), (300, 299), (300, 300), (300, 750), (5, 1)])
def test_sorted_rows_rise_over_the_whole_range(units: int, ends: int, first: str) -> None:
    scores = _scores(units)
    shares = _stages("sorted", 16, ends)
    order = PacedOrder(
        [scores], shares, seed=1, hard_first=first == "hard", strict=True, run_rows=ends
    )
    source, unit = order(0, ends + 2 * units)
    sign = 1 if first == "easy" else -1
    read = sign * order.scores_of(source, unit)
    for begin in range(0, ends, units):
        one = read[begin : min(begin + units, ends)]
        assert (np.diff(one) >= 0).all()
        if len(one) > 1:  # easy and hard are both met
            ranks = np.searchsorted(np.sort(sign * scores), one)
            assert (
                ranks[0] < -(-units // len(one)) and ranks[-1] >= units - 2 * units // len(one) - 60
            )
    most = -(-ends // units)
    counts = Counter(unit[: most * units].tolist())  # the pass that was cut is read to its end
    assert counts == dict.fromkeys(range(units), most)


def test_the_mean_score_rises_with_what_opens() -> None:
    scores = np.random.default_rng(1).normal(size=5000)
    order = PacedOrder([scores], _stages("linear", 8, 2000), seed=0, run_rows=2500)
    means = order.mean_scores(2500)
    assert (np.diff(means[:8]) > 0).all() and means[0] < order.mean_score < means[9]
    assert order.mean_scores(400) == [
        means[0],
        order.scores_of(*order(250, 150)).mean(dtype=np.float64),
    ]
    assert order.mean_scores(1) == [order.scores_of(*order(0, 1))[0]]
    long = PacedOrder([scores], _stages("linear", 8, 80_000), seed=0, run_rows=100_000)
    exact = [long.scores_of(*long(n * 10_000, 10_000)).mean() for n in range(10)]
    assert long.mean_scores(100_000) == pytest.approx(exact, abs=0.05)  # by blocks of its rows
    assert order.open_share(0) == pytest.approx(0.1) and order.open_share(2000) == 1


def test_sources_are_one_pool_or_each_paced_by_its_share() -> None:
    parts = [_scores(60, 1), _scores(140, 2) + 5]
    together = PacedOrder(parts, _stages("step", 1, 100), seed=0, run_rows=400)
    source, unit = together(0, 100)
    assert not source.any() and len(set(unit.tolist())) == 20  # all of the first is easier
    source, unit = together(100, 400)
    assert Counter(zip(source.tolist(), unit.tolist(), strict=True)).total() == 400
    shares = _stages("linear", 4, 600)
    mixture = deal([(0, [Fraction(3), Fraction(1)])], [None, None])
    mixed = PacedOrder(parts, shares, seed=0, mixture=mixture, run_rows=2400)
    source, unit = mixed(0, 2400)
    plain = MixtureOrder([60, 140], mixture, seed=0)
    assert (source == plain(0, 2400)[0]).all()  # who is dealt stays
    for row in range(600):
        s = source[row]
        share = [share for begin, share in shares if begin <= row][-1]
        count = int(np.ceil(share * len(parts[s])))
        assert parts[s][unit[row]] <= np.sort(parts[s])[count - 1]
    assert mixed.closed(0, 20) == 0 and mixed.closed(590, 10) == 0


def test_sources_of_stages_and_limits_are_paced_by_what_is_dealt_of_them() -> None:
    parts = [_scores(60, 1), _scores(140, 2), _scores(30, 3)]
    one, none = Fraction(1), Fraction(0)
    mixture = deal([(0, [one, one, none]), (500, [none, one, one])], [120, None, None])
    end = PacedOrder(parts, [(0, 0.2), (300, 1.0)], seed=2, mixture=mixture, run_rows=900)
    source, unit = end(0, 900)
    assert (source == MixtureOrder([60, 140, 30], mixture, seed=2)(0, 900)[0]).all()
    counts = [Counter(unit[source == s].tolist()) for s in range(3)]
    assert counts[0].total() == 120 and len(counts[0]) <= 60
    late = unit[source == 2]  # it begins when all is open
    assert sorted(late[:30].tolist()) == [*range(30)]
    assert end.passes_of(2, 900) == -(-len(late) // 30)
    assert (end(450, 100)[1] == unit[450:550]).all() and end.closed(0, 300) == 0
    # Limits end a stream, and what would come after it is asked for by no one.
    short = deal([(0, [one, one])], [60, 140])
    assert short.end == 200
    last = PacedOrder(parts[:2], [(0, 0.5), (900, 1.0)], seed=2, mixture=short, run_rows=200)
    blocked = BlockedOrder(last)
    assert (blocked(190, 10)[1] == last(190, 10)[1]).all() and last.open_share(199) == 0.5
    assert last.passes(200) == 2 and len(last.mean_scores(200)) == 10
    with pytest.raises(IndexError, match="row 200 is outside"):
        blocked(199, 2)


def test_what_is_closed_is_told_by_scores_alone() -> None:
    order = PacedOrder([np.arange(100.0)], [(0, 0.1), (50, 1.0)], seed=0, run_rows=100)
    assert order.closed(0, 50) == 0
    order.pacers[0].sorted[:10] += 20  # another order than that of the scores
    order.pacers[0].stages = ((0, 5), (50, 100))
    order.pacers[0].sorted[4] = 0
    assert order.closed(0, 50) > 0


def test_legs_are_few_whatever_is_read() -> None:
    legs = plan_legs(10, [(0, 1), (10**6, 5), (2 * 10**6, 10)], strict=False)
    assert len(legs) <= 6 and legs[-1].read == 0
    assert len(plan_legs(10**9, [(n * 1000, n + 1) for n in range(64)], strict=False)) < 200
