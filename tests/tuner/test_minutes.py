"""What a trial takes is predicted, reported before it begins, and none begins that cannot end."""

from dataclasses import replace
from typing import Any

import pytest

from headrace.cli.catalogue import catalogue
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.tuner.effects import state_words
from headrace.tuner.judge import Rules
from headrace.tuner.minutes import TrialSeconds, needs
from headrace.tuner.tune import tune

KNOWN = catalogue()
CUDA = Rules(device="cuda", precision="bf16")
FAST, OTHER, ROUNDS, COMPILES = "fused_rope", "fused_swiglu", "bf16_autocast", "torch_compile"


def test_a_trial_takes_what_those_like_it_took() -> None:
    ready = [(False, 20.0), (False, 8.0), (True, 60.0), (False, 6.0)]
    assert needs(ready, False, 0, 0.1, 0.1) == TrialSeconds(7.0, 29 * 0.1)
    assert needs(ready, True, 0, 0.1, 0.1) == TrialSeconds(60.0, 29 * 0.1)
    assert needs(ready[:1], False, 0, 0.1, 0.1) == TrialSeconds(10.0, 29 * 0.1), "caches are warm"
    assert needs(ready[:2], True, 0, 0.1, 0.1) is None, "nothing that compiles was measured"
    rounds = needs(ready, False, 160, 0.5, 0.5)
    assert rounds is not None and rounds.trained_s == 160.0 and rounds.limit_s == 320.0
    assert rounds.words == "ready in 7.0 s, a look in 14.5 s, 160 steps of both in 3 min"
    looked = needs(ready, False, 160, 0.5, 0.5, looks=True)
    assert looked is not None and looked.trained_s == 165.0, "a step more after each stretch"
    unmeasured = needs([], True, 160, 0.5, 0.25)
    assert unmeasured is not None and (unmeasured.ready_s, unmeasured.trained_s) == (0.0, 120.0)
    assert unmeasured.words == "a look in 14.5 s, 160 steps of both in 2 min"
    assert needs([], True, 160, 0.0, 0.0) is None, "not even predicted"


def test_what_computes_the_same_comes_first_where_steps_are_too_slow_to_show_the_rest(
    Machine: Any, plan: Plan
) -> None:
    """160 steps of 1 s and of 0.25 s fit no trial of 6 minutes; of 0.4 s and 0.25 s they do."""
    machine = Machine({FAST: 0.4, ROUNDS: 0.6}, base_s=1.0)
    both = machine.proposal(changed(plan, [f"+{FAST}", f"+{ROUNDS}"], KNOWN), 0.24)

    def exact(best: Plan, second: Plan) -> Any:
        words = {f"+{FAST}"} - {f"+{name}" for name in best.techniques}
        return [machine.proposal(changed(best, sorted(words), KNOWN), 0.4)] if words else []

    lines = list[str]()
    tuned = tune(
        plan,
        "time",
        8,
        replace(machine.sources([both], start_s=1.0), parts=exact),
        machine.measure,
        CUDA,
        clock=machine.clock,
        note=lines.append,
    )
    assert [row.changes for row in tuned.path[:2]] == [(f"+{FAST}",), (f"+{ROUNDS}",)]
    assert [row.verdict for row in tuned.path[:2]] == ["kept", "kept"]
    assert "timed once more" in tuned.path[0].reason, "a look decided, and the rest came later"
    assert any("a part that is judged sooner comes first" in line for line in lines)


STORED = "bf16_parameters"


