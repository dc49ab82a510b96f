"""Check the scores of predictions against hand-computed numbers."""

import math
from collections.abc import Callable

import pytest
from scoring.accuracy import (
    coverage,
    kendall_tau,
    median_absolute_error,
    regret,
    relative_errors,
    wilson,
)

from headrace.core.statistics import Interval

INF = math.inf


def test_errors_are_shares_of_what_was_measured() -> None:
    assert relative_errors([1.1, 1.8], [1.0, 2.0]) == pytest.approx([0.1, 0.1])
    assert median_absolute_error([0.5, -1.0, 4.0], [1.0, -2.0, 1.0]) == pytest.approx(0.5)


def test_wilsons_interval_is_that_of_his_formula() -> None:
    found = wilson(8, 10)
    assert (found.low, found.value, found.high) == pytest.approx((0.4902, 0.8, 0.9433), abs=1e-4)
    assert wilson(0, 10).low == 0 and wilson(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert wilson(10, 10).high == 1 and wilson(8, 10, 0.8).high < found.high


def test_coverage_counts_ends_in() -> None:
    found = coverage([Interval(0, 1, 2, 1)] * 4, [0.0, 2.0, 2.1, 1.0])
    assert found.value == 0.75 and found.n == 4


def test_tau_b() -> None:
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert kendall_tau([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(5 / math.sqrt(5 * 6))
    assert math.isnan(kendall_tau([1, 1, 1], [1, 2, 3]))


def test_regret_is_of_the_pick_and_luck_is_no_merit() -> None:
    assert regret([3.0, 1.0, 2.0], [1.0, 1.2, 5.0]) == pytest.approx(0.2)
    assert regret([1.0, 2.0], [1.0, 0.9]) == pytest.approx(1 / 9)
    assert regret([1.0, 1.0], [1.0, 1.5]) == pytest.approx(0.5)
    assert regret([1.0, 2.0], [INF, 0.9]) == INF


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: relative_errors([1.0], [0.0]),
        lambda: wilson(3, 2),
        lambda: wilson(0, 0),
        lambda: kendall_tau([1.0, math.nan], [1.0, 2.0]),
        lambda: regret([1.0, math.nan], [1.0, 2.0]),
    ],
)
def test_what_is_no_measurement_is_an_error(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        wrong()
