"""A run to a target, as the tuner compares changes of learning."""

import re
import time
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.errors import RefusalKind
from headrace.plan.plan import Plan
from headrace.tuner.readings import NOT_DONE, Reading
from headrace.tuner.store import ALIKE_S, Store
from headrace.tuner.target import crossed_s, judge_seeds, learn, reach, train_with, trimmed
from headrace.tuner.worker import Worker


def test_a_run_tells_its_seconds_to_the_target(plan: Plan, tmp_path: Path) -> None:
    """A real run, here: one target is met at the first evaluation, the other never."""
    train = train_with(Worker(here=True), tmp_path / "targets")
    for target, met in ((50.0, True), (0.01, False)):
        goal = plan.goal.model_copy(update={"bits_per_byte": target, "steps": 2})
        found = train(plan.replaced(goal=goal, guard=False), 600.0)
        assert not found.refused and bool(found.seconds) == met
    assert not list((tmp_path / "targets").rglob("step-*"))


def test_a_run_that_the_clock_ended_tells_how_far_it_came(plan: Plan, tmp_path: Path) -> None:
    goal = {"bits_per_byte": 0.01, "minutes": 0.02}
    evals = plan.eval.model_copy(update={"every_steps": 1})
    run = plan.replaced(goal=goal, schedule={"steps": 9}, eval=evals, directory=str(tmp_path))
    found = reach(run.replaced(guard=False), True)
    told = r"not done within 0\.0 minutes \([0-9.]+ bits per byte after [0-9,]+ steps\)"
    assert re.fullmatch(told, found.refused)
    other = plan.replaced(optimizer=plan.optimizer.model_copy(update={"lr": 0.5}))
    store = Store(None, {}, time.monotonic)
    came = learn(plan, other, range(7), lambda *given: found, store, limit_s=600.0)
    assert came.verdict == "cut" and found.refused in came.reason


@pytest.mark.parametrize(
    ("before_s", "after_s", "runs", "verdict", "says"),
    [
        (10.0, 20.0, 2, "worse", "with 0 of 1 seeds: given up as lost"),
        (10.0, 10.5, 4, "worse", "with 0 of 2 seeds: given up as lost"),
        (10.0, 5.0, 4, "better", "with 2 of 2 seeds, which is sure at p < 0.01"),
        (10.0, 8.8, 6, "better", "with 3 of 3 seeds, which is sure at p < 0.01"),
        (
            10.0,
            inf,
            2,
            "worse",
            "with 0 of 1 seeds: it missed the target with a seed, or took over 1.25 times as long",
        ),
        (inf, 5.0, 4, "refused", "the plan before it misses the target itself"),
    ],
)
def test_few_seeds_are_enough_for_a_large_effect_and_for_a_loss(
    plan: Plan, before_s: float, after_s: float, runs: int, verdict: str, says: str
) -> None:
    asked: list[int] = []
    other = plan.replaced(optimizer=plan.optimizer.model_copy(update={"lr": 0.5}))

    def train(run: Plan, limit_s: float) -> Reading:
        asked.append(run.seed)
        seconds = after_s if run.optimizer.lr == 0.5 else before_s
        return Reading(seconds=[seconds] if isfinite(seconds) else [])

    store = Store(None, {}, time.monotonic)
    found = learn(plan, other, range(7), train, store, limit_s=600.0)
    assert (found.verdict, len(asked)) == (verdict, runs)
    assert found.reason.removeprefix("sooner at the target ") == says
    if isfinite(before_s + after_s):
        assert found.ratio is not None and found.ratio.value == pytest.approx(before_s / after_s)


def asked_of(
    plan: Plan, seconds: Callable[[Plan], float | str], limit_s: float, seeds: int = 7
) -> tuple[Any, list[tuple[bool, float, float]]]:
    """What came of two plans, and of each run whether it was the second's, how long it might
    take, and how much longer another time must be to try again."""
    other = plan.replaced(optimizer=plan.optimizer.model_copy(update={"lr": 0.5}))
    asked: list[tuple[bool, float, float]] = []

    def train(run: Plan, limit_s: float) -> Reading:
        took = seconds(run)
        if isinstance(took, str):
            cut = took.startswith(NOT_DONE)
            return Reading(refused=took, refusal=RefusalKind.TIME if cut else "other")
        return Reading(seconds=[took], tokens_per_s=200.0 if run.optimizer.lr == 0.5 else 100.0)

    def once(what: Any, act: Any, *, limit_s: float, alike_s: float, repeat: bool) -> Reading:
        run, given_s = act.args
        assert given_s == limit_s and not repeat
        asked.append((run.optimizer.lr == 0.5, limit_s, alike_s))
        return act()

    store: Any = SimpleNamespace(once=once)
    found = learn(plan, other, range(seeds), train, store, limit_s=limit_s, clock=lambda: 0.0)
    return found, asked


