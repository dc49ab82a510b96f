"""Parts of runs: schedules shrunk to them, and states that longer ones go on from."""

import inspect
from collections.abc import Callable
from pathlib import Path

from headrace.cli.catalogue import catalogue
from headrace.plan.plan import Plan
from headrace.tuner.prefix import (
    PrefixRuns,
    newest_state,
    shrunk,
    stable_steps,
    stem,
    timed_as,
    train_prefix,
)
from headrace.tuner.store import fingerprint
from headrace.tuner.worker import Worker

LONG = ("schedule.steps=100", "schedule.warmup_steps=20")
STABLE = ("+warmup_stable_decay", *LONG)


def test_a_schedule_shrinks_to_the_part_and_keeps_its_shape(
    plan: Plan, change: Callable[..., Plan]
) -> None:
    stable = change(plan, *STABLE)
    part = shrunk(stable, 40, 20)
    assert part.goal.steps == part.horizon_steps == 40 and not part.techniques
    assert part.schedule.kind == "warmup_stable_decay" and part.schedule.warmup_steps == 4
    assert stable_steps(part) == 33 and stem(part) == stem(shrunk(stable, 80, 20))
    root = change(stable, "techniques.warmup_stable_decay.shape=sqrt")
    assert stem(shrunk(root, 40, 20)) == stem(part)
    assert stem(shrunk(change(stable, "optimizer.lr=0.1"), 40, 20)) != stem(part)
    assert stem(part.replaced(seed=7)) != stem(part)
    assert not stable_steps(shrunk(change(plan, *LONG), 40, 20))  # a cosine falls at once
    assert stable_steps(shrunk(change(plan, "schedule.kind=constant"), 40, 20)) == 40
    assert not stable_steps(shrunk(change(stable, "+ademamix"), 40, 20))
    rate = change(stable, "optimizer.lr=0.1", "schedule.decay_fraction=0.4")
    assert fingerprint(timed_as(rate)) == fingerprint(timed_as(plan))
    batch = change(plan, "batch.tokens=128")
    assert fingerprint(timed_as(batch)) != fingerprint(timed_as(plan))


def test_what_goes_on_from_a_shared_state_ends_where_a_new_run_does(
    plan: Plan, change: Callable[..., Plan], tmp_path: Path
) -> None:
    """Real runs: a decay of another shape shares the stable steps, a longer part goes on."""
    linear = change(plan, *STABLE)
    root = change(linear, "techniques.warmup_stable_decay.shape=sqrt")
    runs = PrefixRuns(Worker(here=True), tmp_path)
    first = runs.train(shrunk(linear, 10, 10), 600.0, goes_on=True)
    assert not first.refused and first.steps == 10 and len(first.losses) == 1
    folder = tmp_path / stem(shrunk(linear, 10, 10))
    assert [path.name for path in tmp_path.rglob("step-*")] == ["step-9"]
    state = newest_state(folder, 9)
    assert state is not None and state.name == "step-9" and newest_state(folder, 8) is None
    other = runs.train(shrunk(root, 10, 10), 600.0, goes_on=False)
    longer = runs.train(shrunk(linear, 20, 10), 600.0, goes_on=False)
    assert (other.steps, longer.steps) == (1, 11)
    anew = train_prefix(shrunk(linear, 20, 10), str(tmp_path / "anew"), goes_on=False)
    assert anew.steps == 20 and anew.losses == longer.losses != first.losses
    runs.keep([shrunk(linear, 20, 10)])
    assert newest_state(folder, 9) and not (tmp_path / "anew").exists()
    runs.keep(())
    assert not any(tmp_path.iterdir())


def test_a_plan_that_leaves_the_vocabulary_to_its_tokenizer_is_timed(
    plan: Plan, tmp_path: Path
) -> None:
    """A recipe's plan has no model.vocab until a run fills it in."""
    open_plan = plan.replaced(model=plan.model.model_copy(update={"vocab": 0}))
    reading = PrefixRuns(Worker(here=True), tmp_path).time(timed_as(open_plan), 600.0)
    assert not reading.refused and reading.seconds[0] > 0


def test_techniques_that_read_the_horizon_say_so() -> None:
    """A state would else be taken for one of a longer run, which it is not."""
    reads = {
        name
        for name, kind in catalogue().techniques.items()
        if any(
            word in inspect.getsource(method)
            for method in (kind.apply, kind.batch_stages, getattr(kind, "_ends", kind.apply))
            for word in ("horizon", "end_step")
        )
    }
    assert reads == {n for n, kind in catalogue().techniques.items() if kind.follows_horizon}
