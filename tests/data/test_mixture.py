"""Mixtures are exact integers at every border, whatever stages and limits there are."""

import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from facts import in_order

from headrace.core.errors import ConfigError
from headrace.data.mix_count import REPEATED_OFTEN, count_mix
from headrace.data.mixture import by_temperature, deal, fingerprint, mixture_of
from headrace.data.order import PERIOD, MixtureOrder
from headrace.plan.plan import Plan

T = 16


def brute(
    stages: list[tuple[int, list[Fraction]]], limits: list[int | None], rows: int
) -> list[list[Fraction]]:
    """Return what each source should have after every row, poured out in exact fractions.

    It knows no stretches: it pours each row by the weights of those that are not full, in parts
    where one becomes full within the row.
    """
    had = [Fraction(0)] * len(limits)
    ends = {n: limit for n, limit in enumerate(limits) if limit is not None}
    after = [[*had]]
    for row in range(rows):
        weights = next(w for first, w in reversed(stages) if first <= row)
        left = Fraction(1)
        while left:
            open_ = [n for n, w in enumerate(weights) if w and (n not in ends or had[n] < ends[n])]
            total = sum(weights[n] for n in open_)
            most = [(ends[n] - had[n]) * total / weights[n] for n in open_ if n in ends]
            part = min([left, *most])
            for n in open_:
                had[n] += part * weights[n] / total
            left -= part
        after.append([*had])
    return after


def some(seed: int) -> tuple[list[tuple[int, list[Fraction]]], list[int | None], int]:
    """Return stages, limits and rows by chance; the last source has no limit and some weight."""
    draw = random.Random(seed)
    count, rows = draw.randint(2, 4), draw.choice([60, 700, 2500])
    firsts = [0, *sorted(draw.sample(range(1, rows), draw.randint(0, 3)))]
    weights = [
        [Fraction(draw.choice([0, 1, 2, 5, 13])) for _ in range(count - 1)] + [Fraction(3)]
        for _ in firsts
    ]
    limits = [draw.choice([None, 0, draw.randint(1, rows)]) for _ in range(count - 1)]
    return list(zip(firsts, weights, strict=True)), [*limits, None], rows


