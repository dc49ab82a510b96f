"""Try changes of what is learned, each by its time to the plan's target, over seeds.

What was accepted of execution was judged by its steps alone. A run to the target also pays for what
comes before its first step, as compiling. Where two seeds of the first plan are sooner there than
the same two with all those changes, or one is clearly, they are undone before anything is learned
on top of them. Where the minutes are too few for that, changes of what is learned stand on them and
go beside the first plan, which judges all at once. What compiles for longer than a part of such a
run saves is undone before. Without such runs they stay provisional.

A screen by short runs comes first where several changes wait (screen.py): what it drops is not
tried, what wins it is tried first.

A change that looks better and is not shown to be is not accepted; it says which command should show
it. The first run of all is the first plan's own. Where the clock ends it before the target, no
change of what is learned can be judged, none is tried, and the run's progress is reported.

At the end, where the time suffices, the first plan goes to the target beside the last one, with all
seeds, so that what the tuning bought is one measured ratio. Runs that were made are not repeated.
"""

from dataclasses import replace
from math import ceil, isfinite
from typing import Any

from headrace.core.units import format_seconds
from headrace.plan.changes import difference
from headrace.plan.plan import Plan
from headrace.tuner.judge import Compared
from headrace.tuner.path import Target
from headrace.tuner.prefix import Prefixes
from headrace.tuner.proposals import Proposal
from headrace.tuner.running import PAIRS, Tuning
from headrace.tuner.screen import screened
from headrace.tuner.store import fingerprint
from headrace.tuner.target import FEWEST, GIVEN_UP, Train, learn
from headrace.tuner.trial_row import TrialRow, length_of

LEAST_EXECUTION, MOST_EXECUTION = 0.25, 0.5
"""Least and largest share of the minutes that changes of execution may take where changes of
learning follow."""
REACHED = 0.25
"""Share of a run's length in which compiling has to break even where the target is the aim: what
learns better is there long before the run would end, and each of its runs compiles anew."""
SETTLES = 6.0
"""Runs for which there must be time to take what was accepted to the target before anything is
learned on it: two of the first plan, two of the best, and two of a change."""


def learning(
    tuning: Tuning, train: Train | None, seeds: int, prefixes: Prefixes | None = None
) -> None:
    """Try changes of learning, those that win a screen first; without `train` they are refused."""
    assert tuning.pool is not None
    waiting = list(tuning.sources.learning(tuning.pool.best.plan))
    if waiting and train is None:
        what = f"{len(waiting)} changes of learning"
        reason = "they are compared by their time to a target: goal.bits_per_byte=TARGET"
        tuning.row(TrialRow(len(tuning.path) + 1, (what,), "refused", reason, equality="learning"))
    if train is None:
        return
    rival = tuning.pool.best
    if waiting:
        rival = _rival(tuning, train)
    tried: set[Any] = {fingerprint(tuning.first)}
    waiting = _worth(tuning, tried, prefixes) if waiting else []
    while waiting:
        proposal = waiting.pop(0)
        change = difference(tuning.pool.best.plan, proposal.plan)
        if {change, fingerprint(proposal.plan)} & tried:
            continue
        tried |= {change, fingerprint(proposal.plan)}
        if tuning.left_s() <= _least_s(tuning, rival) or tuning.unreached:
            rest = [difference(tuning.pool.best.plan, p.plan) for p in (proposal, *waiting)]
            tuning.unlearned, tuning.up = [" ".join(words) for words in rest], True
            return
        if _teach(tuning, rival, proposal, train, seeds).verdict == "better":
            rival, waiting = proposal, _worth(tuning, tried, prefixes)


def _worth(tuning: Tuning, tried: set[Any], prefixes: Prefixes | None) -> list[Proposal]:
    """Return the changes of the best so far that are worth whole runs, and note what is not.

    Args:
        tuning: what is known.
        tried: changes and fingerprints that were tried; gets the changes that a screen dropped.
        prefixes: trains the short runs of a screen; without it all are worth whole runs.
    """
    assert tuning.pool is not None
    best = tuning.pool.best.plan
    new = [
        one
        for one in tuning.sources.learning(best)
        if not {difference(best, one.plan), fingerprint(one.plan)} & tried
    ]
    worth, dropped = screened(tuning, new, prefixes)
    tried |= dropped
    return worth


