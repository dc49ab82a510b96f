"""What is measured again at the end: the whole way, and changes that were kept on few steps.

Where minutes were short a change may stay on a look's 12 steps, provisionally. What time is left at
the end goes to those changes, that of the largest gain first, each beside the plan that it was made
of and with all the steps that are wanted. One that does not win there is undone; where later
changes stand on it, it stays provisional, and says so. Then the first plan is timed beside the
best.
"""

from dataclasses import replace

from headrace.tuner.kinds import kind_of
from headrace.tuner.running import WANTED, Run
from headrace.tuner.step import Step
from headrace.tuner.turns import ACCEPT, FITS, LOOK


def whole_way(run: Run) -> None:
    """The first plan beside the best, where more than one change lies between them."""
    assert run.pool is not None
    best = run.pool.best
    if len(run.kept) < 2 or kind_of(run.first, best.plan) == "learning":
        return
    if run.first_s is None or run.left_s() <= run.least_s:
        return
    found = run.pair(run.start, best)
    run.total = found.ratio if found.steps >= LOOK else None


def provisional(run: Run) -> None:
    """Changes that were kept on few steps, on all that are wanted, where those fit."""
    few = [step for step in run.kept if step.provisional]
    for step in sorted(few, key=lambda step: -_gain(run, step)):
        if step in run.path and run.left_s() > _whole_s(run, step):
            _again(run, step)


def _again(run: Run, step: Step) -> None:
    """One of them: it is sure now, or undone."""
    spent_s = run.store.spent_s
    before, after = run.kept_of[step.number]
    run.tell(f"       again, on {ACCEPT.timed} steps: {' '.join(step.changes)}")
    found = run.pair(before, after)
    seconds = step.seconds + run.store.spent_s - spent_s
    if found.verdict == "cut":
        run.tell(f"       not done, it stays provisional: {found.reason}")
    if found.ratio is None or found.drifted or found.steps < ACCEPT.timed:
        return
    step = replace(
        step, ratio=found.ratio, memory=found.memory, steps=found.steps, seconds=seconds,
        before_s=found.before_s, peak_bytes=found.peak_bytes,
    )  # fmt: skip
    reason = f"{found.reason}; timed again on {found.steps} steps"
    if found.verdict == "better":
        run.again(replace(step, reason=reason, provisional=False, after_s=found.after_s))
        return
    if run.kept[-1].number == step.number:
        run.undo([replace(step, reason=reason)], "it is no gain there")
        return
    run.again(replace(step, reason=f"{reason}, and later changes stand on it"))


def _gain(run: Run, step: Step) -> float:
    if run.rules.aim == "memory" and step.memory:
        return 1 / step.memory
    return 0.0 if step.ratio is None else step.ratio.value


def _whole_s(run: Run, step: Step) -> float:
    """Seconds that a pair with all steps may take: it is built, compiled and warmed anew."""
    ready_s, blocks = max(run.ready_s, default=0.0), 2 * ACCEPT.rounds
    steps_s = sum(
        blocks * max(WANTED.steps * s, WANTED.block_s) + (ACCEPT.rounds + 1) * s
        for s in (step.before_s or 0.0, step.after_s or 0.0)
    )
    return (ready_s + steps_s) / FITS
