"""Tuning for quality: which aim is taken, what the target costs, and its bill."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.assemble.context import choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import RefusalKind
from headrace.core.limits import TuneAim
from headrace.costs.machine import Machine as Rates
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.tuner import command
from headrace.tuner.judge import Rules
from headrace.tuner.page import write_tune_page
from headrace.tuner.path import TRIALS, Tuned, dumps
from headrace.tuner.readings import NOT_DONE, Reading
from headrace.tuner.store import Store
from headrace.tuner.target import FEWEST, trimmed
from headrace.tuner.tune import tune

FAST, LEARNS = "fused_rope", "z_loss"
KNOWN = catalogue()
CUDA = Rules(device="cuda", precision="bf16")


def aimed(plan: Plan, target: float = 1.1) -> Plan:
    """Return the plan with a target in bits per byte."""
    return plan.replaced(goal=plan.goal.model_copy(update={"bits_per_byte": target}))


def go(machine: Any, plan: Plan, run_s: Callable[[Plan], float], **how: Any) -> Tuned:
    """Tune for quality, where a run to the target takes `run_s` seconds, and what learns helps."""

    def train(run: Plan, limit_s: float) -> Reading:
        seconds = run_s(run) * (1 + 0.01 * (run.seed % 3))
        machine.now_s += seconds
        return Reading(seconds=[seconds], tokens_per_s=run.batch.tokens / machine.step_s(run))

    def learning(best: Plan) -> list[Any]:
        return (
            []
            if LEARNS in best.techniques
            else [machine.proposal(changed(best, [f"+{LEARNS}"], KNOWN), None)]
        )

    found = machine.sources([], names=[FAST])
    sources = type(found)(found.whole, found.single, learning)
    return tune(
        aimed(plan),
        "quality",
        60,
        sources,
        machine.measure,
        CUDA,
        train=train,
        clock=machine.clock,
        **how,
    )


def seconds_of(machine: Any, ready_s: float = 0.0) -> Callable[[Plan], float]:
    """A run of 100 steps, 80 of which are enough with what learns, and what FAST costs first."""

    def run_s(run: Plan) -> float:
        steps = 80 if LEARNS in run.techniques else 100
        return steps * machine.step_s(run) + ready_s * (FAST in run.techniques)

    return run_s


def test_the_whole_way_to_the_target_is_measured_and_the_bill_is_in_runs(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    machine = Machine({FAST: 0.8})
    tuned = go(machine, plan, seconds_of(machine))
    assert {*tuned.plan.techniques} == {FAST, LEARNS} and tuned.target is not None
    assert tuned.target.whole and tuned.target.ratio.n == FEWEST
    assert tuned.target.ratio.value == pytest.approx(1 / 0.8 / 0.8)
    saved_s = 0.36 * trimmed([10 * (1 + 0.01 * (seed % 3)) for seed in range(FEWEST)])
    assert tuned.break_even_runs == pytest.approx(tuned.seconds / saved_s)
    assert tuned.break_even is None and tuned.seconds == pytest.approx(machine.now_s)
    said = tuned.sentence()
    assert said.startswith("The target comes 1.56 times as soon (first plan beside last over 2 ")
    assert "a step is 1.25 times as fast by the changes of execution" in said
    assert tuned.even_after == f"{int(tuned.seconds / saved_s) + 1} such runs"
    told = json.loads(dumps(tuned))
    assert told["after_s"] == pytest.approx(0.08) and told["after_from"] == "runs to the target"
    assert told["tokens_per_s"] == pytest.approx(plan.batch.tokens / 0.08)
    assert told["target"]["whole"] and told["break_even_steps"] is None
    page = write_tune_page(tuned, tmp_path).read_text()
    assert "A run to the target" in page and "such runs" in page
    product = replace(tuned, target=replace(tuned.target, whole=False)).sentence()
    assert "product of the kept changes" in product and "beside last" not in product


def test_what_makes_steps_faster_and_the_target_later_is_undone(Machine: Any, plan: Plan) -> None:
    """A hundred steps are too few for what compiles for a minute, which is on the clock."""
    machine = Machine({FAST: 0.8})
    tuned = go(machine, plan, seconds_of(machine, ready_s=60.0))
    assert {*tuned.plan.techniques} == {LEARNS}
    fast = next(step for step in tuned.path if step.changes == (f"+{FAST}",))
    assert fast.verdict == "reverted" and "undone: the first plan is sooner" in fast.reason
    assert tuned.target is not None and tuned.target.ratio.value == pytest.approx(1.25)


def test_a_target_that_nothing_brings_sooner_has_no_bill_in_runs(Machine: Any, plan: Plan) -> None:
    machine = Machine({FAST: 1.2})
    tuned = go(machine, plan, lambda run: 10.0)
    assert not tuned.kept and tuned.target is None and tuned.break_even_runs is None


def test_the_aim_is_told_first_and_follows_the_plan(
    Machine: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, lines = Machine({}), list[str]()
    monkeypatch.setattr(command, "sources", lambda *given: machine.sources([]))
    monkeypatch.setattr(command, "measure_with", lambda worker: machine.measure)
    context = make_context(plan, choose_device(plan))
    how: Any = {"context": context, "machine": Rates.assumed("cpu"), "catalogue": KNOWN}
    cases: list[tuple[Plan, TuneAim | None, TuneAim, str]] = [
        (plan, None, "time", "for the time of a step, for the plan has no target"),
        (
            aimed(plan),
            None,
            "quality",
            "goal.bits_per_byte = 1.1, where two pairs of",
        ),
        (aimed(plan), "time", "time", "for time, as --for asks"),
    ]
    for run, asked, aim, said in cases:
        lines.clear()
        tuned = command.tune_command(run, aim=asked, note=lines.append, **how)
        assert tuned.aim == aim and said in lines[0]


def hasty(
    machine: Any, plan: Plan, minutes: float, run_s: float, gain: float = 0.8, **how: Any
) -> Tuned:
    """Tune a plan of 1,000 steps for what the minutes allow, where a run takes so long."""
    return hurried(
        machine,
        plan,
        minutes,
        late(machine, [], run_s, gain),
        chosen=False,
        goal={"minutes": 60, "steps": 1000},
        schedule={"steps": 1000},
        **how,
    )


def test_minutes_that_allow_no_two_pairs_of_runs_go_to_faster_steps(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    """A run takes 100 s at most, by the first steps that were timed, or by predicted ones."""
    lines: list[str] = []
    tuned = hasty(Machine({FAST: 0.8}), plan, 3, 80.0, note=lines.append)
    assert tuned.aim == "time" and tuned.changes == (f"+{FAST}",) and tuned.target is None
    said = (
        "a run to 1.1 takes 100.1 s at most (1,000 steps at 100 ms each), and two pairs of runs do"
    )
    assert f"{said} not fit into 3 min: for the time of a step; --minutes 5 goes" in tuned.aim_why
    assert any(tuned.aim_why in line for line in lines)
    assert not tuned.kept[0].provisional and json.loads(dumps(tuned))["aim_why"] == tuned.aim_why
    assert tuned.aim_why[1:] in write_tune_page(tuned, tmp_path).read_text()
    tuned = hasty(Machine({FAST: 0.8}), plan, 10, 80.0)
    assert tuned.aim == "quality" and "so two pairs of runs fit" in tuned.aim_why
    assert hasty(Machine({}), plan, 3, 80.0, start_s=0.02, names=[]).aim == "quality"
    assert hasty(Machine({}), plan, 3, 80.0, start_s=0.2, names=[]).aim == "time"


def test_what_learns_goes_beside_the_first_plan_where_minutes_are_few(
    Machine: Any, plan: Plan
) -> None:
    """With what was kept of execution in it, whose own way to the target is not measured apart."""
    machine = Machine({FAST: 0.8})
    tuned = hasty(machine, plan, 10, 90.0, gain=0.5)
    assert {*tuned.plan.techniques} == {FAST, LEARNS} and tuned.target is not None
    assert tuned.target.whole and tuned.target.better and tuned.target.ratio.n == 2
    assert tuned.target.ratio.value == pytest.approx(2.0) and not tuned.unmeasured
    assert "beside the first plan, with all changes" in tuned.kept[-1].reason
    assert not any(step.provisional for step in tuned.kept) and machine.now_s < 600
    assert "a target in 45.2 s instead of 90.5 s" in tuned.kept[-1].bought(tuned.length)


def test_what_a_run_to_the_target_is_too_short_for_is_undone_by_its_bill(
    Machine: Any, plan: Plan
) -> None:
    """Check that compiling for 5.2 s is undone where 250 steps save 20 ms each; 4.9 s stays."""
    machine = Machine({FAST: 0.8}, compile_s={FAST: 4.9})
    assert {*hasty(machine, plan, 10, 90.0, gain=0.5).plan.techniques} == {FAST, LEARNS}
    machine = Machine({FAST: 0.8}, compile_s={FAST: 5.2})
    tuned = hasty(machine, plan, 10, 90.0, gain=0.5)
    assert {*tuned.plan.techniques} == {LEARNS}
    said = "undone: its compiling breaks even after 260 steps, and a run is 1,000 steps at most"
    assert said in tuned.path[0].reason


# --- no time for the target -------------------------------------------------------------------


def late(
    machine: Any, limits: list[tuple[float, float]], run_s: float, gain: float = 0.8
) -> Callable[..., Reading]:
    """Trains as `go` does, and is cut off where a run takes longer than it may."""

    def train(run: Plan, limit_s: float) -> Reading:
        limits.append((machine.now_s, limit_s))
        machine.now_s += min(run_s, limit_s)
        if run_s > limit_s:
            return Reading(
                refused=f"{NOT_DONE} {limit_s / 60:.1f} minutes", refusal=RefusalKind.TIME
            )
        sooner = gain if LEARNS in run.techniques else 1.0
        return Reading(seconds=[run_s * sooner * (1 + 0.01 * run.seed)])

    return train


def hurried(machine: Any, plan: Plan, minutes: float, train: Any, **how: Any) -> Tuned:
    """Tune for quality in minutes, with changes of execution and one of learning."""
    found = machine.sources([], start_s=how.pop("start_s", None), names=how.pop("names", [FAST]))
    sources = type(found)(
        found.whole,
        found.single,
        lambda best: [machine.proposal(changed(best, [f"+{LEARNS}"], KNOWN), None)],
    )
    goal = how.pop("goal", {"minutes": 3, "steps": 10**6})
    schedule = how.pop("schedule", {"steps": 9})
    aims = plan.replaced(goal={"bits_per_byte": 1.1, **goal}, schedule=schedule)
    return tune(
        aims,
        "quality",
        minutes,
        sources,
        machine.measure,
        CUDA,
        train=train,
        clock=machine.clock,
        **how,
    )


def test_what_was_kept_without_a_run_to_the_target_is_provisional_and_says_so(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    """Check a tuning that was interrupted in its first run to the target, and its repeat."""
    limits: list[tuple[float, float]] = []

    def interrupted(run: Plan, limit_s: float) -> Reading:
        raise KeyboardInterrupt

    machine = Machine({FAST: 0.74})
    store = Store(tmp_path / TRIALS, {}, machine.clock)
    first = hurried(machine, plan, 10, interrupted, store=store)
    machine = Machine({FAST: 0.74})
    lines: list[str] = []
    store = Store(tmp_path / TRIALS, {}, machine.clock)
    second = hurried(
        machine, plan, 0.5, late(machine, limits, 170.0), store=store, note=lines.append
    )
    assert first.interrupted and not machine.asked and len(limits) == 1
    for tuned in (first, second):
        (step,) = tuned.kept
        assert step.provisional and step.line().startswith("kept provisionally: ")
        said = tuned.sentence()
        assert said.startswith("A step is 1.35 times as fast")
        assert ", but the time to the target was not measured: 1 plan measured" in said
        assert "1 of them provisionally" in said and not tuned.bill
        page = write_tune_page(tuned, tmp_path).read_text()
        assert "kept, provisional" in page and "A run to the target" in page
        assert "1.35 times as fast, the target not measured" in page
        assert page.partition("Won back after")[2].partition("never")[1] == ""
        assert json.loads(dumps(tuned))["target_unmeasured"] and tuned.break_even_runs is None
    (told,) = (line for line in lines if "not done" in line)
    assert "before a seed of both, and no run has reached the target yet: the first plan's" in told
    assert "not done within 0.5 minutes; --minutes 1 gives it twice as long, and" in told
    assert second.untried == (f"+{LEARNS}",) and len(limits) == 1  # nothing to judge it by
    end = command.format_end(second, tmp_path)
    assert "no run has reached the target: --minutes 1 gives a run to the target at" in end
    machine = Machine({FAST: 0.74})
    store = Store(tmp_path / TRIALS, {}, machine.clock)
    enough = hurried(machine, plan, 12, late(machine, limits, 170.0), store=store)
    assert not enough.unmeasured and enough.target is not None and enough.target.ratio.n >= 2
    assert not enough.kept[0].provisional


def test_one_trial_leaves_time_for_what_is_learned(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    """Check that a trial gets 90 s of three minutes, and tells how many minutes it needs."""
    limits: list[tuple[float, float]] = []
    machine = Machine({FAST: 0.8}, build_s=55.0)
    cut = hurried(machine, plan, 3, late(machine, limits, 40.0))
    assert limits and limits[0][0] == pytest.approx(90.0) and machine.now_s <= 180
    row = cut.path[0]
    assert row.verdict == "not tried"
    assert row.reason.endswith(
        "90 s: --minutes 6 gives it twice as long, and the same command goes on"
    )
    again = hurried(Machine({FAST: 0.8}, build_s=55.0), plan, 6, late(machine, limits, 10.0))
    assert again.path[0].verdict == "kept"
    short = next(step for step in cut.path if step.stage == "learning")
    assert short.verdict == "not shown" and "time was up after 1 of at most 7" in short.reason
    assert "a seed of both takes 72.0 s: --minutes 8 should do" in short.reason and cut.wanted >= 6


def test_what_a_run_to_the_target_takes_is_told_from_one_and_not_from_the_goals_minutes(
    Machine: Any, plan: Plan
) -> None:
    """An hour is what it may take. The pilot's seconds tell, or else the goal's own steps."""
    cases: list[tuple[float, dict[str, Any], str]] = [
        (
            80.0,
            {"minutes": 60},
            "; one run to 1.1 took 80.0 s, 4 such runs would take 5 min: --minutes 11 would do",
        ),
        (
            9e9,
            {"minutes": 60},
            "of both, and no run has reached the target yet: the first plan's was not done within "
            "2.0 minutes; --minutes 8 gives it twice as long,",
        ),
        (
            9e9,
            {"minutes": 60, "steps": 6000},
            "; the 6,000 steps of the goal take 10 min at 100 ms each, 4 such runs would take 40 "
            "min: --minutes 81 would do, or fewer",
        ),
        (
            9e9,
            {"steps": 50},
            "; the 50 steps of the goal take 5.0 s at 100 ms each, and it took longer: "
            "--minutes 8 gives it twice as long,",
        ),
    ]
    for run_s, goal, says in cases:
        limits: list[tuple[float, float]] = []
        machine = Machine({FAST: 1.2}, build_s=30.0)
        tuned = hurried(
            machine,
            plan,
            4,
            late(machine, limits, run_s),
            goal=goal,
            names=[FAST, "fused_swiglu", "fused_rms_norm"],
        )
        row = tuned.path[-1]
        assert row.stage == "learning" and row.verdict == "not tried"
        assert says in row.reason, row.reason
        assert "1680" not in command.format_end(tuned, Path()) and tuned.wanted < 300
        assert tuned.unreached == (run_s > 80)


# --- what was kept on few steps ---------------------------------------------------------------


def retimed(machine: Any, plan: Plan, minutes: float) -> Tuned:
    """Steps of 3 s, of which a part of the minutes is too short for all."""
    sources = machine.sources([], names=[FAST])
    return tune(plan, "time", minutes, sources, machine.measure, CUDA, clock=machine.clock)


def test_what_was_kept_on_few_steps_is_provisional_until_it_is_timed_again(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    for minutes, sure in ((10, False), (15, True)):
        machine = Machine({FAST: 0.67}, base_s=3.0, build_s=40.0)
        tuned = retimed(machine, plan, minutes)
        (row,) = tuned.path
        assert machine.now_s <= 60 * minutes and row.verdict == "kept"
        assert len(machine.asked) == 1 + sure and (row.steps >= 54) == sure
        assert row.provisional != sure and ("timed once more on 5" in row.reason) == sure
        assert ("provisionally: on fewer than 54 steps" in tuned.sentence()) != sure
        assert row.line().startswith("kept: " if sure else "kept provisionally: ")
        assert json.loads(dumps(tuned))["path"][0]["provisional"] != sure
        page = write_tune_page(tuned, tmp_path).read_text()
        assert ("kept, provisional" in page) != sure


def test_what_does_not_win_when_timed_again_is_undone(Machine: Any, plan: Plan) -> None:
    machine = Machine({FAST: 0.67}, base_s=3.0, build_s=40.0)
    whole = machine.measure

    def measure(first: Plan, second: Plan, **how: Any) -> Reading:
        reading = whole(first, second, **how)
        machine.costs[FAST] = 1.0
        return reading

    machine.measure = measure
    tuned = retimed(machine, plan, 15)
    assert tuned.plan == plan and not tuned.kept and len(machine.asked) == 2
    assert tuned.path[0].verdict == "reverted" and "undone: it is no gain" in tuned.path[0].reason