def allowed(tuning: Tuning) -> tuple[bool | None, str]:
    """Return whether the minutes allow two pairs of runs to the target, and that in words.

    None where no step of the plan was timed or predicted yet. A plan that nothing but its target
    ends is trained to it: its first run decides.
    """
    step_s, target = (
        tuning.first_s or tuning.start.prediction.time.step_s,
        tuning.first.goal.bits_per_byte,
    )
    run_s, length = tuning.longest_s, length_of(tuning.first, step_s)
    if run_s is None or length is None:
        return (None if step_s is None else True), ""
    words = f"a run to {target:g} takes {format_seconds(run_s)} at most ({length.ends} at "
    words += f"{format_seconds(step_s or 0.0)} each)"
    if tuning.left_s() >= PAIRS * run_s:
        return True, f"{words}, so two pairs of runs fit: for the time to the target"
    minutes = ceil((tuning.clock() - tuning.began_s + PAIRS * run_s) / 60)
    return False, (
        f"{words}, and two pairs of runs do not fit into {tuning.minutes_s / 60:g} min: for the "
        f"time of a step; --minutes {minutes} goes for the target"
    )


def share_of_execution(tuning: Tuning) -> float:
    """Return the share of the minutes for changes of execution: what three pairs of runs leave."""
    left = 1 - 1.5 * PAIRS * (tuning.longest_s or 0.0) / tuning.minutes_s
    return min(MOST_EXECUTION, max(LEAST_EXECUTION, left))


def _least_s(tuning: Tuning, rival: Proposal) -> float:
    """Return the seconds without which no change can be judged: two runs of it."""
    if tuning.run_s is None or rival is tuning.start:
        return tuning.learning_s
    return min(tuning.learning_s, FEWEST * tuning.run_s)


def _rival(tuning: Tuning, train: Train) -> Proposal:
    """Return the plan that changes of learning are tried beside.

    What compiles for longer than a run to the target saves is undone by its bill. The rest goes to
    the target first where the minutes allow that and a change of learning. Where they do not,
    changes of learning stand on it and go beside the first plan, which judges both at once.
    """
    assert tuning.pool is not None
    for step in tuning.kept:
        length, back = length_of(tuning.first, step.before_s), step.break_even
        if length is not None and back is not None and back > REACHED * length.steps:
            undone = [one for one in tuning.kept if one.number >= step.number]
            reason = (
                f"its compiling breaks even after {ceil(back):,} steps, and a run {length.words}"
            )
            tuning.undo(undone, f"{reason} at most, a quarter of which may reach the target")
            break
    run_s = tuning.longest_s
    if run_s is not None and tuning.kept and tuning.left_s() < SETTLES * run_s:
        return tuning.start
    _settle(tuning, train)
    return tuning.pool.best


def _teach(
    tuning: Tuning, rival: Proposal, proposal: Proposal, train: Train, seeds: int
) -> Compared:
    """Try one change of learning beside the best so far, or the first plan, over seeds."""
    assert tuning.pool is not None
    best, since_s = tuning.pool.best, tuning.store.spent_s
    more = "" if rival is best else ", beside the first plan"
    more += f", at most {seeds} seeds to {tuning.first.goal.bits_per_byte:g}"
    run_s, _ = tuning.run_to_target_s()
    more += f", one of both in about {format_seconds(2 * run_s)}" if run_s else ""
    tuning.trying(proposal, more)
    compared = _to_target(tuning, rival.plan, proposal.plan, train, seeds)
    tuning.learning_s = tuning.store.spent_s - since_s
    if rival is not best:
        compared = replace(
            compared, reason=f"{compared.reason}; beside the first plan, with all changes"
        )
    tuning.record(proposal, compared, "learning", since_s)
    if compared.verdict == "better":
        before_s, after_s = (
            plan.batch.tokens / rate if rate else None
            for plan, rate in zip((rival.plan, proposal.plan), compared.rates, strict=True)
        )
        tuning.pool.best, tuning.pool.best_s, tuning.target = proposal, after_s, None
        if compared.after_s is not None and isfinite(compared.after_s):
            tuning.run_s = compared.after_s
        if rival is tuning.start:
            tuning.first_s = tuning.first_s or before_s
            _keep(tuning, compared)
    return compared


