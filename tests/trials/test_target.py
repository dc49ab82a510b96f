"""A run to a target, as the tuner compares changes of learning."""

import time
from math import inf, isfinite
from pathlib import Path

import pytest

from headrace.core.plan import Plan
from headrace.trials.readings import Reading, Worker
from headrace.trials.store import Store
from headrace.trials.target import learn, train_with


def test_a_run_tells_its_seconds_to_the_target(plan: Plan, tmp_path: Path) -> None:
    """A real run, here: one target is met at the first evaluation, the other never."""
    train = train_with(Worker(here=True), tmp_path / "targets")
    for target, met in ((50.0, True), (0.01, False)):
        goal = plan.goal.model_copy(update={"bits_per_byte": target, "steps": 2})
        found = train(plan.replaced(goal=goal, guard=False), 600.0)
        assert not found.refused and bool(found.seconds) == met
    assert not list((tmp_path / "targets").rglob("step-*"))


@pytest.mark.parametrize(
    ("before_s", "after_s", "runs", "verdict", "says"),
    [
        (10.0, 20.0, 4, "worse", "sooner at the target with 0 of 2 seeds"),
        (10.0, 5.0, 14, "better", "sooner at the target with 7 of 7 seeds"),
        (inf, 5.0, 4, "refused", "the plan before it misses the target itself"),
    ],
)
def test_two_lost_seeds_or_a_missed_target_are_enough(
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
    assert (found.verdict, found.reason, len(asked)) == (verdict, says, runs)
    if isfinite(before_s):
        assert found.ratio is not None and found.ratio.value == pytest.approx(before_s / after_s)
