"""A run to a target, as the tuner compares changes of learning."""

from pathlib import Path

from headrace.core.plan import Plan
from headrace.trials.readings import Worker
from headrace.trials.target import train_with


def test_a_run_tells_its_seconds_to_the_target(plan: Plan, tmp_path: Path) -> None:
    """A real run, here: one target is met at the first evaluation, the other never."""
    train = train_with(Worker(here=True), tmp_path / "targets")
    for target, met in ((50.0, True), (0.01, False)):
        goal = plan.goal.model_copy(update={"bits_per_byte": target, "steps": 2})
        found = train(plan.replaced(goal=goal, guard=False), 600.0)
        assert not found.refused and bool(found.seconds) == met
    assert not list((tmp_path / "targets").rglob("step-*"))
