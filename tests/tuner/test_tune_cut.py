"""What the clock cut off: it is remembered, and waits for more time than it had."""

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.catalogue import catalogue
from headrace.core.errors import RefusalKind
from headrace.plan.changes import changed, difference
from headrace.plan.plan import Plan
from headrace.predict.candidates import Words
from headrace.tuner.judge import Rules
from headrace.tuner.path import TRIALS, Tuned
from headrace.tuner.readings import NOT_DONE, Reading
from headrace.tuner.store import Store
from headrace.tuner.target import learn
from headrace.tuner.tune import tune

FAST, SLOW, OTHER = "fused_rope", "fused_swiglu", "fused_rms_norm"
KNOWN = catalogue()
CUDA = Rules(device="cuda", precision="bf16")


def test_what_was_cut_off_waits_for_more_time_than_it_had(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    """Run again, the minutes go to others; with more of them to it, and then it stands."""
    costs, file = {FAST: 0.5, OTHER: 0.9, SLOW: 1.2}, tmp_path / TRIALS

    def call(minutes: float, planning_s: float = 0.0) -> tuple[Tuned, list[Words], float]:
        machine = Machine(costs, build_s=20.0, compile_s={FAST: 130.0})
        store = Store(file, {}, machine.clock)
        whole = machine.sources([], names=(FAST, OTHER, SLOW))

        def sources(best: Plan) -> Any:
            machine.now_s += planning_s
            return whole.whole(best)

        planned = type(whole)(sources, whole.single, whole.learning)
        tuned = tune(
            plan, "time", minutes, planned, machine.measure, CUDA, store=store, clock=machine.clock
        )
        assert machine.now_s <= 60 * minutes
        return tuned, [difference(*asked[:2]) for asked in machine.asked], machine.now_s

    first, asked, spent_s = call(3)
    assert asked[0] == (f"+{FAST}",) and first.path[0].verdict == "not tried" and not first.kept
    second, asked, more_s = call(3, planning_s=2.0)
    assert (f"+{FAST}",) not in asked[:2] and second.changes == (f"+{OTHER}",)
    cut = second.path[0]
    assert cut.verdict == "not tried" and cut.changes == (f"+{FAST}",)
    assert cut.reason == (
        "not done within 135 s when it was tried before: --minutes 6 gives it twice as long, and "
        "the same command goes on"
    )
    assert second.seconds == pytest.approx(spent_s + more_s)  # all is on the bill, once
    less, asked, _ = call(1.5)
    assert "--minutes 6 " in less.path[0].reason and (f"+{FAST}",) not in asked
    third, asked, _ = call(6)
    assert asked[0] == (f"+{FAST}",) and f"+{FAST}" in third.changes
    again, asked, _ = call(6)
    assert again.path[0].verdict == "kept" and (f"+{FAST}",) not in asked


def test_a_run_to_the_target_that_was_cut_off_waits_for_more_time(
    plan: Plan, tmp_path: Path
) -> None:
    now, runs, base_s = [0.0], [], 100.0

    def train(run: Plan, limit_s: float) -> Reading:
        took_s = base_s * (5 if run.techniques else 1)
        runs.append(limit_s)
        now[0] += min(took_s, limit_s)
        late = took_s > limit_s
        cut = Reading(refused=f"{NOT_DONE} {limit_s:.0f} s", refusal=RefusalKind.TIME)
        return cut if late else Reading(seconds=[took_s])

    slow = changed(plan, [f"+{SLOW}"], KNOWN)
    told = []
    for limit_s in (90.0, 93.0, 1000.0, 1000.0):
        store = Store(tmp_path / TRIALS, {}, lambda: now[0])
        told.append(learn(plan, slow, range(7), train, store, limit_s=limit_s, clock=store.clock))
    assert runs == [90.0, 1000.0, 137.0]  # and a plan that is too late, once
    assert [found.verdict for found in told] == ["cut", "cut", "worse", "worse"]
