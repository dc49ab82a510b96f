"""Changes of what is learned: each by its time to the plan's target, over seeds.

What was kept of execution was judged by its steps alone. A run to the target also pays for what
comes before its first step, as compiling: where two seeds of the first plan are sooner there than
the same two with all those changes, or one is clearly, they are undone before anything is learned
on top of them. Where the minutes are too few for that, changes of what is learned stand on them and
go beside the first plan, which judges all at once; what compiles for longer than a part of such a
run wins back is undone before. Without such runs they stay provisional.
A change that looks better and is not shown to be is not kept; it says which command should show it.
The first run of all is the first plan's own: where the clock ends it before the target, no change
of what is learned can be judged, none is tried, and how far that run came is told.
At the end, where the time suffices, the first plan goes to the target beside the last one, with all
seeds, so that what the tuning bought is one measured ratio; runs that were made are not made again.
"""

from dataclasses import replace
from math import ceil, isfinite
from typing import Any

from headrace.core.units import format_seconds
from headrace.plan.changes import difference
from headrace.plan.plan import Plan
from headrace.tuner.judge import Compared
from headrace.tuner.path import Target
from headrace.tuner.proposals import Proposal
from headrace.tuner.running import Run
from headrace.tuner.step import Step, length_of
from headrace.tuner.store import fingerprint
from headrace.tuner.target import FEWEST, GIVEN_UP, Train, learn

LEAST_EXECUTION, MOST_EXECUTION = 0.25, 0.5
"""Of the minutes that changes of execution may take where changes of learning follow."""
PAIRS = 3.4
"""Runs of the first plan that two pairs take: its own two, and two of a change that is 1.4 times as
soon, which two seeds may show."""
REACHED = 0.25
"""Share of a run's length in which what compiles has to be won back where the target is the aim:
what learns better is there long before the run would end, and each of its runs compiles anew."""
SETTLES = 6.0
"""Runs for which there must be time to take what was kept to the target before anything is learned
on it: two of the first plan, two of the best, and two of a change."""


def learning(run: Run, train: Train | None, seeds: int) -> None:
    """Try changes of learning; without `train` they are refused."""
    assert run.pool is not None
    waiting = list(run.sources.learning(run.pool.best.plan))
    if waiting and train is None:
        what = f"{len(waiting)} changes of learning"
        told = "they are compared by their time to a target: goal.bits_per_byte=TARGET"
        run.row(Step(len(run.path) + 1, (what,), "refused", told, equality="learning"))
    if train is None:
        return
    rival = run.pool.best
    if waiting:
        rival = _rival(run, train)
        waiting = list(run.sources.learning(run.pool.best.plan))
    tried: set[Any] = {fingerprint(run.first)}
    while waiting:
        proposal = waiting.pop(0)
        change = difference(run.pool.best.plan, proposal.plan)
        if {change, fingerprint(proposal.plan)} & tried:
            continue
        tried |= {change, fingerprint(proposal.plan)}
        if run.left_s() <= _least_s(run, rival) or run.unreached:
            rest = [difference(run.pool.best.plan, p.plan) for p in (proposal, *waiting)]
            run.unlearned, run.up = [" ".join(words) for words in rest], True
            return
        if _teach(run, rival, proposal, train, seeds).verdict == "better":
            rival, waiting = proposal, list(run.sources.learning(proposal.plan))


def longest_s(run: Run) -> float | None:
    """Seconds after which a run of the first plan ends; None where nothing tells."""
    step_s = run.first_s or run.start.prediction.time.step_s
    length = length_of(run.first, step_s)
    return None if length is None or not step_s else length.steps * step_s


