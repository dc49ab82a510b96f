"""What is known while a tuner goes: the best so far, the clock, the path; and how it measures.

The loop is tune.py, changes of learning are lessons.py, what is measured again at the end is
again.py. All three work on a `Run`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, exp, inf, log, prod
from statistics import median

from headrace.changes import difference
from headrace.core.plan import Plan
from headrace.core.statistics import Interval
from headrace.trials.judge import Compared, Rules, compare
from headrace.trials.kinds import kind_of
from headrace.trials.pairs import Measure
from headrace.trials.path import Became, Stage, Step, Target, Tuned
from headrace.trials.proposals import Pool, Proposal, Sources
from headrace.trials.readings import why
from headrace.trials.store import Store, fingerprint
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
VERDICTS: dict[str, Became] = {"better": "kept", "refused": "refused", "cut": "not tried"}
"""What becomes of a plan; reverted, else."""
MEASURED = ("ratio", "memory", "loss", "noise", "steps", "before_s", "after_s", "peak_bytes")
"""What a row has of what was compared."""


class Run:
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
        """a step of the first plan over one of the best, timed in turn"""
        self.target: Target | None = None
        """likewise the time to the target, seed for seed"""
        self.went_whole = False
        """whether both went to it: what the kept changes multiply to tells nothing then"""
        self.kept_of: dict[int, tuple[Proposal, Proposal]] = {}
        """number of a change that was kept -> the best before it, and with it"""
        self.sources: Sources
        self.start: Proposal

    def left_s(self, share: float = 1.0) -> float:
        """Seconds that are left of the minutes, or of a share of them."""
        return self.began_s + share * self.minutes_s - self.clock()

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
        best, reason, kept = self.pool.best, found.reason, found.verdict == "better"
        few = kept and stage != "learning" and found.steps < ACCEPT.timed
        if few:
            reason += f"; on {found.steps} steps, where {ACCEPT.timed} are wanted"
        if kept:
            self.kept_of[len(self.path) + 1] = best, proposal
        told = {name: getattr(found, name) for name in MEASURED}
        self.row(Step(
            len(self.path) + 1, difference(best.plan, proposal.plan),
            VERDICTS.get(found.verdict, "reverted"), reason, stage,
            kind_of(best.plan, proposal.plan), promise, seconds=self.store.spent_s - since_s,
            spent_s=self.store.spent_s, plan_sha256=fingerprint(proposal.plan),
            provisional=few and found.ratio is not None, **told,
        ))  # fmt: skip

    def row(self, step: Step) -> None:
        """It joins the path, and is told."""
        self.path.append(step)
        self.tell(f"       {step.line()}")

    def again(self, step: Step) -> None:
        """A row of the path is another now, and is told."""
        self.path[step.number - 1] = step
        self.tell(f"       {step.line()}")

    def undo(self, steps: Sequence[Step], reason: str) -> None:
        """Changes that were kept last are not, and the plan before them is the best again."""
        assert self.pool is not None
        self.pool.best, _ = self.kept_of[steps[0].number]
        self.pool.best_s, self.total, self.target = steps[0].before_s, None, None
        for step in steps:
            why = f"{step.reason}; undone: {reason}"
            self.again(replace(step, verdict="reverted", reason=why, provisional=False))

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
            memory=prod(peaks) if peaks else None, target=self.to_target(), before_s=self.first_s,
            after_s=None if self.pool is None else self.pool.best_s,
            seconds=self.store.spent_s + max(0.0, planning_s),
            left=(*(" ".join(w.change) for w in waiting), *self.unlearned), up=self.up,
            interrupted=interrupted,
        )  # fmt: skip

    def to_target(self) -> Target | None:
        """Time to the target: measured, or else what the ratios of what was kept multiply to."""
        learned = [step for step in self.kept if step.stage == "learning"]
        if self.target is not None or self.went_whole or not learned:
            return self.target
        ratio = _product([step.ratio for step in self.kept if step.ratio is not None])
        last_s = learned[-1].after_s
        if ratio is None or last_s is None:
            return None
        if len(self.kept) == 1:
            return Target(ratio, True, learned[-1].before_s, last_s)
        return Target(ratio, False, last_s * ratio.value, last_s)


def _product(ratios: Sequence[Interval]) -> Interval | None:
    """Ratios one after the other, whose errors are independent."""
    if not ratios:
        return None
    middle = sum(log(r.value) for r in ratios)
    down = sum((log(r.value) - log(max(r.low, 1e-9))) ** 2 for r in ratios) ** 0.5
    above = sum((log(min(r.high, 1e9)) - log(r.value)) ** 2 for r in ratios) ** 0.5
    low, high = exp(middle - down), exp(middle + above)
    return Interval(low, exp(middle), high, min(r.n for r in ratios))
