"""The bill of a tuning: when it is won back, and what it cost."""

from math import inf
from typing import Any

import pytest

from headrace.core.plan import Plan
from headrace.core.statistics import Interval
from headrace.trials.path import Target, Tuned

TWICE = Interval(1.9, 2.0, 2.1, 9)


def tuned(plan: Plan, **more: Any) -> Tuned:
    """A step of 1 s became twice as fast, as the ratio has it; 0.9 s were measured last."""
    how: dict[str, Any] = {
        "aim": "time", "first": plan, "plan": plan, "changes": (), "path": (), "ratio": TWICE,
        "whole": True, "memory": None, "before_s": 1.0, "after_s": 0.9, "seconds": 100.0,
    }  # fmt: skip
    return Tuned(**{**how, **more})


def test_steps_win_the_tuning_back_at_the_pace_of_the_first_measurement(plan: Plan) -> None:
    """A device that was slower at the end is not blamed on the plan."""
    found = tuned(plan)
    assert found.now_s == 0.5 and found.break_even == pytest.approx(200.0)
    assert "won back after 200 steps" in found.won_back
    assert tuned(plan, ratio=Interval(0.7, 0.8, 0.9, 9)).break_even is None
    assert tuned(plan, ratio=None).break_even == pytest.approx(1000.0)


def test_a_tuning_costs_its_seconds_of_an_hour(plan: Plan) -> None:
    priced = plan.replaced(hardware=plan.hardware.model_copy(update={"dollars_per_hour": 36.0}))
    assert tuned(priced).dollars == pytest.approx(1.0) and tuned(plan).dollars is None


@pytest.mark.parametrize(
    ("before_s", "after_s", "runs"),
    [(50.0, 10.0, 2.5), (10.0, 50.0, inf), (10.0, inf, None), (inf, 10.0, None),
     (None, 10.0, None)],
)  # fmt: skip
def test_runs_win_it_back_where_both_plans_get_there(
    plan: Plan, before_s: float | None, after_s: float, runs: float | None
) -> None:
    found = tuned(plan, target=Target(TWICE, True, before_s, after_s))
    assert found.break_even_runs == runs and found.break_even is None
