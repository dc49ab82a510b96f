"""The tuner: what the planner puts first is measured, and kept only where it wins.

It starts from a plan and others, ranked by prediction (headrace/predict/sweep.py). The one that
promises most is timed beside the best so far, on a dozen steady steps in turn; what shows a gain
there goes on to 54 in the same processes (turns.py), and is kept or reverted by them.
What was kept is the new best, whose single changes are asked about next. So the path has one row
for each plan that was tried, with what was predicted, what was measured, what became of it and why.

- **Predictions are corrected by what was measured** (proposals.py), and the order is made anew.
- **Execution only**: losses must stay the same (judge.py). A change of learning is tried only for
  money or quality, by its time to a target over seeds (lessons.py, target.py).
- **Memory**: what is foreseen not to fit is refused; once a plan has run out of memory, so is
  everything that is foreseen to need as much.
- **Time**: a reading fits itself to the minutes, and none gets more than a part of them, nor more
  than is left of the share for execution where changes of learning follow. Where 54 steps do not
  fit, fewer are taken, and what is kept on them is provisional until the end, when it is timed
  again if it can be (again.py). On fewer than a look's 12 nothing is kept, but for a plan that runs
  where the one before it cannot. None begins where less time is left than plans took to be built,
  compiled and warmed, and than a look takes. What was cut off says how many minutes would do, and
  the same command tries it again only where it may have more than it had: else others come next.

The seconds that all of it took are on the bill, with the number of steps, or of runs to the target,
after which they are won back. No technique is known by name here.

Left out: search. The sweep has searched; a tuner that measures 8 minutes sees some 15 plans.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from headrace.core.errors import RefusalKind
from headrace.core.limits import TUNE_SEEDS, TuneAim
from headrace.core.units import format_bytes, format_seconds
from headrace.plan.plan import Plan
from headrace.tuner import again, lessons
from headrace.tuner.judge import Compared, Rules
from headrace.tuner.pairs import Measure
from headrace.tuner.path import Tuned
from headrace.tuner.proposals import NEAR, SLACK, Pool, Proposal, Sources
from headrace.tuner.running import Run
from headrace.tuner.step import Stage, Step
from headrace.tuner.store import Store
from headrace.tuner.target import Train

NO_LIMIT = -1


def tune(
    plan: Plan, aim: TuneAim, minutes: float, sources: Sources, measure: Measure, rules: Rules, *,
    store: Store | None = None, train: Train | None = None, seeds: int = TUNE_SEEDS,
    tell: Callable[[str], None] = lambda line: None, clock: Callable[[], float] = time.monotonic,
    chosen: bool = True,
) -> Tuned:  # fmt: skip
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
        seeds: of a change of learning.
        tell: takes a line for each plan that was tried.
        clock: seconds that go by.
        chosen: the aim is asked for; else "quality" becomes "time" where the minutes allow no two
            pairs of runs to the target.
    """
    run = _Loop(plan, replace(rules, aim=aim), minutes, measure, store or Store(None, {}, clock),
                tell, clock)  # fmt: skip
    try:
        run.begin(sources)
        learns = aim in ("money", "quality")
        able = train if learns and plan.goal.bits_per_byte else None
        if able and not chosen and not run.allowed():
            able, learns = None, False
        run.share = lessons.share_of_execution(run) if able else 1.0
        run.execution(small=able is None)
        if learns:
            lessons.learning(run, able, seeds)
        if able and not run.learned:
            run.execution()
        again.provisional(run)
        if able:
            lessons.whole_way(run, able, seeds)
        again.whole_way(run)
    except KeyboardInterrupt:
        return run.tuned(interrupted=True)
    return run.tuned(interrupted=False)


def _looks_faster(found: Compared) -> bool:
    """Whether noise may hide a gain: nothing was decided, and one that matters may be there."""
    ratio = found.ratio
    return (
        found.verdict == "undecided"
        and ratio is not None
        and ratio.value > 1
        and ratio.high >= 1 + SLACK
    )