def test_a_change_may_take_a_quarter_longer_than_the_plan_before_with_the_same_seed(
    plan: Plan,
) -> None:
    """Check that a run's limit is 30 s at least, and never more than the time that is left."""
    before_s = (10.0, 100.0, 600.0)

    def seconds(run: Plan) -> float:
        return before_s[run.seed] * (0.98 if run.optimizer.lr == 0.5 else 1.0)

    found, asked = asked_of(plan, seconds, 700.0, seeds=3)
    assert [limit_s for second, limit_s, _ in asked if second] == [30.0, 137.0, 700.0]
    assert all(limit_s == 700.0 for second, limit_s, _ in asked if not second)
    assert [alike_s for *_, alike_s in asked] == [ALIKE_S, 0.0] * 2 + [ALIKE_S] * 2
    assert found.rates == (100.0, 200.0)


def test_a_gain_that_the_seeds_cannot_show_says_how_many_would(plan: Plan) -> None:
    def seconds(run: Plan) -> float:
        return (9.7 if run.optimizer.lr == 0.5 else 10.0) * (1 + 0.04 * (run.seed % 2))

    found, asked = asked_of(plan, seconds, 700.0, seeds=5)
    assert found.verdict == "not shown" and len(asked) == 10 and found.seeds == 5
    assert found.reason == (
        "sooner at the target with 5 of 5 seeds, which is not shown at p < 0.01; about 18 seeds "
        "should show such a gain"
    )
    assert found.enough == 18
    missed, asked = asked_of(plan, lambda run: seconds(run) + (run.seed == 2), 700.0)
    assert missed.verdict == "worse" and len(asked) == 6 and "as small" in missed.reason


def test_the_clock_leaves_what_looks_better_not_shown(plan: Plan) -> None:
    """A pair is enough to say so, and how many should do."""

    def seconds(run: Plan) -> float | str:
        if run.seed == 1:
            return f"{NOT_DONE} it"
        return 6.0 if run.optimizer.lr == 0.5 else 10.0

    found, asked = asked_of(plan, seconds, 700.0)
    assert found.verdict == "not shown" and len(asked) == 3
    assert found.reason == (
        "sooner at the target with 1 of 1 seeds, which is not shown at p < 0.01; about 2 seeds "
        "should show such a gain; time was up after 1 of at most 7"
    )


def test_a_target_is_crossed_between_two_validations() -> None:
    rows = [{"wall_s": 10.0 * i, "bits_per_byte": 3.0 - 0.2 * i} for i in range(1, 5)]
    assert crossed_s(rows, 2.45) == pytest.approx(27.5)
    assert crossed_s(rows, 2.4) == pytest.approx(30.0) and crossed_s(rows, 2.9) == 10.0


@pytest.mark.parametrize(("limit_s", "verdict"), [(700.0, "worse"), (15.0, "cut")])
def test_too_late_for_the_plan_before_is_lost_and_too_late_for_the_clock_is_unknown(
    plan: Plan, limit_s: float, verdict: str
) -> None:
    found, asked = asked_of(
        plan, lambda run: f"{NOT_DONE} it" if run.optimizer.lr == 0.5 else 10.0, limit_s
    )
    assert found.verdict == verdict and len(asked) == 2


def test_seeds_that_a_target_was_missed_with_are_in_no_ratio() -> None:
    before, after = [inf, 10.0, 12.0, 11.0, 10.0, 12.0, 11.0], [5.0, 5.0, 6.0, 5.5, 5.0, 6.0, inf]
    found = judge_seeds(before, after, 7)
    assert found.ratio is not None and found.ratio.value == pytest.approx(2.0)
    assert found.ratio.n == 5 and found.won == 6 and found.seeds == 7
    assert found.verdict == "worse" and "missed the target" in found.reason


def test_the_fastest_and_the_slowest_of_five_are_left_out() -> None:
    assert trimmed([9.0, 1.0, 2.0, 3.0, 4.0]) == 3.0
    assert trimmed([1.0, 2.0, 3.0, 8.0]) == 3.5


def test_a_run_ends_with_its_own_minutes_or_the_trials(plan: Plan, tmp_path: Path) -> None:
    """Only where the trial's are fewer does their end say nothing of the target."""
    asked: list[tuple[float, bool, float]] = []

    def ask(what: Any, run: Plan, cut: bool, *, limit_s: float) -> Reading:
        asked.append((run.goal.minutes or 0.0, cut, limit_s))
        return Reading()

    worker: Any = SimpleNamespace(ask=ask)
    for own in (3.0, 30.0):
        aimed = plan.replaced(goal=plan.goal.model_copy(update={"minutes": own}))
        train_with(worker, tmp_path)(aimed, 600.0)
    train_with(worker, tmp_path)(aimed, 6.0)  # too little for a start, and not for nothing
    assert asked == [(3.0, False, 660.0), (9.8, True, 660.0), (0.05, True, 66.0)]
