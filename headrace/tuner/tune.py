"""Measure candidates in the order of their predictions, and keep those that win.

It starts from a plan and from others that a sweep ranked by prediction (predict/sweep.py). The
candidate that promises most is timed beside the best plan so far, on a dozen steady steps of each
in alternating blocks. A candidate that shows a gain goes on to 54 steps in the same processes
(paired_blocks.py), and is accepted or rejected by them. An accepted candidate is the new best, and
its single changes are asked about next. So the path has one row for each trial, with what was
predicted, what was measured, the verdict and the reason.

- **Predictions are corrected by measurements** (proposals.py), and the order is made anew.
- **Changes of execution only**: losses must stay the same (judge.py). A change of learning is tried
  only for money or quality, by its time to a target over seeds (learning_trials.py, target.py).
- **Memory**: a plan that is predicted not to fit is refused. Once a plan has run out of memory, so
  is every plan that is predicted to need as much.
- **Time**: a trial fits itself to the minutes. None gets more than a part of them, nor more than is
  left of the share for execution where changes of learning follow. Where 54 steps do not fit, fewer
  are taken. What is accepted on them is provisional until the end, when it is timed once more if
  time allows (retrial.py). On fewer than a look's 12 steps nothing is accepted, but for a plan that
  runs where the one before it cannot. No trial begins where less time is left than plans took to be
  built, compiled and warmed, and than a look takes. A trial that was cut off says how many minutes
  would do. The same command repeats it only where it may have more time than it had.

The bill holds the seconds that all of it took, and the number of steps, or of runs to the target,
after which they break even. No technique is known by name here.

Left out: search. The sweep has searched; a tuner that measures for 8 minutes sees some 15 plans.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from headrace.core.errors import RefusalKind
from headrace.core.limits import TUNE_SEEDS, TuneAim
from headrace.core.units import format_bytes, format_seconds
from headrace.plan.plan import Plan
from headrace.tuner import learning_trials, retrial
from headrace.tuner.effects import rounding_words
from headrace.tuner.judge import Compared, Rules
from headrace.tuner.minutes import TrialSeconds
from headrace.tuner.pairs import Measure
from headrace.tuner.path import Tuned
from headrace.tuner.pool import NEAR, SLACK, Pool
from headrace.tuner.prefix import Prefixes
from headrace.tuner.proposals import Proposal, Sources
from headrace.tuner.running import Tuning, TurnedDown
from headrace.tuner.store import Store
from headrace.tuner.target import Train
from headrace.tuner.trial_row import TrialRow, TrialStage

NO_LIMIT = -1


def tune(
    plan: Plan,
    aim: TuneAim,
    minutes: float,
    sources: Sources,
    measure: Measure,
    rules: Rules,
    *,
    store: Store | None = None,
    train: Train | None = None,
    prefixes: Prefixes | None = None,
    seeds: int = TUNE_SEEDS,
    note: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
    chosen: bool = True,
) -> Tuned:
    """Measure what is predicted to be better, and keep what is; Ctrl-C keeps the best so far.

    Args:
        plan: the start.
        aim: "time" of a step, "money", "memory" (peak), or "quality" (time to a target).
        minutes: on the clock, at most.
        sources: where plans to try come from.
        measure: see `measure_with`.
        rules: by what pairs are judged.
        store: readings that stand.
        train: trains a plan to its target; without it no change of learning is tried.
        prefixes: trains parts of runs, by which changes of learning are screened; without it all
            of them go whole ways.
        seeds: of a change of learning.
        note: takes a line for each plan that was tried.
        clock: seconds that go by.
        chosen: the aim is asked for; else "quality" becomes "time" where the minutes allow no two
            pairs of runs to the target.
    """
    tuning = _TuningLoop(
        plan,
        replace(rules, aim=aim),
        minutes,
        measure,
        store or Store(None, {}, clock),
        note,
        clock,
    )
    try:
        tuning.begin(sources)
        learns = aim in ("money", "quality")
        able = train if learns and plan.goal.bits_per_byte else None
        if able and not chosen and not tuning.allowed():
            able, learns = None, False
        tuning.share = learning_trials.share_of_execution(tuning) if able else 1.0
        tuning.execution(small=able is None)
        if learns:
            learning_trials.learning(tuning, able, seeds, prefixes)
        if able and not tuning.learned:
            tuning.execution()
        if not tuning.learned:
            retrial.fastest_turned_down(tuning)
        retrial.provisional(tuning)
        if able:
            learning_trials.train_first_and_last(tuning, able, seeds)
        retrial.time_first_beside_best(tuning)
    except KeyboardInterrupt:
        return tuning.tuned(interrupted=True)
    return tuning.tuned(interrupted=False)


def _looks_faster(compared: Compared) -> bool:
    """Return whether noise may hide a gain: a gain that matters is neither shown nor ruled out."""
    ratio = compared.ratio
    return (
        compared.verdict == "undecided"
        and ratio is not None
        and ratio.value > 1
        and ratio.high >= 1 + SLACK
    )


class _TuningLoop(Tuning):
    """Try changes that learn the same, one after the other."""

    # --- the loop ----------------------------------------------------------------------------

    def begin(self, sources: Sources) -> None:
        """Ask for candidates."""
        self.sources = sources
        start, others = sources.whole(self.first)
        memory = self.rules.aim == "memory"
        near = NEAR.get(self.rules.device, NEAR["cpu"])
        self.start, self.pool = start, Pool(self.first, start, memory, sources.guess_s, near)
        self.pool.add(others, whole=True)
        self.ask()
        unknown = start.prediction.time.step_s is None
        self.note_line(
            f"{self.first.name}: {len(self.pool.waiting)} changes to try in "
            f"{self.minutes_s / 60:g} min"
            + ("; no time is predicted here, so the order is a guess" if unknown else "")
        )
        for change, reason in sources.lacking(self.first).items():
            self.row(TrialRow(len(self.path) + 1, change, "refused", reason))

    def ask(self) -> None:
        """Ask for single changes of the best so far; what failed there is reported once."""
        assert self.pool is not None
        self.pool.add(self.sources.single(self.pool.best.plan), whole=False)
        for change, reason in self.sources.failed.items():
            if change not in self.failed:
                self.failed.add(change)
                self.row(TrialRow(len(self.path) + 1, change, "refused", reason))

    def allowed(self) -> bool:
        """Return whether runs to the target fit into the minutes; else the aim is a step's time.

        Where predicted steps do not say so, the most promising change is tried first: it times one.
        """
        may, reason = learning_trials.allowed(self)
        if not may:
            self.execution(most=1)
            may, reason = learning_trials.allowed(self)
        if may is None:
            may = not self.path  # nothing could be timed: the first run to the target decides
            reason = "" if may else "no step could be timed, so for the time of a step"
        self.aim_why = reason
        if reason:
            self.note_line(f"       {self.aim_why}")
        if not may:
            self.rules, self.up = replace(self.rules, aim="time"), False
        return bool(may)

    @property
    def learned(self) -> bool:
        """Return whether a change of learning was accepted."""
        return any(step.stage == "learning" for step in self.kept)

    def execution(self, *, small: bool = True, most: int = NO_LIMIT) -> None:
        """Try changes that learn the same, the most promising first, until time or plans end.

        Args:
            small: also those that are predicted to matter little.
            most: as many at most.
        """
        assert self.pool is not None
        while not self.up and most:
            if self.left_s(self.share) <= self.least_s:
                self.up = bool(self.pool.worth())
                return
            chosen = self.pool.take(small=small)
            if chosen is None:
                return
            tried = len(self.path)
            self.attempt(chosen)
            most -= len(self.path) > tried

    def attempt(self, proposal: Proposal) -> None:
        """Measure it, and keep or revert it."""
        assert self.pool is not None
        spent_s, seen, takes = self.store.spent_s, proposal.prediction, self.needs(proposal)
        too_long = takes if takes is not None and takes.limit_s > self.trial_s else None
        if too_long is not None and too_long.untrained.limit_s <= self.trial_s:
            if self.postpone(proposal, too_long):
                return
            if self.first_s is None:  # a look is better than to measure nothing
                too_long = None
        about = ""
        if takes is not None and takes.ready_s:
            about = f", about {format_seconds(takes.seconds)}"
        self.trying(proposal, about)
        if seen.memory.fits == "no" or seen.memory.peak_bytes >= self.out_of_memory_bytes:
            least = min(self.out_of_memory_bytes, seen.memory.capacity_bytes)
            what = (
                "there are"
                if seen.memory.fits == "no"
                else "a plan ran out of memory that was to need"
            )
            predicted = format_bytes(seen.memory.peak_bytes)
            reason = f"{predicted} are predicted, and {what} {format_bytes(least)}"
            self.record(proposal, Compared("refused", reason), "none", spent_s)
            return
        if too_long is not None:
            self.up = self.pool.note_cut_off(proposal)
            self.record(proposal, Compared("cut", self.too_slow(too_long)), "none", spent_s)
            return
        compared = self.pair(self.pool.best, proposal, screen=True, share=self.share)
        brief = compared.screened or compared.ratio is None or compared.verdict == "cut"
        stage: TrialStage = "screen" if brief else "accept"
        self.up = compared.verdict == "cut" and self.left_s(self.share) <= 0
        if compared.refusal is RefusalKind.MEMORY:
            self.out_of_memory_bytes = min(self.out_of_memory_bytes, seen.memory.peak_bytes)
        self.record(proposal, compared, stage, spent_s)
        self.follow(proposal, compared)

    def postpone(self, proposal: Proposal, takes: TrialSeconds) -> bool:
        """Try a part that is quicker to judge first, or else all others; return False for neither.

        To show that a plan learns the same takes hundreds of steps, for which the minutes may be
        too few beside this best plan, and enough beside a faster one; where what it rounds stays
        from step to step it takes a thousand.
        """
        assert self.pool is not None
        waits = f", later: {takes.words} are too long now"
        for part in self.sources.parts(self.pool.best.plan, proposal.plan):
            if self.pool.claim(part):
                self.trying(proposal, f"{waits}, and a part that is judged sooner comes first")
                self.attempt(part)
                self.pool.put_back(proposal)
                return True
        if rounding_words(self.pool.best.plan, proposal.plan) <= self.pool.cut:
            return False  # it waited already, or what rounds as it does
        self.trying(proposal, waits)
        self.pool.put_back(proposal, last=True)
        return True

    def follow(self, proposal: Proposal, compared: Compared) -> None:
        """Correct predictions, and keep it where it is better; drift says nothing of a plan.

        What looked faster on a device that others use too is tried once more, at the end.
        """
        assert self.pool is not None
        if _looks_faster(compared):
            self.pool.doubt(proposal)
        if compared.drifted:
            return
        if compared.before_s is not None:
            if self.first_s is None:
                self.first_s = compared.before_s
                self.pool.correct(self.start, compared.before_s)
            self.pool.best_s = compared.before_s
        if compared.after_s is not None:
            self.pool.correct(proposal, compared.after_s)
        if compared.verdict == "better":
            self.pool.keep(proposal, compared.after_s)
            self.ask()
        elif compared.verdict in ("not shown", "different"):
            if compared.ratio is not None:
                at = TurnedDown(proposal, self.pool.best, compared.ratio.value)
                self.turned_down.append(at)
            self.pool.unshown(proposal)
            self.pool.add(self.sources.parts(self.pool.best.plan, proposal.plan), whole=True)
        elif compared.verdict == "cut":
            self.pool.note_cut_off(proposal)
        else:
            self.pool.lose(proposal)
            out_of_memory = (
                compared.refusal is RefusalKind.MEMORY
            )  # what saves some may run beside it
            if compared.verdict == "refused" and compared.ratio is None and not out_of_memory:
                self.pool.refuse(proposal)
