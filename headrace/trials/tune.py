"""The tuner: what the planner puts first is measured, and kept only where it wins.

It starts from a plan and others, ranked by prediction (headrace/planner/sweep.py). The one that
promises most is timed beside the best so far, on a dozen steady steps in turn; what shows a gain
there goes on to 54 in the same processes (turns.py), and is kept or reverted by them.
What was kept is the new best, whose single changes are asked about next. So the path has one row
for each plan that was tried, with what was predicted, what was measured, what became of it and why.

- **Predictions are corrected by what was measured** (proposals.py), and the order is made anew.
- **Execution only**: losses must stay the same (judge.py). A change of learning is tried only for
  money or quality, by its time to a target over seeds (target.py).
- **Memory**: what is foreseen not to fit is refused; once a plan has run out of memory, so is
  everything that is foreseen to need as much.
- **Time**: a reading fits itself to the minutes, and none gets more than a part of them. Where 54
  steps do not fit, fewer are taken, and the row says so; on fewer than a look's 12 nothing is kept,
  but for a plan that runs where the one before it cannot. None begins where less time is left than
  plans took to be built, compiled and warmed, and than a look takes.

The seconds that all of it took are on the bill, with the number of steps after which they are won
back. No technique is known by name here.

Left out: search. The sweep has searched; a tuner that measures 8 minutes sees some 15 plans.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, exp, inf, log, prod
from statistics import median
from typing import Any

from headrace.changes import difference
from headrace.core.plan import Plan
from headrace.core.statistics import Interval
from headrace.core.units import format_bytes, format_seconds
from headrace.trials.judge import Aim, Compared, Rules, compare
from headrace.trials.kinds import kind_of
from headrace.trials.pairs import Measure
from headrace.trials.path import Became, Stage, Step, Tuned
from headrace.trials.proposals import Pool, Proposal, Sources
from headrace.trials.readings import OUT_OF_MEMORY, why
from headrace.trials.store import Store, fingerprint
from headrace.trials.target import Train, learn
from headrace.trials.turns import ACCEPT, FITS, LOOK, PAIR_STEPS, Size

WANTED = Size(block_s=0.1)
"""Of each plan; short steps are taken more often."""
TOGETHER = 0.9
"""Of the memory that two plans may be foreseen to need together, in one process."""
LONGEST = 0.75
"""Of the minutes that one reading may take: a plan that compiles for longer is given up. It plans
with 0.6 of them (turns.FITS)."""
SOONER = 0.5
"""Of the seconds that the first pair took before its timed steps may be enough for the next: then
caches are warm, and a process runs. Later ones say it themselves."""
EXECUTION_SHARE = 0.5
"""Of the minutes that changes of execution may take where changes of learning follow."""
VERDICTS: dict[str, Became] = {"better": "kept", "refused": "refused", "cut": "not tried"}
"""What becomes of a plan; reverted, else."""


def tune(
    plan: Plan, aim: Aim, minutes: float, sources: Sources, measure: Measure, rules: Rules, *,
    store: Store | None = None, train: Train | None = None, seeds: int = 5,
    tell: Callable[[str], None] = lambda line: None, clock: Callable[[], float] = time.monotonic,
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
    """
    run = _Run(plan, replace(rules, aim=aim), minutes, measure, store or Store(None, {}, clock),
               tell, clock)  # fmt: skip
    try:
        run.begin(sources)
        learns = aim in ("money", "quality")
        able = learns and train is not None and plan.goal.bits_per_byte
        run.execution(EXECUTION_SHARE if able else 1.0)
        if learns:
            run.learning(train if able else None, seeds)
        run.whole_way()
    except KeyboardInterrupt:
        return run.tuned(interrupted=True)
    return run.tuned(interrupted=False)


