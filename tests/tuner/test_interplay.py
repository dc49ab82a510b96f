"""What rows of an ablation say: gains the right way round, their errors, and words for them."""

import math
from typing import Any

import pytest

from headrace.core.statistics import Interval
from headrace.tuner.interplay import (
    ADDED,
    LEFT_OUT,
    NOTHING,
    memory_of,
    pair_table,
    ratio_of,
    single_table,
    stand,
    worth,
)


def row(
    low: float,
    value: float,
    high: float,
    measurement: str = ADDED,
    *,
    memory: float | None = None,
    n: int = 4,
    **more: Any,
) -> dict[str, Any]:
    metrics: dict[str, Any] = {"speed_ratio": {"low": low, "value": value, "high": high}}
    if memory is not None:
        metrics["memory_ratio"] = {"value": memory}
    return {"measurement": measurement, "n": n, "metrics": metrics, **more}


def near(value: float, share: float = 0.004, **how: Any) -> dict[str, Any]:
    return row(value / (1 + share), value, value * (1 + share), **how)


def test_what_was_left_out_is_turned_round() -> None:
    added, left = row(1.1, 1.25, 1.3, memory=0.8), row(0.5, 0.8, 1.0, LEFT_OUT, memory=1.25)
    assert ratio_of(added) == Interval(1.1, 1.25, 1.3, 4)
    assert ratio_of(left) == Interval(1.0, 1.25, 2.0, 4)
    assert memory_of(added) == memory_of(left) == 0.8
    assert ratio_of(None) is None and ratio_of({"measurement": ADDED}) is None
    assert memory_of(None) is None and memory_of(near(1.1)) is None


def test_a_products_errors_are_put_together_as_independent_ones() -> None:
    one, two = row(1.0 / 1.03, 1.0, 1.06), row(1.0 / 1.04, 1.0, 1.08, n=3)
    found = stand(near(1.0), one, two, ("a", "b")).alone
    assert found is not None and found.value == 1.0 and found.n == 3
    assert math.log(found.low) == pytest.approx(-math.hypot(math.log(1.03), math.log(1.04)))
    assert math.log(found.high) == pytest.approx(math.hypot(math.log(1.06), math.log(1.08)))


@pytest.mark.parametrize(
    ("one", "two", "both", "says"),
    [
        (1.1, 1.2, 1.1, "conflicts"),
        (1.0, 1.2, 1.1, "conflicts"),
        (0.95, 1.2, 1.1, "cancels"),  # one of them costs time alone
        (1.1, 1.2, 1.199, "cancels"),  # as fast as the better one
        (1.05, 1.2, 1.18, "cancels"),
    ],
)
def test_a_conflict_is_slower_than_the_better_one_though_neither_costs_time(
    one: float, two: float, both: float, says: str
) -> None:
    share = 0.012 if both == 1.18 else 0.004
    rows = (near(v, share) for v in (both, one, two))
    assert stand(*rows, ("a", "b")).says == says


def test_an_interval_that_may_be_below_is_undecided() -> None:
    wide = row(0.9, 1.32, 1.321)
    assert stand(wide, near(1.1, 1e-4), near(1.2, 1e-4), ("a", "b")).says == "undecided"


def test_what_is_missing_is_named() -> None:
    alone = stand(near(1.0), near(1.1), None, ("a", "b"))
    assert alone.says == NOTHING and alone.why == f"b alone: {NOTHING}"
    refused = {"measurement": ADDED, "refused": "no room\nat all"}
    assert stand(near(1.0), refused, near(1.1), ("a", "b")).why.startswith("a alone: no room")
    assert stand(refused, near(1.0), near(1.1), ("a", "b")).both is None
    (words,) = pair_table([stand(refused, near(1.0), near(1.1), ("a", "b"))])
    assert words == ["a + b", "", "", "not measured: no room"]


def test_words_for_a_technique_in_its_plan() -> None:
    assert worth(None, 0.01) == ""
    assert worth(near(1.05), 0.01) == "faster" and worth(near(1.05), 0.06) == "no difference seen"
    assert worth(near(1.05, measurement=LEFT_OUT), 0.01) == "slower"
    assert worth(near(1.0, memory=0.98), 0.01) == "less memory"
    assert worth(near(1.0, memory=0.995), 0.01) == "no difference seen"
    assert worth(near(1.0, memory=1.1, measurement=LEFT_OUT), 0.01) == "less memory"
    words = worth(near(1.05, changes="learning", drifted=True), 0.01)
    assert words == "faster, learns otherwise, the device drifted"
    left = {"a": row(0.8, 0.8, 0.8, LEFT_OUT, memory=1.25), "b": {"refused": "no room"}}
    assert single_table(["a", "b"], left, {}, 0.01) == [
        ["a", "+25.0% (+25.0 to +25.0)", "-20.0%", "", "faster, less memory"],
        ["b", "refused: no room", "", "", ""],
    ]
