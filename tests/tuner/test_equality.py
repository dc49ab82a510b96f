"""Do two plans compute the same: at the same weights, and by what a training of both says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from two_readings import CUDA, LIMITS, judged, reading

from headrace.cli.catalogue import catalogue
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.train.guard import First
from headrace.tuner.command import format_end
from headrace.tuner.effects import effect_of, rounding_of
from headrace.tuner.equality import (
    BRIEF_STEPS,
    LEAST_STEPS,
    NATS,
    NOISE,
    STATE_STEPS,
    WANTED_STEPS,
    equality,
    seed_noise,
)
from headrace.tuner.judge import WorthMoreSteps
from headrace.tuner.page import write_tune_page
from headrace.tuner.pairs import measure_with
from headrace.tuner.path import Tuned, dumps
from headrace.tuner.store import Store
from headrace.tuner.tune import tune

KNOWN = catalogue()


# --- at the same weights -----------------------------------------------------------------------


def test_where_two_trainings_went_says_nothing_of_an_exact_change() -> None:
    """Rounding grows from step to step; what is computed from the same weights does not move."""
    before, after = reading(steps=LEAST_STEPS), reading(0.5, off=0.3, steps=LEAST_STEPS)
    found = judged(after, before)
    assert found.verdict == "better" and found.loss == pytest.approx(0.3)
    assert judged(after, before, "approximate").verdict == "different"


@pytest.mark.parametrize(
    ("moved", "told"),
    [
        (First(6.07, 1.0, {"a": 0.6, "b": 0.8}), "its loss of batch 3 is 6.07 nats, and 6"),
        (First(6.0, 1.2, {"a": 0.6, "b": 0.8}), "all parameters has norm 1.2 in batch 3, and 1"),
        (First(6.0, 1.0, {"a": 0.6, "b": 0.5}), "gradient of b has norm 0.5 in batch 3, and 0.8"),
        (First(6.05, 1.05, {"a": 0.63, "b": 0.78}), ""),  # rounding
        (First(6.0, 1.0, {"a": 0.6}), "gradient of b has norm 0 in batch 3, and 0.8"),
        (First(6.0, 1.0, {"a": 0.6, "b": 0.8, "c": 0.5}), "gradient of c has norm 0.5"),
        (First(6.0, float("inf"), {"a": 0.6, "b": 0.8}), ""),
    ],  # fp16 looks for its scale
)
def test_an_exact_change_computes_the_same_from_the_same_weights(moved: First, told: str) -> None:
    """In every batch: what was recorded in the first may not be right for the third."""
    before, after = reading(), reading(0.5)
    after.losses[0] += 1e-6
    after.firsts[2] = moved
    found = judged(after, before)
    assert found.verdict == ("different" if told else "better") and told in found.reason


def test_what_an_optimizer_has_freed_by_then_is_no_difference() -> None:
    before, after = reading(), reading(0.5)
    after.losses[0] += 1e-6
    after.firsts = [First(6.0, 1.0, {"a": 0.6}) for _ in after.firsts]
    assert judged(after, before).verdict == "different"
    for one in (before, after):
        one.freed = ["b"]
        assert judged(after, before).verdict == "better"
        one.freed = []


def test_an_exact_change_of_which_nothing_was_compared_is_not_kept() -> None:
    before, after = reading(), replace(reading(0.5, off=1e-6), firsts=[])
    found = judged(after, before)
    assert found.verdict == "different" and "nothing was compared" in found.reason


@pytest.mark.parametrize("moved", [6.15, 6.25])
def test_two_approximations_may_err_apart_from_each_other(moved: float) -> None:
    """Each within its own limits, which are 0.01 of the loss and 0.02 here."""
    before, after = reading(), reading(0.5)
    before.limits = LIMITS | {"the loss": 0.02}
    after.losses[0] += 1e-6
    after.firsts = [First(moved, 1.0, {"a": 0.6, "b": 0.8}) for _ in range(4)]
    found = equality(before, after, "approximate")
    assert (found.verdict == "different") == (moved > 6.18)
    assert equality(before, after, "exact").verdict == "different"


def test_a_loss_that_is_not_finite_is_another() -> None:
    wrong = reading(0.5)
    wrong.losses = [float("nan"), *wrong.losses[1:]]
    for kind in ("exact", "approximate"):
        assert judged(wrong, reading(), kind).verdict == "different"


# --- by a training -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "off", "scatter", "verdict", "says"),
    [
        (40, 0.001, 0.0, "not shown", "but 40 steps of a training are too few to show that it"),
        (320, 0.002, 0.005, "better", "all of the interval lies above"),
        (320, 0.03, 0.005, "different", "and 0.01 are allowed"),
        (320, 0.008, 0.06, "not shown", "so that it loses less than 0.01 is not shown"),
        (320, -0.03, 0.005, "better", "all of the interval lies above"),
    ],
)
def test_an_approximate_gain_is_kept_where_a_training_shows_that_it_learns_the_same(
    steps: int, off: float, scatter: float, verdict: str, says: str
) -> None:
    before, after = reading(steps=steps), reading(0.5, off, steps, scatter)
    found = judged(after, before, "approximate")
    assert found.verdict == verdict and says in found.reason, found.reason
    gain = WorthMoreSteps("approximate", CUDA)
    wanted = gain.train_to(replace(after, beside=before))
    assert (wanted > steps) == (verdict == "not shown") and wanted == (found.enough or 0)
    assert gain(replace(after, beside=before)) == (verdict != "different")
    assert judged(after, before, "approximate", replace(CUDA, shown=True)).verdict == (
        "different" if verdict == "different" else "better"
    )
    slower = judged(reading(2.0, off, steps, scatter), before, "approximate")
    assert slower.verdict == ("different" if verdict == "different" else "worse")


@pytest.mark.parametrize(("noise", "verdict"), [(0.0, "better"), (NOISE, "not shown")])
def test_a_short_training_shows_what_adds_no_noise(noise: float, verdict: str) -> None:
    """Gradients whose squares are a fiftieth more ask for a longer one."""
    before, after = reading(steps=BRIEF_STEPS), reading(0.5, 0.0, BRIEF_STEPS, 0.002)
    after.firsts = [one._replace(total=one.total * (1 + noise)) for one in after.firsts]
    rules = replace(CUDA, rounding="operands")
    found = judged(after, before, "approximate", rules)
    assert found.verdict == verdict, found.reason
    assert (found.enough or WANTED_STEPS) == WANTED_STEPS
    assert judged(after, before, "approximate").verdict == "not shown", "it rounds something else"
    few = judged(reading(0.5, 0.0, BRIEF_STEPS - 1, 0.002), before, "approximate", rules)
    assert few.verdict == "not shown" and few.enough == BRIEF_STEPS


def test_a_training_that_has_hardly_begun_allows_less() -> None:
    """Check that 0.004 nats more is too much after 0.1 were learned: a fiftieth is 0.002."""
    before = reading(steps=320)
    after = reading(0.5, steps=320)
    flat = [6 - 0.1 * min(1, i / 160) for i in range(320)]
    before.losses, after.losses = (
        flat,
        [loss + 0.004 + 1e-5 * (i % 3) for i, loss in enumerate(flat)],
    )
    found = equality(before, after, "approximate")
    assert found.verdict == "different" and "are allowed" in found.reason
    after.losses = [6.0 + 1e-4 * (i % 2) for i in range(320)]
    before.losses = [6.0] * 320
    assert "nothing was learned in 320 steps" in equality(before, after, "approximate").reason


def test_rounded_weights_ask_for_a_longer_training() -> None:
    """Check that what stays rounded from step to step is not kept after 320 steps of no loss."""
    rules = replace(CUDA, rounding="state")
    for steps, verdict in ((320, "not shown"), (STATE_STEPS, "better")):
        before, after = reading(steps=steps), reading(0.5, 0.0, steps, 0.005)
        found = judged(after, before, "approximate", rules)
        assert found.verdict == verdict
        assert (found.enough or STATE_STEPS) == STATE_STEPS
    plan = Plan.read("goal.steps = 9", catalogue())
    stored, rounded = (
        changed(plan, [word], catalogue()) for word in ("+bf16_parameters", "+bf16_autocast")
    )
    assert (rounding_of(plan, stored), rounding_of(plan, rounded)) == ("state", "operands")


@pytest.mark.parametrize(("off", "most", "least"), [(NATS, 0.03, 0.0), (0.0, 1.0, 0.9)])
def test_how_often_a_training_is_taken_for_the_same(off: float, most: float, least: float) -> None:
    """Check the share of 300 noisy trainings that pass, with losses 0.01 off and with none."""
    before = reading(steps=640)
    share = (
        sum(
            equality(before, reading(1.0, off, 640, 0.03, seed), "approximate").verdict == "same"
            for seed in range(300)
        )
        / 300
    )
    assert least <= share <= most


def test_what_another_seed_brings_is_read_off_the_losses() -> None:
    assert seed_noise(reading().losses) == pytest.approx(0.05 * (2 / 40) ** 0.5, rel=0.5)
    assert seed_noise([1.0]) == 0.0


# --- in a tuning -------------------------------------------------------------------------------

ROUNDS = "bf16_autocast"


def go(machine: Any, plan: Plan, minutes: float, **how: Any) -> tuple[Tuned, list[str]]:
    """Tune where what rounds otherwise is twice as fast."""
    lines = list[str]()
    tuned = tune(
        plan,
        "time",
        minutes,
        machine.sources([], names=[ROUNDS]),
        machine.measure,
        CUDA,
        clock=machine.clock,
        note=lines.append,
        **how,
    )
    return tuned, lines


@pytest.mark.parametrize(
    ("off", "verdict"), [(0.0002, "kept"), (0.001, "kept"), (0.03, "reverted")]
)
def test_what_rounds_otherwise_is_trained_on_until_it_is_shown(
    Machine: Any, plan: Plan, off: float, verdict: str
) -> None:
    assert effect_of(plan, changed(plan, [f"+{ROUNDS}"], KNOWN)) == "approximate"
    machine = Machine({ROUNDS: 0.5}, losses={ROUNDS: off})
    (row,) = go(machine, plan, 10)[0].path
    assert row.verdict == verdict, row.reason
    assert row.loss == (None if verdict == "kept" else pytest.approx(off)), "a lag is no loss"


def test_what_there_is_no_time_to_show_is_not_kept_and_says_what_should_do(
    Machine: Any, plan: Plan, tmp_path: Any
) -> None:
    """A step takes 2 s and 1 s, so 320 of both take 13 minutes more."""
    file = tmp_path / "trials.jsonl"

    def call(minutes: float) -> tuple[Any, Tuned]:
        machine = Machine({ROUNDS: 0.5}, {ROUNDS: 0.0002}, {ROUNDS: NOISE}, base_s=2.0)
        tuned, _ = go(machine, plan, minutes, store=Store(file, {}, machine.clock))
        return machine, tuned

    machine, tuned = call(8)
    (row,) = tuned.path
    assert row.verdict == "not shown" and tuned.plan == plan and not tuned.kept
    assert "all of the interval lies above 1.005, but 60 steps of a training" in row.reason
    assert row.reason.endswith(
        f"about {WANTED_STEPS} steps of both should show it, 13 min more: --minutes 35, and the "
        "same command goes on"
    )
    assert machine.now_s < 8 * 60 and tuned.wanted == 35
    assert "not shown" in write_tune_page(tuned, tmp_path).read_text()
    assert '"verdict": "not shown"' in dumps(tuned)
    machine, tuned = call(8)
    assert not machine.asked and tuned.path[0].verdict == "not shown", "it would be the same"
    machine, tuned = call(35)
    assert machine.asked and tuned.path[0].verdict == "kept"


def test_the_minutes_told_are_enough_for_stretches(Machine: Any, plan: Plan, tmp_path: Any) -> None:
    """A trial that could not be shown in time is, in the minutes that it named."""
    file = tmp_path / "trials.jsonl"

    def call(minutes: float) -> Tuned:
        machine = Machine({ROUNDS: 0.5}, {ROUNDS: 0.0002}, base_s=2.0)
        return go(machine, plan, minutes, store=Store(file, {}, machine.clock))[0]

    few = call(6)
    assert few.path[0].verdict == "not shown" and few.wanted
    assert "about 188 steps of both should show it" in few.path[0].reason, few.path[0].reason
    assert call(few.wanted).path[0].verdict == "kept"


def test_plans_that_do_not_fit_together_train_in_visits_of_their_own(
    Machine: Any, plan: Plan
) -> None:
    """A B A, of which the last trains on, and B once more where a short training is not enough."""
    losses, noise = {ROUNDS: 0.0002}, {ROUNDS: NOISE}
    machine = Machine({ROUNDS: 0.5}, losses, noise, room_bytes=1.5e6, base_s=0.5)
    measure = measure_with(machine)
    sources = machine.sources([], names=[ROUNDS])
    tuned = tune(plan, "time", 20, sources, measure, CUDA, clock=machine.clock)
    (row,) = tuned.path
    assert row.verdict == "kept", row.reason
    assert [bool(run.techniques) for run in machine.visits] == [False, True, False, True]
    brief = Machine({ROUNDS: 0.5}, losses, room_bytes=1.5e6, base_s=0.5)
    measured, sources = measure_with(brief), brief.sources([], names=[ROUNDS])
    (row,) = tune(plan, "time", 8, sources, measured, CUDA, clock=brief.clock).path
    assert row.verdict == "kept", row.reason
    assert [bool(run.techniques) for run in brief.visits] == [False, True, False]
    slow = Machine({ROUNDS: 0.5}, losses, noise, room_bytes=1.5e6, base_s=2.0)
    sources = slow.sources([], names=[ROUNDS])
    tuned = tune(plan, "time", 8, sources, measure_with(slow), CUDA, clock=slow.clock)
    (row,) = tuned.path
    assert row.verdict == "not shown" and "steps of both should show it" in row.reason
    assert len(slow.visits) == 3 and slow.now_s < 480
    said = format_end(tuned, Path())
    assert (
        "Nothing that was tried could be shown to be better than the plan as it is: 1 plan" in said
    )
    assert "  not shown: +bf16_autocast: 2.0" in said and "0 kept, 1 not shown" in said


def test_what_is_left_unshown_comes_last_beside_other_plans(Machine: Any, plan: Plan) -> None:
    """An exact change that is forecast to gain less is tried before the other plans with it."""
    costs, losses = {ROUNDS: 0.5, "fused_rope": 0.9}, {ROUNDS: 0.0002}
    noise = {ROUNDS: NOISE}
    machine = Machine(costs, losses, noise, base_s=1.0, build_s=100.0)  # too long to train then
    whole = [
        machine.proposal(changed(plan, words, KNOWN), step_s)
        for words, step_s in (
            ([f"+{ROUNDS}"], 0.5),
            ([f"+{ROUNDS}", "+fused_rope"], 0.45),
            (["+fused_rope"], 0.9),
        )
    ]
    tuned = tune(
        plan,
        "time",
        10,
        machine.sources(whole, start_s=1.0),
        machine.measure,
        CUDA,
        clock=machine.clock,
    )
    assert [(row.changes, row.verdict) for row in tuned.path[:2]] == [
        ((f"+{ROUNDS}", "+fused_rope"), "not shown"),
        (("+fused_rope",), "kept"),
    ]


def test_what_was_turned_down_by_chance_is_tried_beside_what_was_kept(
    Machine: Any, plan: Plan
) -> None:
    """Check that no plan is kept that is slower than one that learns the same."""
    costs = {ROUNDS: 0.5, "fused_rope": 0.9}
    machine = Machine(costs, losses={ROUNDS: 0.03})
    whole = [
        machine.proposal(changed(plan, words, KNOWN), step_s)
        for words, step_s in (([f"+{ROUNDS}"], 0.05), (["+fused_rope"], 0.09))
    ]
    tuned = tune(
        plan,
        "time",
        30,
        machine.sources(whole, start_s=0.1),
        machine.measure,
        CUDA,
        clock=machine.clock,
        note=lambda line: machine.losses.update({ROUNDS: 0.0}) if "+fused_rope" in line else None,
    )
    assert [(row.changes, row.verdict) for row in tuned.path] == [
        ((f"+{ROUNDS}",), "reverted"),
        (("+fused_rope",), "kept"),
        (("-fused_rope", f"+{ROUNDS}"), "kept"),
    ]
    assert list(tuned.plan.techniques) == [ROUNDS]
