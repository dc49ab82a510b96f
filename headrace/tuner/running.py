"""Hold what is known while a tuner runs, and measure pairs for it.

It holds the best plan so far, the clock and the path. The loop is tune.py, changes of learning are
learning_trials.py, what is repeated at the end is retrial.py. All three work on a `Tuning`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf, log, prod
from statistics import median

from headrace.core.statistics import Interval
from headrace.core.units import format_seconds
from headrace.plan.changes import difference
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage
from headrace.tuner.effects import effect_of, rounding_of
from headrace.tuner.equality import least_steps
from headrace.tuner.judge import Compared, Rules, compare
from headrace.tuner.minutes import SOONER, TrialSeconds, compiles, needs
from headrace.tuner.paired_blocks import (
    ACCEPT,
    FITS,
    LOOK,
    LOOK_ROUNDS,
    PAIR_STEPS,
    TRAINED,
    SampleSize,
)
from headrace.tuner.pairs import Measure
from headrace.tuner.path import UNMEASURED, Target, Tuned
from headrace.tuner.pool import Pool
from headrace.tuner.proposals import Proposal, Sources
from headrace.tuner.readings import why
from headrace.tuner.rungs import Screen
from headrace.tuner.store import Store, fingerprint
from headrace.tuner.target import GIVEN_UP
from headrace.tuner.trial_row import TrialRow, TrialStage, TrialVerdict, length_of

WANTED = SampleSize(block_s=0.2)
"""Sample of each plan. Brief steps are taken more often, for their host is noisy."""
LOOK_BLOCKS = 4 * LOOK_ROUNDS
"""Blocks of both plans that a look takes."""
TOGETHER = 0.9
"""Share of the memory that two plans may be predicted to need together, in one process."""
LONGEST = 0.75
"""Share of the minutes that one reading may take: a plan that compiles for longer is given up. It
plans with 0.6 of them (paired_blocks.FITS)."""
PAIRS = 0.75 * 3.4
"""Runs of the first plan's whole length that two pairs take as long as: its own two, and two of a
change that is 1.4 times as soon, which two seeds may show. A target that a run reaches comes before
its end: the demo's after 70% of its steps."""
VERDICTS: dict[str, TrialVerdict] = {
    "better": "kept",
    "not shown": "not shown",
    "refused": "refused",
    "cut": "not tried",
}
"""Verdict of a trial by that of its comparison; reverted, else."""
MEASURED = ("ratio", "memory", "loss", "noise", "steps", "before_s", "after_s", "peak_bytes")
"""Fields of a comparison that a trial's row has too."""


@dataclass(frozen=True)
class TurnedDown:
    """Hold a plan that looked faster, and that was not shown to learn the same.

    Args:
        proposal: the plan.
        beside: the best plan then.
        ratio: time of a step of that best over the plan's.
    """

    proposal: Proposal
    beside: Proposal
    ratio: float