def allowed(run: Run) -> tuple[bool | None, str]:
    """Whether the minutes allow two pairs of runs to the target, and that in words.

    None where no step of the plan was timed or predicted yet. A plan that nothing but its target
    ends is taken there: its first run tells.
    """
    step_s, target = run.first_s or run.start.prediction.time.step_s, run.first.goal.bits_per_byte
    run_s, length = longest_s(run), length_of(run.first, step_s)
    if run_s is None or length is None:
        return (None if step_s is None else True), ""
    told = f"a run to {target:g} takes {format_seconds(run_s)} at most ({length.ends} at "
    told += f"{format_seconds(step_s or 0.0)} each)"
    if run.left_s() >= PAIRS * run_s:
        return True, f"{told}, so two pairs of runs fit: for the time to the target"
    minutes = ceil((run.clock() - run.began_s + PAIRS * run_s) / 60)
    return False, (
        f"{told}, and two pairs of runs do not fit into {run.minutes_s / 60:g} min: for the time "
        f"of a step; --minutes {minutes} goes for the target"
    )


def share_of_execution(run: Run) -> float:
    """Share of the minutes for changes of execution: what three pairs of runs leave, if enough."""
    left = 1 - 1.5 * PAIRS * (longest_s(run) or 0.0) / run.minutes_s
    return min(MOST_EXECUTION, max(LEAST_EXECUTION, left))


def _least_s(run: Run, rival: Proposal) -> float:
    """Seconds without which no change can be judged: two runs of it, those of its rival stand."""
    if run.run_s is None or rival is run.start:
        return run.learning_s
    return min(run.learning_s, FEWEST * run.run_s)


def _rival(run: Run, train: Train) -> Proposal:
    """Return the plan that changes of learning are tried beside.

    What compiles for longer than a run to the target wins back is undone by its bill. The rest
    goes to the target first where the minutes allow that and a change of learning. Where they do
    not, changes of learning stand on it and go beside the first plan, which judges both at once.
    """
    assert run.pool is not None
    for step in run.kept:
        length, back = length_of(run.first, step.before_s), step.break_even
        if length is not None and back is not None and back > REACHED * length.steps:
            undone = [one for one in run.kept if one.number >= step.number]
            told = f"its compiling is won back after {ceil(back):,} steps, and a run {length.words}"
            run.undo(undone, f"{told} at most, a quarter of which may reach the target")
            break
    run_s = longest_s(run)
    if run_s is not None and run.kept and run.left_s() < SETTLES * run_s:
        return run.start
    _settle(run, train)
    return run.pool.best


def _teach(run: Run, rival: Proposal, proposal: Proposal, train: Train, seeds: int) -> Compared:
    """One change of learning beside the best so far, or the first plan, over seeds."""
    assert run.pool is not None
    best, since_s = run.pool.best, run.store.spent_s
    more = "" if rival is best else ", beside the first plan"
    more += f", at most {seeds} seeds to {run.first.goal.bits_per_byte:g}"
    run_s, _ = run.run_to_target_s()
    more += f", one of both in about {format_seconds(2 * run_s)}" if run_s else ""
    run.trying(proposal, more)
    found = _to_target(run, rival.plan, proposal.plan, train, seeds)
    run.learning_s = run.store.spent_s - since_s
    if rival is not best:
        found = replace(found, reason=f"{found.reason}; beside the first plan, with all changes")
    run.note(proposal, found, "learning", since_s)
    if found.verdict == "better":
        before_s, after_s = (
            plan.batch.tokens / rate if rate else None
            for plan, rate in zip((rival.plan, proposal.plan), found.rates, strict=True)
        )
        run.pool.best, run.pool.best_s, run.target = proposal, after_s, None
        if found.after_s is not None and isfinite(found.after_s):
            run.run_s = found.after_s
        if rival is run.start:
            run.first_s = run.first_s or before_s
            _keep(run, found)
    return found


