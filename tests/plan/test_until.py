"""A part of the run ends at a share of it or at a step, and values double until then."""

import pytest

from headrace.plan.until import doubled, end_step, value_at


@pytest.mark.parametrize(
    ("whole", "start", "wanted"), [(8, 2, [2, 4, 8]), (9, 2, [2, 4, 8, 9]), (5, 4, [4, 5])]
)
def test_values_double_up_to_the_whole(whole: int, start: int, wanted: list[int]) -> None:
    assert doubled(start, whole) == wanted


def test_a_value_is_a_function_of_the_step() -> None:
    found = [value_at(n, [2, 4, 8, 16], 6) for n in range(8)]
    assert found == [2, 2, 4, 4, 8, 8, 16, 16]
    assert value_at(0, [5, 15], 1) == 5, "the first step always has the first value"


@pytest.mark.parametrize(
    ("until", "horizon", "ends"),
    [
        (0.5, 40, 20),
        (1.0, 40, 40),
        (0.001, 40, 1),
        (1.5, 40, 2),
        (50.0, None, 50),
        (0.5, None, None),
    ],
)
def test_a_share_needs_a_horizon_and_a_step_does_not(
    until: float, horizon: int | None, ends: int | None
) -> None:
    assert end_step(until, horizon) == ends