class Tuning:
    """Hold what is known while it runs."""

    def __init__(
        self,
        first: Plan,
        rules: Rules,
        minutes: float,
        measure: Measure,
        store: Store,
        note_line: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.first, self.rules, self.store, self.note_line, self.clock = (
            first,
            rules,
            store,
            note_line,
            clock,
        )
        self.measure = store.measure(measure)
        self.began_s, self.minutes_s = clock(), 60 * minutes
        self.share = 1.0
        """share of the minutes that changes of execution may take"""
        self.path: list[TrialRow] = []
        self.pool: Pool | None = None
        self.ready_s: list[float] = []
        """seconds that pairs took before their timed steps"""
        self.ready_of: list[tuple[bool, float]] = []
        """whether each pair's second plan compiles, and those seconds"""
        self.learning_s = 0.0
        """seconds that the last change of learning took"""
        self.run_s: float | None = None
        """seconds that a run to the target took"""
        self.unreached = False
        """whether the clock ended the first run to the target"""
        self.needed: list[int] = []
        """minutes that a plan which was cut off needs"""
        self.first_s: float | None = None
        self.out_of_memory_bytes = inf
        """fewest bytes that were predicted of a plan that ran out of memory"""
        self.failed: set[tuple[str, ...]] = set()
        """changes whose prediction failed"""
        self.aim_why = ""
        """why it is for what it is for, where the minutes decided that, in words"""
        self.up = False
        """whether the time is up"""
        self.unlearned: list[str] = []
        """changes of learning that the time was too short for"""
        self.missed = ""
        """what came of runs to the target that give no ratio, in words"""
        self.screens: list[Screen] = []
        """screens of changes of learning by short runs"""
        self.total: Interval | None = None
        """a step of the first plan over one of the best, timed in turn"""
        self.target: Target | None = None
        """the time to the target of the first plan and the best, seed for seed"""
        self.went_whole = False
        """whether both went to it: the product of the accepted changes is no evidence then"""
        self.compile_s: dict[str, float] = {}
        """fingerprint of a plan -> seconds that its first steps took longer than steady ones"""
        self.kept_of: dict[int, tuple[Proposal, Proposal]] = {}
        """number of a change that was kept -> the best before it, and with it"""
        self.turned_down: list[TurnedDown] = []
        """plans that looked faster, and that were not shown to learn the same"""
        self.sources: Sources
        self.start: Proposal

    def left_s(self, share: float = 1.0) -> float:
        """Return the seconds that are left of the minutes, or of a share of them."""
        return self.began_s + share * self.minutes_s - self.clock()

    # --- measuring ---------------------------------------------------------------------------

    def slower(self, one: Proposal) -> float:
        """Return how many times as long a step of that best is as the first that could run."""
        times = 1.0
        for step in self.kept:
            if self.kept_of[step.number][0] is one:
                break
            times = times / step.ratio.value if step.ratio else 1.0
        return times

    def together(self, one: Proposal, two: Proposal) -> bool:
        """Return whether one process may hold both."""
        room = TOGETHER * two.prediction.memory.capacity_bytes
        return one.prediction.memory.peak_bytes + two.prediction.memory.peak_bytes <= room

    def pair(
        self, one: Proposal, two: Proposal, *, screen: bool = False, share: float = 1.0
    ) -> Compared:
        """Judge the second beside the first; see `compare`. A gain on too few steps is none yet.

        It ends within that share of the minutes; what is cut off says how many would do.
        """
        began_s = self.clock()
        limit_s = min(self.left_s(share), LONGEST * self.minutes_s)
        rules = replace(
            self.rules,
            capacity_bytes=two.prediction.memory.capacity_bytes,
            peaks=(one.prediction.memory.peak_bytes, two.prediction.memory.peak_bytes),
            slower=self.slower(one),
            shown=not screen,
        )
        try:
            compared = compare(
                one.plan,
                two.plan,
                self.measure,
                rules,
                size=WANTED,
                screen=screen,
                together=self.together(one, two),
                limit_s=limit_s,
            )
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            return Compared("refused", f"judging it failed: {why(error)}")
        if compared.ready_s:
            self.ready_s.append(compared.ready_s)
            self.ready_of.append((compiles(two.plan), compared.ready_s))
        beside_one = compared.verdict == "better" and compared.ratio is not None
        reason, more = compared.reason, ""
        if beside_one and compared.steps < LOOK:
            reason = f"better on {compared.steps} steps, and {LOOK} are the least to keep it"
            step_s = ((compared.before_s or 0.0) + (compared.after_s or 0.0)) / 2
            limit_s = (compared.ready_s + PAIR_STEPS * step_s) / FITS
        elif compared.verdict == "not shown":
            return self._would_show(compared, began_s, share)
        elif compared.verdict == "cut":  # nothing is known of it
            limit_s = 2 * max(limit_s, self.store.limit_of_last_s, self.least_s)
            more = " gives it twice as long"
        else:
            return compared
        self.needed.append(minutes := self.minutes_for(limit_s, began_s - self.began_s, share))
        reason = f"{reason}: --minutes {minutes}{more}, and the same command goes on"
        return replace(compared, verdict="cut", reason=reason)

    def _would_show(self, compared: Compared, began_s: float, share: float) -> Compared:
        """Add to what looks better what should show that it learns the same."""
        more_s, took_s = compared.untrained_s, self.clock() - began_s
        if not more_s:
            return replace(compared, reason=f"{compared.reason}; it is left to you")
        limit_s = max((took_s + more_s) / FITS, more_s / TRAINED)
        minutes = self.minutes_for(limit_s, began_s - self.began_s, share)
        self.needed.append(minutes)
        reason = (
            f"about {compared.enough} steps of both should show it, {format_seconds(more_s)} more"
        )
        reason += f": --minutes {minutes}, and the same command goes on"
        return replace(compared, reason=f"{compared.reason}; {reason}")

    def needs(self, proposal: Proposal) -> TrialSeconds | None:
        """Return what a trial of it beside the best takes; None where that is not known."""
        assert self.pool is not None
        best = self.pool.best
        rounds = effect_of(best.plan, proposal.plan) == "approximate"
        rounds &= best.prediction.memory.fits != "no"  # what cannot run asks for no equal losses
        rounding, together = rounding_of(best.plan, proposal.plan), self.together(best, proposal)
        steps = least_steps(rounding, together=together) if rounds else 0
        step_s = self.pool.best_s or self.first_s or best.prediction.time.step_s or 0.0
        after_s = step_s / (self.pool.faster(proposal) or 1.0)
        looks = together and rounding == "operands"
        compiled = compiles(proposal.plan)
        return needs(self.ready_of, compiled, steps, step_s, after_s, looks=looks)

    @property
    def trial_s(self) -> float:
        """Return the seconds that a trial may take now."""
        return min(self.left_s(self.share), LONGEST * self.minutes_s)

    def too_slow(self, seen: TrialSeconds) -> str:
        """Return why a trial is not begun whose verdict would come too late."""
        minutes = self.minutes_for(seen.limit_s, self.clock() - self.began_s, self.share)
        self.needed.append(minutes)
        reason = f"it needs about {format_seconds(seen.limit_s)} ({seen.words}), and a trial has"
        reason += f" {format_seconds(max(0.0, self.trial_s))} now: --minutes {minutes}"
        return f"{reason}, and the same command goes on"

    def minutes_for(self, limit_s: float, after_s: float, share: float) -> int:
        """Return the whole minutes, more than now, that give a pair so long after so long."""
        needed_s = max((after_s + limit_s) / share, limit_s / LONGEST)
        return max(ceil(needed_s / 60), int(self.minutes_s / 60) + 1)

    @property
    def longest_s(self) -> float | None:
        """Return the seconds after which a run of the first plan ends; None where not known."""
        step_s = self.first_s or self.start.prediction.time.step_s
        length = length_of(self.first, step_s)
        return None if length is None or not step_s else length.steps * step_s

    def run_to_target_s(self) -> tuple[float | None, str]:
        """Return the seconds of a run to the target, and on what that rests; None where not known.

        The minutes of a goal are no evidence: they are how long a run may take, not how long it
        does.
        """
        goal, steps = self.first.goal, self.first.goal_steps
        if self.run_s is not None:
            return (
                self.run_s,
                f"one run to {goal.bits_per_byte:g} took {format_seconds(self.run_s)}",
            )
        if steps is None or self.first_s is None:
            return None, ""
        run_s = steps * self.first_s
        if goal.minutes and run_s > 60 * goal.minutes:
            return None, ""
        each = f"at {format_seconds(self.first_s)} each"
        return run_s, f"the {steps:,} steps of the goal take {format_seconds(run_s)} {each}"

    def wanted(self) -> int:
        """Return the whole minutes that should do for all that was not tried."""
        assert self.pool is not None
        took_s = [s.seconds for s in self.path if s.stage in ("screen", "accept") and s.seconds]
        cut = [s for s in self.path if s.verdict == "not tried" and s.stage != "learning"]
        execution_s = (len(self.pool.worth()) + len(cut)) * median(took_s) if took_s else 0.0
        run_s, _ = self.run_to_target_s()
        runs_s = 2 * GIVEN_UP * (run_s or 0.0)
        taught_s = runs_s if self.unreached else self.learning_s or runs_s
        learning_s = len(self.unlearned) * taught_s
        learning_s += runs_s if self.no_run else 0.0
        needed_s = max(execution_s / self.share, execution_s + learning_s)
        return max(ceil(needed_s / 60) or ceil(self.minutes_s / 30), *self.needed, 1)

    @property
    def least_s(self) -> float:
        """Return the seconds without which no reading can end and decide something."""
        assert self.pool is not None
        if not self.ready_s:
            return 0.0
        first_s, *later_s = self.ready_s
        ready_s = median(later_s) if later_s else SOONER * first_s
        return ready_s + max(PAIR_STEPS * (self.pool.best_s or 0.0), LOOK_BLOCKS * WANTED.block_s)

    # --- what came of it ---------------------------------------------------------------------

    @property
    def kept(self) -> list[TrialRow]:
        """Return the accepted changes of the path."""
        return [step for step in self.path if step.verdict == "kept"]

    def record(
        self, proposal: Proposal, compared: Compared, stage: TrialStage, since_s: float
    ) -> None:
        """Append a trial to the path."""
        assert self.pool is not None
        best, reason, kept = self.pool.best, compared.reason, compared.verdict == "better"
        few = kept and stage != "learning" and compared.steps < ACCEPT.timed
        if few:
            reason += f"; on {compared.steps} steps, where {ACCEPT.timed} are wanted"
        if kept:
            self.kept_of[len(self.path) + 1] = best, proposal
        measured = {name: getattr(compared, name) for name in MEASURED}
        measured["compile_s"] = self.compiled(best, proposal, compared.compile_s)
        self.row(
            TrialRow(
                len(self.path) + 1,
                difference(best.plan, proposal.plan),
                VERDICTS.get(compared.verdict, "reverted"),
                reason,
                stage,
                effect_of(best.plan, proposal.plan),
                self.pool.promise(proposal),
                seconds=self.store.spent_s - since_s,
                spent_s=self.store.spent_s,
                plan_sha256=fingerprint(proposal.plan),
                provisional=few and compared.ratio is not None,
                predicted_speed=self.pool.faster(proposal),
                predicted_memory=self._less(best, proposal),
                **measured,
            )
        )

    def _less(self, best: Proposal, proposal: Proposal) -> float | None:
        """Return the predicted peak over the best's, where memory is the aim."""
        before = best.prediction.memory.peak_bytes
        if self.rules.aim != "memory" or not before:
            return None
        return proposal.prediction.memory.peak_bytes / before

    def compiled(self, best: Proposal, proposal: Proposal, compile_s: float | None) -> float | None:
        """Return the seconds that a run with the change compiles longer than one without it.

        What the plan before it takes is known where that compiles nothing, or was measured as the
        second of a pair: the first of one finds in the process what the second compiled.
        """
        if compile_s is None:
            return None
        compiles = any(t.stage is Stage.COMPILE for t in best.plan.techniques.values())
        before_s = self.compile_s.get(fingerprint(best.plan), None if compiles else 0.0)
        self.compile_s.setdefault(fingerprint(proposal.plan), compile_s)
        return None if before_s is None else max(0.0, compile_s - before_s)

    def row(self, step: TrialRow) -> None:
        """Append a row to the path, and report it."""
        self.path.append(step)
        self._line(step)

    def _line(self, step: TrialRow) -> None:
        self.note_line(f"       {step.line()}")
        if bought := step.bought(length_of(self.first, step.after_s)):
            self.note_line(f"       it buys {bought}")

    def revise(self, step: TrialRow) -> None:
        """Replace a row of the path, and report it."""
        self.path[step.number - 1] = step
        self._line(step)

    def undo(self, steps: Sequence[TrialRow], reason: str) -> None:
        """Undo the changes that were accepted last: the plan before them is the best again."""
        assert self.pool is not None
        self.pool.best, _ = self.kept_of[steps[0].number]
        self.pool.best_s, self.total, self.target = steps[0].before_s, None, None
        self.missed = ""
        for step in steps:
            why = f"{step.reason}; undone: {reason}"
            self.revise(replace(step, verdict="reverted", reason=why, provisional=False))

    def trying(self, proposal: Proposal, more: str = "") -> None:
        """Report what is measured now."""
        assert self.pool is not None
        spent_s = int(self.clock() - self.began_s)
        change = " ".join(difference(self.pool.best.plan, proposal.plan))
        self.note_line(f"{spent_s // 60:3}:{spent_s % 60:02} {change}{more}")

    def tuned(self, *, interrupted: bool) -> Tuned:
        """Return the result."""
        plan = self.first if self.pool is None else self.pool.best.plan
        waiting = {} if self.pool is None else self.pool.waiting
        worth = {} if self.pool is None else self.pool.worth()
        words = {key: " ".join(one.change) for key, one in waiting.items()}
        ratios = [s.ratio for s in self.kept if s.ratio is not None and s.stage != "learning"]
        peaks = [s.memory for s in self.kept if s.memory is not None]
        planning_s = self.clock() - self.began_s - self.store.fresh_s
        unmeasured = self.unmeasured
        return Tuned(
            aim=self.rules.aim,
            first=self.first,
            plan=plan,
            changes=difference(self.first, plan),
            path=tuple(_unsure(step, unmeasured) for step in self.path),
            ratio=self.total or _multiplied(ratios),
            whole=self.total is not None or len(ratios) == 1,
            memory=prod(peaks) if peaks else None,
            target=self.to_target(),
            before_s=self.first_s,
            after_s=None if self.pool is None else self.pool.best_s,
            seconds=self.store.spent_s + max(0.0, planning_s),
            left=(*(words[key] for key in worth), *self.unlearned),
            up=self.up,
            no_gain=tuple(dict.fromkeys(words[key] for key in words if key not in worth)),
            interrupted=interrupted,
            unmeasured=unmeasured,
            no_run=self.no_run,
            aim_why=self.aim_why,
            wanted=0 if self.pool is None else self.wanted(),
            unreached=self.unreached,
            screens=tuple(self.screens),
        )

    @property
    def unmeasured(self) -> str:
        """Return why nothing is known of the time to the target that changes stayed for, if so."""
        if self.rules.aim != "quality" or not self.kept or self.to_target() is not None:
            return ""
        return self.missed or UNMEASURED

    @property
    def no_run(self) -> bool:
        """Return whether changes stayed for a target that no run went to."""
        return bool(self.unmeasured) and not self.missed

    def to_target(self) -> Target | None:
        """Return the time to the target: measured, or else the product of the accepted ratios."""
        learned = [step for step in self.kept if step.stage == "learning"]
        if self.target is not None or self.went_whole or not learned:
            return self.target
        ratio = _multiplied([step.ratio for step in self.kept if step.ratio is not None])
        last_s = learned[-1].after_s
        if ratio is None or last_s is None:
            return None
        if len(self.kept) == 1:
            return Target(ratio, True, learned[-1].before_s, last_s, better=True)
        return Target(ratio, False, last_s * ratio.value, last_s, better=True)


def _unsure(step: TrialRow, unmeasured: str) -> TrialRow:
    """Mark a change of execution that stayed for a target as provisional until runs went to it."""
    if not unmeasured or step.verdict != "kept" or step.stage == "learning":
        return step
    return replace(step, provisional=True, reason=f"{step.reason}; {unmeasured}")


def _multiplied(ratios: Sequence[Interval]) -> Interval | None:
    """Return the product of ratios whose errors are independent."""
    if not ratios:
        return None
    middle = sum(log(r.value) for r in ratios)
    down = sum((log(r.value) - log(max(r.low, 1e-9))) ** 2 for r in ratios) ** 0.5
    above = sum((log(min(r.high, 1e9)) - log(r.value)) ** 2 for r in ratios) ** 0.5
    low, high = exp(middle - down), exp(middle + above)
    return Interval(low, exp(middle), high, min(r.n for r in ratios))
