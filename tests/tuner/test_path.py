"""The bill of a tuning: when it breaks even, and what it cost."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from headrace.core.statistics import Interval
from headrace.plan.plan import Plan
from headrace.tuner.page import write_tune_page
from headrace.tuner.path import Target, Tuned, dumps
from headrace.tuner.trial_row import TrialRow

TWICE = Interval(1.9, 2.0, 2.1, 9)


def tuned(plan: Plan, **more: Any) -> Tuned:
    """A step of 1 s became twice as fast, as the ratio has it; 0.9 s were measured last."""
    how: dict[str, Any] = {
        "aim": "time",
        "first": plan,
        "plan": plan,
        "changes": (),
        "path": (),
        "ratio": TWICE,
        "whole": True,
        "memory": None,
        "before_s": 1.0,
        "after_s": 0.9,
        "seconds": 100.0,
    }
    return Tuned(**{**how, **more})


def test_steps_win_the_tuning_back_at_the_pace_of_the_first_measurement(plan: Plan) -> None:
    """A device that was slower at the end is not blamed on the plan."""
    found = tuned(plan)
    assert found.now_s == 0.5 and found.break_even == pytest.approx(200.0)
    assert found.even_after == "200 steps"
    assert tuned(plan, ratio=Interval(0.7, 0.8, 0.9, 9)).break_even is None
    assert tuned(plan, ratio=None).break_even == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("goal", "ends"),
    [
        ({"steps": 199}, "199 steps"),
        ({"steps": 200}, ""),
        ({"tokens": 64 * 80}, "80 steps"),
        ({"tokens": 64 * 201}, ""),
        ({"minutes": 1.5}, "1.5 minutes"),
        ({"minutes": 2}, ""),
        ({"minutes": 2, "steps": 80}, "80 steps"),
        ({"dollars": 1.5}, "$1.50"),
        ({"bits_per_byte": 1.1, "steps": 80}, "80 steps"),
    ],
)
def test_what_the_plan_ends_before_does_not_pay_for_it_alone(
    plan: Plan, goal: dict[str, float], ends: str, tmp_path: Path
) -> None:
    """Check the bill where a run ends before the 200 steps of 0.5 s that pay for the tuning."""
    run = plan.replaced(goal=goal, hardware={"dollars_per_hour": 60.0}, schedule={"steps": 999})
    row = TrialRow(1, ("+fused_rope",), "kept", "better", "accept", ratio=TWICE)
    found = tuned(run, path=(row,))
    assert found.beyond == ends and found.even_after == "200 steps"
    assert found.sentence().endswith(found.bill) and found.bill.endswith(" after 200 steps.")
    assert ("does not pay" in found.bill) == bool(ends)
    page = write_tune_page(found, tmp_path).read_text()
    assert (f"; this plan alone ends after {ends}" in page) == bool(ends)
    assert ("this plan alone" in page) == bool(ends)


def test_a_run_is_over_where_its_schedule_is(plan: Plan) -> None:
    run = plan.replaced(goal={"minutes": 60}, schedule={"steps": 199})
    assert tuned(run).beyond == "199 steps"
    constant = run.schedule.model_copy(update={"kind": "constant"})
    assert tuned(run.replaced(schedule=constant)).beyond == ""


@pytest.mark.parametrize(
    ("compile_s", "steps", "said"),
    [
        (
            12.0,
            2000,
            "12.0 s of compiling break even after 24 steps, and this run is 2,000 steps: worth it",
        ),
        (12.0, 23, "24 steps, and this run is 23 steps: not worth it for this run alone"),
        (0.1, 2000, "500 ms of each step"),
        (None, 2000, "500 ms of each step"),
    ],
)
def test_a_kept_change_says_what_it_bought_and_whether_its_compiling_pays(
    plan: Plan, compile_s: float | None, steps: int, said: str, tmp_path: Path
) -> None:
    run = plan.replaced(goal={"steps": steps}, schedule={"steps": steps})
    row = TrialRow(
        1,
        ("+torch_compile",),
        "kept",
        "better",
        "accept",
        ratio=TWICE,
        before_s=1.0,
        after_s=0.5,
        compile_s=compile_s,
    )
    found = tuned(run, path=(row,))
    assert row.bought(found.length).endswith(said)
    assert "it buys 500 ms of each step" in write_tune_page(found, tmp_path).read_text()
    (told,) = json.loads(dumps(found))["path"]
    assert told["bought"] == row.bought(found.length) and told["saved_s"] == 0.5
    assert told["worth"] == (None if compile_s is None else steps != 23)
    assert not replace(row, verdict="reverted").bought(found.length)
    small = replace(row, ratio=Interval(0.8, 0.9, 1.0, 9), memory=0.5, peak_bytes=2.0**30)
    assert small.bought(found.length) == "1.0 GiB of the peak"


def test_a_tuning_costs_its_seconds_of_an_hour(plan: Plan) -> None:
    priced = plan.replaced(hardware=plan.hardware.model_copy(update={"dollars_per_hour": 36.0}))
    assert tuned(priced).dollars == pytest.approx(1.0) and tuned(plan).dollars is None


@pytest.mark.parametrize(
    ("before_s", "after_s", "runs"),
    [
        (50.0, 10.0, 2.5),
        (10.0, 50.0, inf),
        (10.0, inf, None),
        (inf, 10.0, None),
        (None, 10.0, None),
    ],
)
def test_runs_win_it_back_where_both_plans_get_there(
    plan: Plan, before_s: float | None, after_s: float, runs: float | None
) -> None:
    found = tuned(plan, target=Target(TWICE, True, before_s, after_s))
    assert found.break_even_runs == runs and found.break_even is None


@pytest.mark.parametrize(
    ("ratio", "better", "shown"),
    [
        (Interval(0.49, 1.12, 2.56, 2), False, False),
        (Interval(0.0, 1.12, inf, 1), False, False),
        (Interval(1.0, 1.12, 1.2, 7), False, False),
        (Interval(0.7, 0.99, 1.1, 7), False, False),
        (Interval(1.01, 1.12, 1.2, 7), False, True),
        (Interval(0.7, 0.8, 0.9, 7), False, True),
        (Interval(0.0, 1.25, inf, 1), True, True),
    ],
)
def test_a_target_that_may_come_no_sooner_is_told_so_and_wins_nothing_back(
    plan: Plan, ratio: Interval, better: bool, shown: bool, tmp_path: Path
) -> None:
    """A step may be twice as fast, and compiling it may eat what that saves."""
    row = TrialRow(1, ("+torch_compile",), "kept", "better", "accept", ratio=TWICE)
    target = Target(ratio, True, 53.0, 47.0, better=better)
    found = tuned(plan, aim="quality", path=(row,), target=target)
    said, page = found.sentence(), write_tune_page(found, tmp_path).read_text()
    assert said.startswith("The target is not shown to come sooner (") != shown
    assert (found.bill != "" and found.bill in said) == shown and ("not shown" in page) != shown
    assert ("2.00 times as fast, the target not shown to come sooner" in page) != shown
    assert ('badge good">the target' in page) == (shown and ratio.value > 1)
    assert (found.break_even_runs is not None) == shown
    assert json.loads(dumps(found))["target"]["shown"] == shown


@pytest.mark.parametrize(("before_s", "after_s"), [(inf, 47.0), (53.0, inf), (inf, inf)])
def test_a_page_tells_who_missed_the_target(
    plan: Plan, before_s: float, after_s: float, tmp_path: Path
) -> None:
    priced = plan.replaced(hardware=plan.hardware.model_copy(update={"dollars_per_hour": 36.0}))
    row = TrialRow(1, ("+torch_compile",), "kept", "better", "accept", ratio=TWICE)
    found = tuned(priced, aim="quality", path=(row,), target=Target(TWICE, True, before_s, after_s))
    page = write_tune_page(found, tmp_path).read_text()
    assert "missed" in page and "Its price" not in page