def _settle(run: Run, train: Train) -> None:
    """Undo what was kept of execution where the first plan is at the target before it."""
    assert run.pool is not None
    kept = list(run.kept)
    if not kept or run.left_s() <= 0 or run.first_s is None:
        return
    run.tell(f"       the first plan beside the best to the target, {GIVEN_UP} seeds")
    found = _to_target(run, run.first, run.pool.best.plan, train, GIVEN_UP)
    if found.verdict == "cut":
        run.tell(f"       not done, the changes stay provisional: {found.reason}")
        return
    _keep(run, found)
    if found.verdict != "worse" or found.won:
        return
    if found.ratio is not None and found.ratio.value * (1 + run.rules.margin) >= 1:
        return
    run.undo(
        kept, f"the first plan is sooner at the target with {found.seeds} of {found.seeds} seeds"
    )


def whole_way(run: Run, train: Train, seeds: int) -> None:
    """The first plan beside the best to the target, with all seeds; not where that is known."""
    assert run.pool is not None
    if not run.kept or run.left_s() <= run.learning_s or run.unreached:
        return
    if run.target is not None and run.target.better:
        return
    found = _to_target(run, run.first, run.pool.best.plan, train, seeds)
    if found.verdict == "cut":
        run.tell(f"       the first plan beside the last, not done: {found.reason}")
        return
    run.went_whole, run.target = True, None
    _keep(run, found)
    if found.ratio is None:
        run.tell(f"       {run.missed}")


def _keep(run: Run, found: Compared) -> None:
    """What came of the first plan beside the best: a ratio, or words where none is known."""
    if found.ratio is None:
        run.missed = f"the first plan beside the last, to the target: {found.reason}"
        return
    missed = found.seeds - found.ratio.n
    better = found.verdict == "better"
    run.target = Target(found.ratio, True, found.before_s, found.after_s, missed, better)


def _to_target(run: Run, first: Plan, second: Plan, train: Train, seeds: int) -> Compared:
    """Both over seeds; what is cut off says how many minutes would do."""
    began_s, limit_s = run.clock() - run.began_s, run.left_s()
    found = learn(
        first, second, range(run.first.seed, run.first.seed + seeds), train, run.store,
        limit_s=limit_s, clock=run.clock,
    )  # fmt: skip
    if found.before_s is not None and isfinite(found.before_s):
        run.run_s = found.before_s
    if found.verdict == "not shown":
        return replace(found, reason=f"{found.reason}: {_would_show(run, found, began_s, seeds)}")
    if found.verdict != "cut":
        return found
    run.unreached = run.run_s is None
    run_s, how = run.run_to_target_s()
    runs_s, limit_s = 2 * FEWEST * (run_s or 0.0), max(limit_s, run.store.late_s)
    does = "would do" if run.run_s else "would do, or fewer where it takes less"
    known_s = (run_s or 0.0) if run.unreached else runs_s
    if known_s > limit_s:  # else it took longer than that
        how = f"{how}, {2 * FEWEST} such runs would take {format_seconds(runs_s)}: "
    else:
        how = f"{how}, and it took longer: " if how else ""
        runs_s, does = 2 * limit_s, "gives it twice as long"
    minutes = _minutes(run, began_s, runs_s)
    told = f"{found.reason}; {how}--minutes {minutes} {does}, and the same command goes on"
    return replace(found, reason=told)


def _would_show(run: Run, found: Compared, began_s: float, seeds: int) -> str:
    """The command that should show what looks better, where one is known."""
    if found.enough is None or found.before_s is None or found.after_s is None:
        return "more seeds than anybody has"
    pair_s = found.before_s + found.after_s
    minutes = _minutes(run, began_s, found.enough * pair_s)
    more = f"--seeds {found.enough} " if found.enough > seeds else ""
    each = f"a seed of both takes {format_seconds(pair_s)}"
    return f"{each}: {more}--minutes {minutes} should do, and the same command goes on"


def _minutes(run: Run, began_s: float, runs_s: float) -> int:
    """Whole minutes in which runs end that begin after so long and take so long; it is noted."""
    least_s = runs_s / (1 - run.share) if run.up and run.share < 1 else 0.0
    minutes = ceil(max(began_s + runs_s, least_s) / 60)
    run.needed.append(minutes)
    return minutes