@pytest.mark.parametrize("seed", range(12))
def test_every_border_is_exact(seed: int) -> None:
    """Compare rows as they are dealt with those that a brute-force dealer pours out."""
    stages, limits, rows = some(seed)
    mixture = deal(stages, limits)
    order = MixtureOrder(units := [7, 30, 11, 400][: len(limits)], mixture, seed=seed)
    source, unit = order(0, rows)
    wanted = brute(stages, limits, rows)
    for stretch in mixture.stretches:
        stop = min(rows, rows if stretch.rows is None else stretch.first + stretch.rows)
        first = min(stretch.first, rows)
        counts = np.bincount(source[first:stop], minlength=len(limits))
        assert first == rows or (counts[[share == 0 for share in stretch.shares]] == 0).all()
        if stretch.rows is not None and stop < rows:
            assert counts.tolist() == list(stretch.quotas)
            # Each stretch rounds anew, so that a border is exact to one row for each so far.
            off = [abs(b - w) for b, w in zip(order.counts(stop), wanted[stop], strict=True)]
            assert max(off) < 1 + stretch_number(mixture, stretch)
    for n, limit in enumerate(limits):
        assert limit is None or (source == n).sum() <= limit
        mine = unit[source == n]
        whole = mine[: len(mine) // units[n] * units[n]].reshape(-1, units[n])
        assert (np.sort(whole) == np.arange(units[n])).all()
    for upto in (1, rows // 3, rows):
        assert (
            order.counts(upto).tolist()
            == np.bincount(source[:upto], minlength=len(limits)).tolist()
        )
    for first in (0, rows // 2, rows - 5):
        one, two = MixtureOrder(units, mixture, seed=seed)(first, 5)
        assert (one == source[first : first + 5]).all() and (two == unit[first : first + 5]).all()


def stretch_number(mixture: Any, stretch: Any) -> int:
    return mixture.stretches.index(stretch)


def test_every_prefix_is_right_to_one_row() -> None:
    """Within a stage the rows up to each period's end, and the stage's own, are off by less."""
    weights = [Fraction(1), Fraction(5), Fraction(7)]
    order = MixtureOrder(
        [9, 9, 9], deal([(0, [Fraction(1)] * 3), (777, weights)], [None] * 3), seed=4
    )
    source, _ = order(777, 5 * PERIOD)
    for rows in range(PERIOD, 5 * PERIOD + 1, PERIOD):
        counts = np.bincount(source[:rows], minlength=3)
        assert max(abs(c - rows * w / 13) for c, w in zip(counts, weights, strict=True)) < 1
    assert order.counts(777).tolist() == [259] * 3


def make(**keys: Any) -> Plan:
    data = {"sources": ("a", "b", "c"), "sequence_length": T, **keys.pop("data", {})}
    return Plan(**{"data": data, "goal": {"steps": 100}, "batch": {"tokens": 8 * T}, **keys})


STAGES = [{"until": 0.755, "weights": [1, 1, 2]}, {"temperature": 2}]
TOKENS, UNITS = [16_001, 1601, 161], [1000, 100, 10]


def test_a_plan_is_counted_as_its_order_deals() -> None:
    """Borders are rows, of a growing batch too; limits are kept, and others get the rest."""
    ramp: Any = {"batch_ramp": {"divide": 2, "until": 50}}
    for more in ({}, {"techniques": ramp}):
        plan = make(data={"mixture": {"stages": STAGES, "max_epochs": [0, 0, 4]}}, **more)
        count = count_mix(plan, TOKENS, UNITS)
        assert count is not None and count.exact
        rows = plan.batches.before(100) // T
        border = int(Fraction("0.755") * rows)
        assert count.begins == (0, border * T) and border % 8
        mixture = mixture_of(plan, TOKENS, UNITS)
        assert mixture is not None
        source, _ = MixtureOrder(UNITS, mixture, seed=plan.seed)(0, rows)
        assert [one.rows for one in count.sources] == np.bincount(source).tolist()
        second = [one.rows for one in count.stages if one.stage == 1]
        assert second == np.bincount(source[border:], minlength=3).tolist()
        assert count.sources[2].rows == 40 and count.sources[2].epochs == REPEATED_OFTEN
        assert not count.repeated and sum(one.share for one in count.sources) == pytest.approx(1)


def test_repetition_is_counted_by_size_too() -> None:
    count = count_mix(make(goal={"steps": 1000}), TOKENS, UNITS)
    assert count is not None and count.exact
    assert [one.epochs for one in count.sources] == pytest.approx([8000 / 1110] * 3, abs=0.5)
    assert count.repeated == count.sources and sum(one.rows for one in count.sources) == 8000
    assert "arXiv 2305.16264" in [*count.lines()][1]
    assert (
        count_mix(make(goal={"minutes": 1}, schedule={"kind": "constant"}), TOKENS, UNITS) is None
    )


def test_a_temperature_evens_sources_up() -> None:
    assert by_temperature([900, 100], 1) == [900, 100]
    weights = by_temperature([900, 100], 2)
    assert weights[1] / weights[0] == pytest.approx(1 / 3) and weights[0] == 1


def test_a_moved_border_is_another_mixture() -> None:
    prints = {
        fingerprint(make(data=data, **goal))
        for data in ({"mixture": {"stages": STAGES}}, {"mixture": {"weights": [1, 2, 3]}})
        for goal in ({}, {"goal": {"steps": 200}})
    }
    assert len(prints) == 3  # weights that stay have no border
    assert (
        fingerprint(make()) == "by size"
        and fingerprint(make(data={"weights": [1, 2, 3]})) == "[1.0, 2.0, 3.0]"
    )


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "a share too small": (
        {"weights": [1e-6, 1, 1]},
        {},
        ("data.weights", "5e-07", "smallest", "1.5e-05"),
    ),
    "the same in a mixture": (
        {"mixture": {"weights": [1e-6, 1, 1]}},
        {},
        ("data.mixture.weights", "5e-07", "smallest"),
    ),
    "a temperature that leaves nothing": (
        {"mixture": {"temperature": 0.001}},
        {},
        ("data.mixture by size", "1e-300", "smallest"),
    ),
    "limits before the end": (
        {"mixture": {"max_epochs": 0.5}},
        {},
        ("data.mixture", "stage 0", "used up after 555 sequences", "the run reads 800"),
    ),
    "no whole sequence": (
        {"mixture": {"max_tokens": [15, 15, 15]}},
        {},
        ("stage 0", "used up after 0 sequences", "the run reads 800"),
    ),
    "a stage whose sources are gone": (
        {"mixture": {"stages": [{"until": 3200}, {"weights": [0, 0, 1]}], "max_epochs": [0, 0, 2]}},
        {},
        ("stage 1", "used up after 218 sequences", "the run reads 800"),
    ),
    "limits and no end": (
        {"mixture": {"max_tokens": [160, 320, 160]}},
        {"goal": {"minutes": 1}, "schedule": {"kind": "constant"}},
        ("used up after 40 sequences", "nothing in the plan says"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_dealt_is_refused(name: str) -> None:
    data, keys, words = REFUSED[name]
    with pytest.raises(ConfigError, match=in_order(*words)):
        mixture_of(make(data=data, **keys), TOKENS, UNITS)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "two weights": ({"weights": [1, 1, 1], "mixture": {}}, {}, ("data.weights", "data.mixture")),
    "weights and temperature": (
        {"mixture": {"weights": [1, 1, 1], "temperature": 2}},
        {},
        ("data.mixture", "weights and a temperature"),
    ),
    "too few": ({"mixture": {"weights": [1, 1]}}, {}, ("data.mixture.weights", 2, 3)),
    "nothing": ({"mixture": {"weights": [0, 0, 0]}}, {}, ("all 0",)),
    "a source that is never read": (
        {"mixture": {"weights": [1, 1, 0]}},
        {},
        ("reads nothing of c",),
    ),
    "too few limits": ({"mixture": {"max_tokens": [5]}}, {}, ("max_tokens", 1, 3)),
    "no end": ({"mixture": {"stages": [{}, {}]}}, {}, ("stages.0", "where it ends")),
    "an end of the last": ({"mixture": {"stages": [{"until": 0.5}]}}, {}, ("last", "0.5")),
    "shares and tokens": (
        {"mixture": {"stages": [{"until": 0.5}, {"until": 5000}, {}]}},
        {},
        ("shares of the horizon and at counts",),
    ),
    "falling": (
        {"mixture": {"stages": [{"until": 0.5}, {"until": 0.4}, {}]}},
        {},
        ("one after the other", "0.5, 0.4"),
    ),
    "no horizon": (
        {"mixture": {"stages": [{"until": 0.5}, {}]}},
        {"goal": {"minutes": 1}, "schedule": {"kind": "constant"}},
        ("a horizon that the plan does not say",),
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_mixture_that_contradicts_its_plan_is_refused(name: str) -> None:
    data, keys, words = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=in_order(*words)):
        make(data=data, **keys)


def test_a_mixture_is_read_as_it_is_printed() -> None:
    plan = make(data={"mixture": {"stages": STAGES, "max_epochs": [0, 0, 4]}})
    from headrace.plan.technique import installed

    assert Plan.read(plan.to_toml(), installed()) == plan