class _Run:
    """What is known while it goes."""

    def __init__(
        self, first: Plan, rules: Rules, minutes: float, measure: Measure, store: Store,
        tell: Callable[[str], None], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.first, self.rules, self.store, self.tell, self.clock = first, rules, store, tell, clock
        self.measure = store.measure(measure)
        self.began_s, self.minutes_s = clock(), 60 * minutes
        self.path: list[Step] = []
        self.pool: Pool | None = None
        self.ready_s: list[float] = []
        """seconds that pairs took before their timed steps"""
        self.learning_s = 0.0
        """that the last change of learning took"""
        self.first_s: float | None = None
        self.burst_bytes = inf
        """the least that was foreseen of a plan that ran out of memory"""
        self.failed: set[tuple[str, ...]] = set()
        """changes whose prediction failed"""
        self.up = False
        """the time is"""
        self.unlearned: list[str] = []
        """changes of learning that the time was too short for"""
        self.total: Interval | None = None

    # --- the loop ----------------------------------------------------------------------------

    def begin(self, sources: Sources) -> None:
        """Ask for plans."""
        self.sources = sources
        start, others = sources.whole(self.first)
        memory = self.rules.aim == "memory"
        self.start, self.pool = start, Pool(self.first, start, memory, sources.guess_s)
        self.pool.add(others, whole=True)
        self.ask()
        unknown = start.foresight.step_s is None
        self.tell(
            f"{self.first.name}: {len(self.pool.waiting)} changes to try in "
            f"{format_seconds(self.minutes_s)}"
            + ("; no time is predicted here, so the order is a guess" if unknown else "")
        )

    def ask(self) -> None:
        """Ask for single changes of the best so far; what failed there is told once."""
        assert self.pool is not None
        self.pool.add(self.sources.single(self.pool.best.plan), whole=False)
        for change, told in self.sources.failed.items():
            if change not in self.failed:
                self.failed.add(change)
                self.row(Step(len(self.path) + 1, change, "refused", told))

    def left_s(self, share: float = 1.0) -> float:
        """Seconds that are left of the minutes, or of a share of them."""
        return self.began_s + share * self.minutes_s - self.clock()

    def execution(self, share: float) -> None:
        """Try changes that learn the same, the most promising first, until time or plans end."""
        assert self.pool is not None
        while not self.up:
            if self.left_s(share) <= self.least_s:
                self.up = bool(self.pool.waiting)
                return
            chosen = self.pool.take()
            if chosen is None:
                return
            self.attempt(chosen)

    def attempt(self, proposal: Proposal) -> None:
        """Measure it, and keep or revert it."""
        assert self.pool is not None
        spent_s, seen, promise = self.store.spent_s, proposal.foresight, self.promise(proposal)
        self.trying(proposal)
        if seen.fits == "no" or seen.peak_bytes >= self.burst_bytes:
            least = min(self.burst_bytes, seen.capacity_bytes)
            what = "there are" if seen.fits == "no" else "a plan ran out of memory that was to need"
            told = f"{format_bytes(seen.peak_bytes)} are foreseen, and {what} {format_bytes(least)}"
            self.note(proposal, Compared("refused", told), "none", promise, spent_s)
            return
        found = self.pair(self.pool.best, proposal, screen=True)
        short = found.screened or found.ratio is None or found.verdict == "cut"
        stage: Stage = "screen" if short else "accept"
        self.up = found.verdict == "cut" and self.left_s() <= 0
        if found.reason.startswith(OUT_OF_MEMORY):
            self.burst_bytes = min(self.burst_bytes, seen.peak_bytes)
        self.note(proposal, found, stage, promise, spent_s)
        self.follow(proposal, found)

    def follow(self, proposal: Proposal, found: Compared) -> None:
        """Correct predictions, and keep it where it is better; drift says nothing of a plan."""
        assert self.pool is not None
        if found.drifted:
            self.pool.lose(proposal)
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
        elif found.verdict == "cut":
            self.pool.late(proposal)
        else:
            self.pool.lose(proposal)

    def learning(self, train: Train | None, seeds: int) -> None:
        """Try changes of learning by their time to the plan's target, over seeds."""
        assert self.pool is not None
        waiting = list(self.sources.learning(self.pool.best.plan))
        if waiting and train is None:
            what = f"{len(waiting)} changes of learning"
            told = "they are compared by their time to a target: goal.bits_per_byte=TARGET"
            self.row(Step(len(self.path) + 1, (what,), "refused", told, equality="learning"))
        tried: set[Any] = {fingerprint(self.first)}
        while train is not None and waiting:
            proposal = waiting.pop(0)
            change = difference(self.pool.best.plan, proposal.plan)
            if {change, fingerprint(proposal.plan)} & tried:
                continue
            tried |= {change, fingerprint(proposal.plan)}
            if self.left_s() <= self.learning_s:
                rest = [difference(self.pool.best.plan, p.plan) for p in (proposal, *waiting)]
                self.unlearned, self.up = [" ".join(words) for words in rest], True
                return
            if self.teach(proposal, train, seeds).verdict == "better":
                self.pool.best, self.pool.best_s = proposal, None
                waiting = list(self.sources.learning(proposal.plan))

    def teach(self, proposal: Proposal, train: Train, seeds: int) -> Compared:
        """One change of learning beside the best so far, over seeds."""
        assert self.pool is not None
        spent_s, promise = self.store.spent_s, self.promise(proposal)
        self.trying(proposal, f", {seeds} seeds to {self.first.goal.bits_per_byte:g}")
        found = learn(
            self.pool.best.plan, proposal.plan,
            range(self.first.seed, self.first.seed + seeds), train, self.store,
            limit_s=self.left_s(), clock=self.clock,
        )  # fmt: skip
        self.learning_s = self.store.spent_s - spent_s
        self.note(proposal, found, "learning", promise, spent_s)
        return found

    def whole_way(self) -> None:
        """The first plan beside the best, where more than one change lies between them."""
        assert self.pool is not None
        best = self.pool.best
        if len(self.kept) < 2 or kind_of(self.first, best.plan) == "learning":
            return
        if self.first_s is None or self.left_s() <= self.least_s:
            return
        found = self.pair(self.start, best)
        self.total = found.ratio if found.steps >= LOOK else None

    # --- measuring ---------------------------------------------------------------------------

    def promise(self, proposal: Proposal) -> float | None:
        """What it is expected to be beside the best so far, before it is measured."""
        return None if self.pool is None else self.pool.promise(proposal)

    def together(self, one: Proposal, two: Proposal) -> bool:
        """Whether one process may hold both."""
        room = TOGETHER * two.foresight.capacity_bytes
        return one.foresight.peak_bytes + two.foresight.peak_bytes <= room

    def pair(self, one: Proposal, two: Proposal, *, screen: bool = False) -> Compared:
        """The second beside the first; see `compare`. A gain on too few steps is none yet."""
        began_s = self.clock()
        rules = replace(
            self.rules, capacity_bytes=two.foresight.capacity_bytes,
            peaks=(one.foresight.peak_bytes, two.foresight.peak_bytes),
        )  # fmt: skip
        try:
            found = compare(
                one.plan, two.plan, self.measure, rules, size=WANTED, screen=screen,
                together=self.together(one, two),
                limit_s=min(self.left_s(), LONGEST * self.minutes_s),
            )  # fmt: skip
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            return Compared("refused", f"judging it failed: {why(error)}")
        if found.ready_s:
            self.ready_s.append(found.ready_s)
        beside_one = found.verdict == "better" and found.ratio is not None
        if not beside_one or found.steps >= LOOK:
            return found
        told = f"better on {found.steps} steps, and {LOOK} are the least to keep it"
        more = f"--minutes {self.minutes_for(found, began_s - self.began_s)}"
        return replace(found, verdict="cut", reason=f"{told}: {more}, and the same command goes on")

    def minutes_for(self, found: Compared, after_s: float) -> int:
        """Whole minutes, more than now, in which a pair that begins after so long has its look."""
        step_s = ((found.before_s or 0.0) + (found.after_s or 0.0)) / 2
        limit_s = (found.ready_s + PAIR_STEPS * step_s) / FITS
        needed_s = max(after_s + limit_s, limit_s / LONGEST)
        return max(ceil(needed_s / 60), int(self.minutes_s / 60) + 1)

    @property
    def least_s(self) -> float:
        """Seconds without which no reading can end and say something."""
        assert self.pool is not None
        if not self.ready_s:
            return 0.0
        first_s, *later_s = self.ready_s
        ready_s = median(later_s) if later_s else SOONER * first_s
        return ready_s + PAIR_STEPS * (self.pool.best_s or 0.0)

    # --- what came of it ---------------------------------------------------------------------

    @property
    def kept(self) -> list[Step]:
        """Of the path."""
        return [step for step in self.path if step.verdict == "kept"]

    def note(
        self,
        proposal: Proposal,
        found: Compared,
        stage: Stage,
        promise: float | None,
        since_s: float,
    ) -> None:
        """A row of the path."""
        assert self.pool is not None
        best, reason = self.pool.best, found.reason
        if found.verdict == "better" and stage != "learning" and found.steps < ACCEPT.timed:
            reason += f"; on {found.steps} steps, where {ACCEPT.timed} are wanted"
        told = {
            name: getattr(found, name)
            for name in (
                "ratio",
                "memory",
                "loss",
                "noise",
                "steps",
                "before_s",
                "after_s",
                "peak_bytes",
            )
        }
        self.row(Step(
            len(self.path) + 1, difference(best.plan, proposal.plan),
            VERDICTS.get(found.verdict, "reverted"), reason, stage,
            kind_of(best.plan, proposal.plan), promise, seconds=self.store.spent_s - since_s,
            spent_s=self.store.spent_s, plan_sha256=fingerprint(proposal.plan), **told,
        ))  # fmt: skip

    def row(self, step: Step) -> None:
        """It joins the path, and is told."""
        self.path.append(step)
        self.tell(f"       {step.line()}")

    def trying(self, proposal: Proposal, more: str = "") -> None:
        """What is measured now."""
        assert self.pool is not None
        spent_s = int(self.clock() - self.began_s)
        change = " ".join(difference(self.pool.best.plan, proposal.plan))
        self.tell(f"{spent_s // 60:3}:{spent_s % 60:02} {change}{more}")

    def tuned(self, *, interrupted: bool) -> Tuned:
        """What it all came to."""
        plan = self.first if self.pool is None else self.pool.best.plan
        waiting = [] if self.pool is None else list(self.pool.waiting.values())
        ratios = [s.ratio for s in self.kept if s.ratio is not None and s.stage != "learning"]
        peaks = [s.memory for s in self.kept if s.memory is not None]
        planning_s = self.clock() - self.began_s - self.store.fresh_s
        return Tuned(
            aim=self.rules.aim, first=self.first, plan=plan,
            changes=difference(self.first, plan), path=tuple(self.path),
            ratio=self.total or _product(ratios), whole=self.total is not None or len(ratios) == 1,
            memory=prod(peaks) if peaks else None, before_s=self.first_s,
            after_s=None if self.pool is None else self.pool.best_s,
            seconds=self.store.spent_s + max(0.0, planning_s),
            left=(*(" ".join(w.change) for w in waiting), *self.unlearned), up=self.up,
            interrupted=interrupted,
        )  # fmt: skip


def _product(ratios: Sequence[Interval]) -> Interval | None:
    """Ratios one after the other, whose errors are independent."""
    if not ratios:
        return None
    middle = sum(log(r.value) for r in ratios)
    down = sum((log(r.value) - log(max(r.low, 1e-9))) ** 2 for r in ratios) ** 0.5
    above = sum((log(min(r.high, 1e9)) - log(r.value)) ** 2 for r in ratios) ** 0.5
    low, high = exp(middle - down), exp(middle + above)
    return Interval(low, exp(middle), high, min(r.n for r in ratios))
