"""Plan a new run that begins at a checkpoint of another one: `train --branch RUN@STEP`.

A branch shares the steps up to its checkpoint with its parent, which stays as it is: no step is
trained again, the stream of rows goes on where the parent's stood, and optimizer and random state
come along. What may change is what is to come: schedule, goal, learning rate and other knobs, and
techniques of the room `schedule`. So one stable run serves many lengths: each branch cools a
checkpoint down, or goes on from it. Source: arXiv 2404.06395, section 4.3; arXiv 2405.18392.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.command import rerun_with, train_command
from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.inference.load import note_rate_jump, read_plan, resolve_run
from headrace.optim.schedule import decay_begins, learning_rate
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue
from headrace.train.checkpoint import Saved, steps_in
from headrace.train.identity import (
    MUST_STAY,
    Differences,
    among,
    back,
    differences,
    switched_off_course,
)
from headrace.train.run_folder import RunFolder

FALLING = ("cosine", "warmup_stable_decay")
"""Kinds of schedule whose rate falls to an end."""
STABLE = ("constant", "warmup_stable_decay")
"""Kinds of schedule that hold the rate."""
OWN_SHARE = 0.2
"""Share of its parent's steps that a branch without a goal of its own is advised to take."""


@dataclass(frozen=True)
class Branch:
    """Hold a run to begin: its plan, the folder of its parent, and the checkpoint to begin at."""

    plan: Plan
    parent: Path
    checkpoint: str


def plan_of_branch(
    where: str,
    catalogue: Catalogue,
    *,
    overrides: Iterable[str] = (),
    with_: Iterable[str] = (),
    without: Iterable[str] = (),
    note: Callable[[str], None],
) -> Branch:
    """Return the branch that a command line asks for: the parent's plan with its changes.

    Args:
        where: RUN@STEP; the step is a number, `latest` or `best`.
        catalogue: the techniques and model families.
        overrides: the `key=value` words of the command line.
        with_: the names of techniques that it adds.
        without: the names of techniques that it removes.
        note: called with a line for the user.

    Raises:
        ConfigError: there is no such run or checkpoint, or the plan with the changes is no
            continuation of the run.
    """
    run, step, folder = _split(where)
    before = read_plan(folder, catalogue)
    plan = Plan.read(before.to_toml(), catalogue, overrides=overrides, with_=with_, without=without)
    checkpoint = f"step-{step}"
    saved = Saved(folder / "checkpoints" / checkpoint, verify=False)
    _check_continues(saved, before, plan, step)
    if (ends := plan.goal_steps) is not None and ends <= step:
        more = max(1, round(OWN_SHARE * step))
        raise ConfigError(
            f"a branch at step {step} ends at once: the goal's last step is {ends}",
            mend(f"goal.steps={step + more}"),
        )
    _check_phase(before, plan, step, run, folder)
    note_rate_jump(before, plan, folder, checkpoint, note)
    return Branch(plan, folder, checkpoint)


def _split(where: str) -> tuple[str, int, Path]:
    """Return the run as it was typed, the step, and the run's folder, of RUN@STEP.

    Raises:
        ConfigError: a part is missing or names nothing; the remedy has the nearest that exists.
    """
    run, _, which = where.rpartition("@") if "@" in where else (where, "", "")
    if not run:
        raise ConfigError(
            f"--branch {where!r} names no run", rerun_with("--branch", "RUN@STEP", verb="train")
        )
    folder = resolve_run(Path(run))
    root = RunFolder(folder).checkpoints
    steps = steps_in(root)
    if not steps:
        raise ConfigError(
            f"{folder} has no checkpoint to begin at",
            f"{train_command(folder, '--resume')}, which saves one",
        )
    if which in ("latest", "best") and (root / which).is_dir():
        return run, int((root / which).resolve().name.removeprefix("step-")), folder
    if which.isdecimal() and int(which) in steps:
        return run, int(which), folder
    asked = int(which) if which.isdecimal() else steps[-1]
    near = min(steps, key=lambda step: (abs(step - asked), step))
    has = ", ".join(map(str, steps))
    raise ConfigError(
        f"{folder} has no checkpoint at step {which or '(none given)'}; it has {has}",
        rerun_with("--branch", f"{run}@{near}", verb="train"),
    )


def _check_continues(saved: Saved, before: Plan, plan: Plan, step: int) -> None:
    """Refuse changes by which a branch would not go on from its parent's weights and rows.

    Raises:
        ConfigError: names the key and both values.
    """
    changes = differences(saved, plan)
    fixed = [key for key in changes if among(key, MUST_STAY)]
    other_rows = _of_other_rows(changes, before, plan, step)
    for key in (*fixed, *other_rows, *switched_off_course(saved, plan, changes)):
        was, now = changes[key]
        raise ConfigError(
            f"a branch goes on with its parent's weights and data: {key} was {was!r} and is "
            f"{now!r} now",
            f"schedule.steps={before.horizon_steps}"
            if key == "goal.steps"
            else back(saved, key, changes[key]),
        )


def _of_other_rows(changes: Differences, before: Plan, plan: Plan, step: int) -> list[str]:
    """Return the changes by which steps before the checkpoint would have read other rows."""
    if before.batches.before(step) == plan.batches.before(step):
        return []
    plans = (before, plan)
    grow = [f"techniques.{n}" for p in plans for n, t in p.techniques.items() if t.batch_stages(p)]
    ends = [key for key in ("schedule.steps", "goal.steps") if key in changes]
    return [key for key in changes if among(key, grow)] or ends[:1]


def _check_phase(before: Plan, plan: Plan, step: int, run: str, folder: Path) -> None:
    """Refuse a branch that wants the whole rate back after its parent's has begun to fall.

    Raises:
        ConfigError: names the last checkpoint before the decay, or the step where it began.
    """
    horizon, old = before.horizon_steps, before.schedule
    if old.kind not in FALLING or horizon is None or plan.schedule.kind not in STABLE:
        return
    begins = decay_begins(old, horizon)
    whole = learning_rate(plan.schedule, plan.horizon_steps)(step) == 1
    if not whole or step <= begins + 1 or step <= old.warmup_steps:
        return
    share = learning_rate(old, horizon)(step - 1)
    stable = [n for n in steps_in(RunFolder(folder).checkpoints) if n <= begins + 1]
    falls = mend(f"schedule.kind={old.kind}", f"schedule.steps={horizon}")
    raise ConfigError(
        f"the decay of {folder} began after step {begins + 1}, and at step {step} the rate is "
        f"{share:.3g} of the highest: a stable phase cannot go on from there; "
        + (f"step {stable[-1]} is the last checkpoint before" if stable else "no checkpoint is"),
        rerun_with("--branch", f"{run}@{stable[-1]}", verb="train") if stable else falls,
    )