class _Loop(Run):
    """Changes that learn the same, one after the other."""

    # --- the loop ----------------------------------------------------------------------------

    def begin(self, sources: Sources) -> None:
        """Ask for plans."""
        self.sources = sources
        start, others = sources.whole(self.first)
        memory = self.rules.aim == "memory"
        near = NEAR.get(self.rules.device, NEAR["cpu"])
        self.start, self.pool = start, Pool(self.first, start, memory, sources.guess_s, near)
        self.pool.add(others, whole=True)
        self.ask()
        unknown = start.prediction.time.step_s is None
        self.tell(
            f"{self.first.name}: {len(self.pool.waiting)} changes to try in "
            f"{self.minutes_s / 60:g} min"
            + ("; no time is predicted here, so the order is a guess" if unknown else "")
        )
        for change, told in sources.lacking(self.first).items():
            self.row(Step(len(self.path) + 1, change, "refused", told))

    def ask(self) -> None:
        """Ask for single changes of the best so far; what failed there is told once."""
        assert self.pool is not None
        self.pool.add(self.sources.single(self.pool.best.plan), whole=False)
        for change, told in self.sources.failed.items():
            if change not in self.failed:
                self.failed.add(change)
                self.row(Step(len(self.path) + 1, change, "refused", told))

    def allowed(self) -> bool:
        """Whether runs to the target fit into the minutes; else the aim is a step's time.

        Where predicted steps do not say so, the most promising change is tried first: it times one.
        """
        may, told = lessons.allowed(self)
        if not may:
            self.execution(most=1)
            may, told = lessons.allowed(self)
        if may is None:
            may = not self.path  # nothing could be timed: the first run to the target tells
            told = "" if may else "no step could be timed, so for the time of a step"
        self.aim_why = told
        if told:
            self.tell(f"       {self.aim_why}")
        if not may:
            self.rules, self.up = replace(self.rules, aim="time"), False
        return bool(may)

    @property
    def learned(self) -> bool:
        """Whether a change of learning was kept."""
        return any(step.stage == "learning" for step in self.kept)

    def execution(self, *, small: bool = True, most: int = NO_LIMIT) -> None:
        """Try changes that learn the same, the most promising first, until time or plans end.

        Args:
            small: also those that are foreseen to matter little.
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
            self.attempt(chosen)
            most -= 1

    def attempt(self, proposal: Proposal) -> None:
        """Measure it, and keep or revert it."""
        assert self.pool is not None
        spent_s, seen, takes = self.store.spent_s, proposal.prediction, self.needs(proposal)
        self.trying(proposal, f", about {format_seconds(takes.seconds)}" if takes else "")
        if seen.memory.fits == "no" or seen.memory.peak_bytes >= self.burst_bytes:
            least = min(self.burst_bytes, seen.memory.capacity_bytes)
            what = (
                "there are"
                if seen.memory.fits == "no"
                else "a plan ran out of memory that was to need"
            )
            need = format_bytes(seen.memory.peak_bytes)
            told = f"{need} are foreseen, and {what} {format_bytes(least)}"
            self.note(proposal, Compared("refused", told), "none", spent_s)
            return
        if told := self.too_late(takes):
            self.up = self.pool.late(proposal)
            self.note(proposal, Compared("cut", told), "none", spent_s)
            return
        found = self.pair(self.pool.best, proposal, screen=True, share=self.share)
        short = found.screened or found.ratio is None or found.verdict == "cut"
        stage: Stage = "screen" if short else "accept"
        self.up = found.verdict == "cut" and self.left_s(self.share) <= 0
        if found.refusal is RefusalKind.MEMORY:
            self.burst_bytes = min(self.burst_bytes, seen.memory.peak_bytes)
        self.note(proposal, found, stage, spent_s)
        self.follow(proposal, found)

    def follow(self, proposal: Proposal, found: Compared) -> None:
        """Correct predictions, and keep it where it is better; drift says nothing of a plan.

        What looked faster on a device that others use too is tried once more, at the end.
        """
        assert self.pool is not None
        if _looks_faster(found):
            self.pool.doubt(proposal)
        if found.drifted:
            return
        if found.before_s is not None:
            if self.first_s is None:
                self.first_s = found.before_s
                self.pool.correct(self.start, found.before_s)
            self.pool.best_s = found.before_s
        if found.after_s is not None:
            self.pool.correct(proposal, found.after_s)
        if found.verdict == "better":
            self.pool.keep(proposal, found.after_s)
            self.ask()
        elif found.verdict in ("not shown", "different"):
            self.pool.unshown(proposal)
        elif found.verdict == "cut":
            self.pool.late(proposal)
        else:
            self.pool.lose(proposal)
            short = found.refusal is RefusalKind.MEMORY  # what saves some may run beside it
            if found.verdict == "refused" and found.ratio is None and not short:
                self.pool.refuse(proposal)
