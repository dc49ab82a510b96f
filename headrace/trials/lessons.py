"""Changes of what is learned: each by its time to the plan's target, over seeds.

What was kept of execution was judged by its steps alone. A run to the target also pays for what
comes before its first step, as compiling: where two seeds of the first plan are sooner there than
the same two with all those changes, or one is clearly, they are undone before anything is learned
on top of them. Without such runs they stay provisional.
A change that looks better and is not shown to be is not kept; it says which command should show it.
The first run of all is the first plan's own: where the clock ends it before the target, no change
of what is learned can be judged, none is tried, and how far that run came is told.
At the end, where the time suffices, the first plan goes to the target beside the last one, with all
seeds, so that what the tuning bought is one measured ratio; runs that were made are not made again.
"""

from dataclasses import replace
from math import ceil, isfinite
from typing import Any

from headrace.changes import difference
from headrace.core.plan import Plan
from headrace.core.units import format_seconds
from headrace.trials.judge import Compared
from headrace.trials.path import Target
from headrace.trials.proposals import Proposal
from headrace.trials.running import Run
from headrace.trials.step import Step
from headrace.trials.store import fingerprint
from headrace.trials.target import FEWEST, GIVEN_UP, Train, learn


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
    if waiting:
        _settle(run, train)
        waiting = list(run.sources.learning(run.pool.best.plan))
    tried: set[Any] = {fingerprint(run.first)}
    while waiting:
        proposal = waiting.pop(0)
        change = difference(run.pool.best.plan, proposal.plan)
        if {change, fingerprint(proposal.plan)} & tried:
            continue
        tried |= {change, fingerprint(proposal.plan)}
        if run.left_s() <= run.learning_s or run.unreached:
            rest = [difference(run.pool.best.plan, p.plan) for p in (proposal, *waiting)]
            run.unlearned, run.up = [" ".join(words) for words in rest], True
            return
        if _teach(run, proposal, train, seeds).verdict == "better":
            waiting = list(run.sources.learning(proposal.plan))


def _teach(run: Run, proposal: Proposal, train: Train, seeds: int) -> Compared:
    """One change of learning beside the best so far, over seeds."""
    assert run.pool is not None
    best, since_s = run.pool.best, run.store.spent_s
    run.trying(proposal, f", at most {seeds} seeds to {run.first.goal.bits_per_byte:g}")
    found = _to_target(run, best.plan, proposal.plan, train, seeds)
    run.learning_s = run.store.spent_s - since_s
    run.note(proposal, found, "learning", since_s)
    if found.verdict == "better":
        before_s, after_s = (
            plan.batch.tokens / rate if rate else None
            for plan, rate in zip((best.plan, proposal.plan), found.rates, strict=True)
        )
        run.pool.best, run.pool.best_s, run.target = proposal, after_s, None
        if best is run.start and run.first_s is None:
            run.first_s = before_s
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
    """The first plan beside the best to the target, with all seeds."""
    assert run.pool is not None
    if not run.kept or run.left_s() <= run.learning_s or run.unreached:
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
