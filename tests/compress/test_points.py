"""Which point is chosen: by size, by loss, and which points are on the front of both."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.compress.spec import PRESETS
from headrace.core.errors import UnsupportedError
from headrace.export import compression
from headrace.export.compression import Compression, PointReading, SizeGoal, check_reached
from headrace.report.compression import compression_page, front_of, verdict_of


def reading(name: str, size: int, rise: float) -> PointReading:
    """Return what a point of this size and loss would be."""
    return PointReading(name, name, size, 1.0 + rise, 2.0 * (1 + rise), rise, 0.1, 0.0, 9.0, 9.5)


WHOLE = reading("fp32", 80, 0.0)
POINTS = (reading("a", 10, 0.05), reading("b", 20, 0.01), reading("c", 25, 0.02))


def made(goal: SizeGoal, *points: PointReading) -> Compression:
    """Return a model with these points, or with the three of them."""
    return Compression("m", WHOLE, points or POINTS, goal, 9, {}, {})


@pytest.mark.parametrize(
    ("goal", "chosen"),
    [
        (SizeGoal(), "b"),  # 1% where nothing is asked
        (SizeGoal(rise=0.05), "a"),
        (SizeGoal(rise=0.001), None),
        (SizeGoal(budget_bytes=30), "b"),
        (SizeGoal(budget_bytes=15), "a"),
        (SizeGoal(budget_bytes=9), None),
    ],
)
def test_a_goal_chooses_among_points(goal: SizeGoal, chosen: str | None) -> None:
    found = made(goal)
    assert found.to_dict()["chosen"] == chosen
    assert compression_page(found) and verdict_of(found)


def test_of_equal_points_the_other_measure_decides() -> None:
    """Take in a budget the smaller of two that lose as little, else the better of two as small."""
    twins = reading("large", 20, 0.01), reading("small", 15, 0.01), reading("worse", 15, 0.02)
    assert getattr(made(SizeGoal(budget_bytes=30), *twins).chosen, "name", "") == "small"
    assert getattr(made(SizeGoal(rise=0.02), *twins).chosen, "name", "") == "small"


def test_a_goal_that_no_point_reaches_is_told_with_the_nearest() -> None:
    large = tuple(replace(one, bytes=one.bytes * 10**6) for one in POINTS)
    for goal, words, remedy in (
        (SizeGoal(budget_bytes=9_000_000), "the nearest is a, whose file", "--budget-mb 10"),
        (SizeGoal(rise=0.001), "the nearest is b, whose bits", "--max-loss 1%"),
    ):
        with pytest.raises(UnsupportedError, match=words) as refused:
            check_reached(made(goal, *large))
        assert refused.value.remedy.text == remedy
    check_reached(made(SizeGoal(), POINTS[0]))  # nothing was asked


def test_the_front_has_the_points_that_none_beats() -> None:
    """No other point is as small and as good; of two that are equal, the first stands for both."""
    more = reading("d", 20, 0.03), reading("e", 30, 0.005), reading("f", 30, 0.005)
    assert [point.name for point in front_of((*POINTS, *more))] == ["a", "b", "e"]
    assert front_of(()) == []


def test_as_few_matrices_as_reach_the_limit_keep_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 1% away; a limit of 2.5% takes 8 of 10, and none where 4 bits are within it."""
    names = [f"m{number}" for number in range(10)]
    monkeypatch.setattr(compression, "sensitivities", lambda *_: dict.fromkeys(names, 0.1))
    monkeypatch.setattr(compression, "ranked", lambda *_: names)
    work: Any = compression._Work.__new__(compression._Work)
    work.build, work.ids_BT, work.progress = SimpleNamespace(model=None), None, None
    work._quantize = lambda spec: {}
    work._rise = lambda spec: 0.1 - 0.01 * len(spec.exceptions)
    low = PRESETS["int4"]
    hybrid, measured = work.find_hybrid(low, [reading("int4", 10, 0.1)], SizeGoal(rise=0.025))
    assert list(hybrid.exceptions) == names[:8] and list(measured) == names
    hybrid, _ = work.find_hybrid(low, [reading("int4", 10, 0.1)], SizeGoal(rise=0.2))
    assert hybrid is None