def _settle(tuning: Tuning, train: Train) -> None:
    """Undo what was kept of execution where the first plan is at the target before it."""
    assert tuning.pool is not None
    kept = list(tuning.kept)
    if not kept or tuning.left_s() <= 0 or tuning.first_s is None:
        return
    tuning.note_line(f"       the first plan beside the best to the target, {GIVEN_UP} seeds")
    compared = _to_target(tuning, tuning.first, tuning.pool.best.plan, train, GIVEN_UP)
    if compared.verdict == "cut":
        tuning.note_line(f"       not done, the changes stay provisional: {compared.reason}")
        return
    _keep(tuning, compared)
    if compared.verdict != "worse" or compared.won:
        return
    if compared.ratio is not None and compared.ratio.value * (1 + tuning.rules.margin) >= 1:
        return
    tuning.undo(
        kept,
        f"the first plan is sooner at the target with {compared.seeds} of {compared.seeds} seeds",
    )


def train_first_and_last(tuning: Tuning, train: Train, seeds: int) -> None:
    """Train the first plan and the best to the target, with all seeds."""
    assert tuning.pool is not None
    if not tuning.kept or tuning.left_s() <= tuning.learning_s or tuning.unreached:
        return
    if tuning.target is not None and tuning.target.better:
        return
    compared = _to_target(tuning, tuning.first, tuning.pool.best.plan, train, seeds)
    if compared.verdict == "cut":
        tuning.note_line(f"       the first plan beside the last, not done: {compared.reason}")
        return
    tuning.went_whole, tuning.target = True, None
    _keep(tuning, compared)
    if compared.ratio is None:
        tuning.note_line(f"       {tuning.missed}")


def _keep(tuning: Tuning, compared: Compared) -> None:
    """Keep what came of the first plan beside the best: a ratio, or words where none is known."""
    if compared.ratio is None:
        tuning.missed = f"the first plan beside the last, to the target: {compared.reason}"
        return
    missed = compared.seeds - compared.ratio.n
    better = compared.verdict == "better"
    tuning.target = Target(
        compared.ratio, True, compared.before_s, compared.after_s, missed, better
    )


def _to_target(tuning: Tuning, first: Plan, second: Plan, train: Train, seeds: int) -> Compared:
    """Train both over seeds; what is cut off says how many minutes would do."""
    began_s, limit_s = tuning.clock() - tuning.began_s, tuning.left_s()
    compared = learn(
        first,
        second,
        range(tuning.first.seed, tuning.first.seed + seeds),
        train,
        tuning.store,
        limit_s=limit_s,
        clock=tuning.clock,
    )
    if compared.before_s is not None and isfinite(compared.before_s):
        tuning.run_s = compared.before_s
    if compared.verdict == "not shown":
        return replace(
            compared, reason=f"{compared.reason}: {_would_show(tuning, compared, began_s, seeds)}"
        )
    if compared.verdict != "cut":
        return compared
    tuning.unreached = tuning.run_s is None
    run_s, how = tuning.run_to_target_s()
    runs_s, limit_s = 2 * FEWEST * (run_s or 0.0), max(limit_s, tuning.store.limit_of_last_s)
    does = "would do" if tuning.run_s else "would do, or fewer where it takes less"
    known_s = (run_s or 0.0) if tuning.unreached else runs_s
    if known_s > limit_s:  # else it took longer than that
        how = f"{how}, {2 * FEWEST} such runs would take {format_seconds(runs_s)}: "
    else:
        how = f"{how}, and it took longer: " if how else ""
        runs_s, does = 2 * limit_s, "gives it twice as long"
    minutes = _minutes(tuning, began_s, runs_s)
    reason = f"{compared.reason}; {how}--minutes {minutes} {does}, and the same command goes on"
    return replace(compared, reason=reason)


def _would_show(tuning: Tuning, compared: Compared, began_s: float, seeds: int) -> str:
    """Render the command that should show what looks better, where one is known."""
    if compared.enough is None or compared.before_s is None or compared.after_s is None:
        return "more seeds than anybody has"
    pair_s = compared.before_s + compared.after_s
    minutes = _minutes(tuning, began_s, compared.enough * pair_s)
    more = f"--seeds {compared.enough} " if compared.enough > seeds else ""
    each = f"a seed of both takes {format_seconds(pair_s)}"
    return f"{each}: {more}--minutes {minutes} should do, and the same command goes on"


def _minutes(tuning: Tuning, began_s: float, runs_s: float) -> int:
    """Return the whole minutes in which runs end that begin after so long and take so long."""
    least_s = runs_s / (1 - tuning.share) if tuning.up and tuning.share < 1 else 0.0
    minutes = ceil(max(began_s + runs_s, least_s) / 60)
    tuning.needed.append(minutes)
    return minutes
