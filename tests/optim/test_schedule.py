"""Test learning-rate schedules at their edges: they are pure functions of the step."""

import itertools
import math

import pytest

from headrace.optim.schedule import decay_begins, learning_rate
from headrace.plan.schedule import ScheduleConfig

KINDS = ("cosine", "warmup_stable_decay", "inverse_sqrt", "constant")


def shares(horizon: int | None, steps: int, **keys: object) -> list[float]:
    share = learning_rate(ScheduleConfig.model_validate(keys), horizon)
    return [share(step) for step in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_warmup_rises_evenly_and_never_starts_at_zero(kind: str) -> None:
    found = shares(20, 5, kind=kind, warmup_steps=4)
    assert found[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert found[4] == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_without_warmup_the_first_step_is_whole(kind: str) -> None:
    assert shares(10, 1, kind=kind)[0] == 1.0


def test_cosine_falls_to_its_end_and_stays() -> None:
    found = shares(20, 30, kind="cosine", warmup_steps=4, final_fraction=0.1)
    assert found[12] == pytest.approx(0.1 + 0.9 * 0.5)
    assert found[8] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert all(a > b for a, b in itertools.pairwise(found[4:21]))
    assert found[20:] == pytest.approx([0.1] * 10)


def test_stable_decay_is_flat_then_linear() -> None:
    found = shares(
        20, 25, kind="warmup_stable_decay", warmup_steps=2, decay_fraction=0.25, final_fraction=0.0
    )
    assert found[2:16] == [1.0] * 14
    assert found[15:21] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    assert found[21:] == [0.0] * 4


def test_decay_never_begins_before_warmup_ends() -> None:
    found = shares(
        10, 11, kind="warmup_stable_decay", warmup_steps=8, decay_fraction=0.9, final_fraction=0.5
    )
    assert found[8:] == pytest.approx([1.0, 0.75, 0.5])


def test_decay_of_no_length_still_ends() -> None:
    found = shares(10, 12, kind="warmup_stable_decay", decay_fraction=0.0, final_fraction=0.0)
    assert found[:10] == [1.0] * 10 and found[10:] == [0.0, 0.0]


@pytest.mark.parametrize("horizon", [None, 3])
def test_constant_needs_no_horizon(horizon: int | None) -> None:
    assert shares(horizon, 50, kind="constant") == [1.0] * 50


def test_a_horizon_of_one_step() -> None:
    assert shares(1, 3, kind="cosine", final_fraction=0.1) == pytest.approx([1.0, 0.1, 0.1])


def test_warmup_that_is_all_of_the_run() -> None:
    found = shares(4, 6, kind="cosine", warmup_steps=4, final_fraction=0.1)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.1])


def test_inverse_sqrt_falls_with_the_root_of_the_step_and_has_no_end() -> None:
    """Compare with 1 / sqrt(step) of arXiv 1706.03762, counted from 1 and scaled to the warmup."""
    found = shares(None, 101, kind="inverse_sqrt", warmup_steps=3)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[15] == 0.5 and found[99] == pytest.approx(0.2)
    assert shares(10, 101, kind="inverse_sqrt", warmup_steps=3) == found


def test_a_decay_by_the_root_is_steep_first() -> None:
    """Compare with 1 - sqrt((n - stable) / decay) of arXiv 2405.18392, section 3."""
    keys = {"kind": "warmup_stable_decay", "decay_fraction": 0.8, "final_fraction": 0.0}
    found = shares(20, 22, decay_shape="sqrt", **keys)
    assert found[4] == 1.0 and found[8] == 0.5 and found[13] == pytest.approx(0.25)
    assert found[20:] == [0.0, 0.0]
    raised = shares(20, 21, decay_shape="sqrt", **{**keys, "final_fraction": 0.2})
    assert raised[8] == pytest.approx(0.2 + 0.8 * 0.5) and raised[20] == pytest.approx(0.2)


@pytest.mark.parametrize(("warmup", "share", "begins"), [(2, 0.25, 15), (8, 0.9, 8), (20, 0.5, 19)])
def test_the_stable_phase_ends_where_the_decay_begins(
    warmup: int, share: float, begins: int
) -> None:
    keys = {"kind": "warmup_stable_decay", "warmup_steps": warmup, "decay_fraction": share}
    assert decay_begins(ScheduleConfig.model_validate(keys), 20) == begins