@pytest.fixture(autouse=True)
def _rounds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what rounds here for something that a short training does not show."""
    monkeypatch.setattr(KNOWN.find(ROUNDS), "rounds", "other")


def test_what_rounds_weights_waits_for_what_is_shown_sooner(Machine: Any, plan: Plan) -> None:
    """1,000 steps of 0.5 s and of 0.2 s fit no trial of 6 minutes; 160 do."""
    machine = Machine({STORED: 0.8, ROUNDS: 0.5}, base_s=0.5)
    both = machine.proposal(changed(plan, [f"+{STORED}", f"+{ROUNDS}"], KNOWN), 0.2)
    assert state_words(plan, both.plan) == {f"+{STORED}"}

    def sooner(best: Plan, second: Plan) -> Any:
        words = {f"+{ROUNDS}"} - {f"+{name}" for name in best.techniques}
        return [machine.proposal(changed(best, sorted(words), KNOWN), 0.25)] if words else []

    tuned = tune(
        plan,
        "time",
        8,
        replace(machine.sources([both], start_s=0.5), parts=sooner),
        machine.measure,
        CUDA,
        clock=machine.clock,
    )
    assert [row.changes for row in tuned.kept] == [(f"+{ROUNDS}",)]
    (later,) = (row for row in tuned.path if f"+{STORED}" in row.changes)
    assert later.verdict == "not tried" and "1,000 steps of both" in later.reason


def test_what_cannot_end_any_more_does_not_begin_and_says_what_it_needs(
    Machine: Any, plan: Plan
) -> None:
    """After two trials of exact changes, steps of 2 s are too slow to show what rounds."""
    machine = Machine({FAST: 0.9, OTHER: 1.1, ROUNDS: 0.5}, base_s=2.0)
    whole = [
        machine.proposal(changed(plan, words, KNOWN), step_s)
        for words, step_s in (([f"+{FAST}"], 1.0), ([f"+{OTHER}"], 1.5), ([f"+{ROUNDS}"], 1.7))
    ]
    lines = list[str]()
    tuned = tune(
        plan,
        "time",
        10,
        machine.sources(whole, start_s=2.0),
        machine.measure,
        CUDA,
        clock=machine.clock,
        note=lines.append,
    )
    row = tuned.path[2]
    assert row.changes == (f"-{FAST}", f"+{ROUNDS}")
    assert row.verdict == "not tried" and row.stage == "none" and row.steps == 0
    assert row.reason.startswith("it needs about 19 min (ready in ")
    assert "160 steps of both in 9 min), and a trial has" in row.reason
    assert "--minutes" in row.reason and tuned.wanted > 20
    assert any(line.endswith(f"+{OTHER}, about 57.3 s") for line in lines)
    assert machine.now_s < 600 and len(machine.asked) == 3, "and the first again"


def test_what_the_minutes_cannot_show_waits_for_all_others_and_is_measured_where_nothing_else_is(
    Machine: Any, plan: Plan
) -> None:
    """A wrong prediction costs a plan no trial, and a start that cannot run asks for no losses."""
    machine = Machine({FAST: 0.95, ROUNDS: 0.5}, losses={ROUNDS: 0.0002}, base_s=0.2)
    whole = [
        machine.proposal(changed(plan, [f"+{name}"], KNOWN), step_s)
        for name, step_s in ((ROUNDS, 0.75), (FAST, 1.4))
    ]

    def go(whole: list[Any], start_s: float) -> Any:
        sources = machine.sources(whole, start_s=start_s)
        return tune(plan, "time", 8, sources, machine.measure, CUDA, clock=machine.clock)

    tuned = go(whole, 1.5)  # predicted steps are too slow to show it, measured ones are not
    assert [row.changes for row in tuned.path] == [(f"+{FAST}",), (f"-{FAST}", f"+{ROUNDS}")]
    assert [row.verdict for row in tuned.path] == ["kept", "kept"]

    machine = Machine({ROUNDS: 0.5}, losses={ROUNDS: 0.0002}, base_s=1.5)
    both = changed(plan, [f"+{ROUNDS}", f"+{FAST}"], KNOWN)
    tuned = go([whole[0], machine.proposal(both, 0.8)], 1.5)
    assert [row.verdict for row in tuned.path] == ["not shown", "not tried"]
    assert tuned.path[0].ratio.value == pytest.approx(2.0), "a look is better than nothing"
    assert tuned.up and tuned.wanted > 8
