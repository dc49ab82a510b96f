"""Repeat trials at the end: the first plan beside the last, and changes accepted on few steps.

Where minutes were few a change may stay on a look's 12 steps, provisionally. What time is left at
the end goes to those changes, that of the largest gain first, each beside the plan that it was made
of and with all the steps that are wanted. A change that does not win there is undone. Where later
changes stand on it, it stays provisional, and says so. Then the first plan is timed beside the
best.

Before that, the fastest plan that was turned down for its learning is tried beside the best, where
it is faster than that: what was accepted is not to be both slower and worse than what was not.
"""

from dataclasses import replace

from headrace.tuner.effects import effect_of
from headrace.tuner.paired_blocks import ACCEPT, FITS, LOOK
from headrace.tuner.running import WANTED, Tuning
from headrace.tuner.trial_row import TrialRow


def time_first_beside_best(tuning: Tuning) -> None:
    """Time the first plan beside the best, where more than one change lies between them."""
    assert tuning.pool is not None
    best = tuning.pool.best
    if len(tuning.kept) < 2 or effect_of(tuning.first, best.plan) == "learning":
        return
    if tuning.first_s is None or tuning.left_s() <= tuning.least_s:
        return
    compared = tuning.pair(tuning.start, best)
    tuning.total = compared.ratio if compared.steps >= LOOK else None


def fastest_turned_down(tuning: Tuning) -> None:
    """Try the fastest plan that was turned down for its learning beside the best, if it is faster.

    Beside the best that it was turned down by it is not tried again.
    """
    assert tuning.pool is not None
    best = tuning.pool.best
    if tuning.rules.aim == "memory" or tuning.left_s() <= tuning.least_s:
        return
    others = [one for one in tuning.turned_down if one.beside is not best]
    steps = [tuning.slower(one.beside) / one.ratio for one in others]
    if not steps or min(steps) * (1 + tuning.rules.margin) >= tuning.slower(best):
        return
    fastest = others[steps.index(min(steps))]
    spent_s = tuning.store.spent_s
    tuning.trying(fastest.proposal, ", turned down before and faster than the best")
    compared = tuning.pair(best, fastest.proposal, screen=True)
    tuning.record(fastest.proposal, compared, "accept", spent_s)
    if compared.verdict == "better":
        tuning.pool.keep(fastest.proposal, compared.after_s)


def provisional(tuning: Tuning) -> None:
    """Repeat changes that were accepted on few steps, on all that are wanted, where those fit."""
    few = [step for step in tuning.kept if step.provisional]
    for step in sorted(few, key=lambda step: -_gain(tuning, step)):
        if step in tuning.path and tuning.left_s() > _whole_s(tuning, step):
            _repeat(tuning, step)


def _repeat(tuning: Tuning, step: TrialRow) -> None:
    """Repeat one of them: it is sure now, or undone."""
    spent_s = tuning.store.spent_s
    before, after = tuning.kept_of[step.number]
    tuning.note_line(f"       once more, on {ACCEPT.timed} steps: {' '.join(step.changes)}")
    compared = tuning.pair(before, after)
    seconds = step.seconds + tuning.store.spent_s - spent_s
    if compared.verdict == "cut":
        tuning.note_line(f"       not done, it stays provisional: {compared.reason}")
    if compared.ratio is None or compared.drifted or compared.steps < ACCEPT.timed:
        return
    step = replace(
        step,
        ratio=compared.ratio,
        memory=compared.memory,
        steps=compared.steps,
        seconds=seconds,
        before_s=compared.before_s,
        peak_bytes=compared.peak_bytes,
    )
    reason = f"{compared.reason}; timed once more on {compared.steps} steps"
    if compared.verdict == "better":
        tuning.revise(replace(step, reason=reason, provisional=False, after_s=compared.after_s))
        return
    if tuning.kept[-1].number == step.number:
        tuning.undo([replace(step, reason=reason)], "it is no gain there")
        return
    tuning.revise(replace(step, reason=f"{reason}, and later changes stand on it"))


def _gain(tuning: Tuning, step: TrialRow) -> float:
    if tuning.rules.aim == "memory" and step.memory:
        return 1 / step.memory
    return 0.0 if step.ratio is None else step.ratio.value


def _whole_s(tuning: Tuning, step: TrialRow) -> float:
    """Return the seconds of a pair with all steps: it is built, compiled and warmed anew."""
    ready_s, blocks = max(tuning.ready_s, default=0.0), 2 * ACCEPT.rounds
    steps_s = sum(
        blocks * max(WANTED.steps * s, WANTED.block_s) + (ACCEPT.rounds + 1) * s
        for s in (step.before_s or 0.0, step.after_s or 0.0)
    )
    return (ready_s + steps_s) / FITS
