"""The way from a plan to a better one, and what it came to.

The bill of a faster step is in steps, that of a sooner target in runs to it.
"""

import json
from dataclasses import asdict, dataclass
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any

from headrace.core.files import shell, write_whole
from headrace.core.limits import TuneAim
from headrace.core.statistics import Interval, break_even_steps
from headrace.core.units import format_seconds
from headrace.plan.plan import Plan
from headrace.tuner.step import Length, Step, length_of, told
from headrace.tuner.turns import ACCEPT

PLAN, PATH, PAGE, TRIALS = "tuned.toml", "path.json", "tune.html", "trials.jsonl"
LOG = "trials.log"
"""Files of a tuning folder."""
UNMEASURED = "the time to the target was not measured"


@dataclass(frozen=True)
class Target:
    """The time to the plan's target, compiling on the clock, of the first plan and of the last.

    Args:
        ratio: first over last: above 1 the last is sooner.
        whole: both trained to it, seed for seed; else the ratio is the product of those of all
            changes that were kept, of a step's time for those of execution.
        before_s, after_s: seconds to it, over the seeds; not whole, the first's is the last's
            times the ratio. inf is a target that was missed.
        missed: seeds with which one of the two did not get there.
        better: a test over seeds says so, which an interval of few that got there need not.
    """

    ratio: Interval
    whole: bool
    before_s: float | None
    after_s: float | None
    missed: int = 0
    better: bool = False

    @property
    def shown(self) -> bool:
        """Whether it is known if the target comes sooner or later."""
        return self.better or not self.ratio.holds(1.0)

    @property
    def sooner(self) -> bool:
        """Whether it is known to come sooner."""
        return self.shown and self.ratio.value > 1

    @property
    def saved_s(self) -> float | None:
        """Seconds that a run saves; None where that is not shown, or one misses the target."""
        one, two = self.before_s, self.after_s
        if one is None or two is None or not (isfinite(one) and isfinite(two) and self.shown):
            return None
        return one - two

    @property
    def how(self) -> str:
        """What the ratio is, in words."""
        if self.whole:
            told = f"first plan beside last over {self.ratio.n} seeds"
            return f"{told}, {self.missed} more missed it" if self.missed else told
        return "product of the kept changes: to the target over seeds, of a step for the others"

    def sentence(self) -> str:
        """The ratio in words."""
        value = self.ratio.value
        if not self.shown:
            found = f"{told(self.ratio)} times as soon, {self.how}"
            return f"the target is not shown to come sooner ({found})"
        soon = f"{value:.2f} times as soon" if value >= 1 else f"{1 / value:.2f} times as late"
        return f"the target comes {soon} ({self.how})"


@dataclass(frozen=True)
class Tuned:
    """What tuning came to.

    Args:
        aim: what was to become less.
        first, plan: where it began and where it ended.
        changes: between them, in words.
        path: every plan that was tried, in order.
        ratio: time of a step, first over last; None where nothing was kept.
        whole: the ratio was measured between the two, and is no product of the path's.
        memory: peak, last over first, likewise a product; None where it is not measured.
        before_s, after_s: seconds of a step; after a change of learning those of its runs.
        seconds: that tuning took, earlier calls of the same folder too.
        left: changes that were not begun.
        no_gain: changes that were not tried, for nothing is foreseen to be gained by them.
        up: the time was, before all was tried.
        interrupted: by Ctrl-C.
        target: the time to the target; None where no change of learning was kept, and no run went
            to it.
        unmeasured: why nothing is known of the time to the target that changes stayed for; "" where
            it is known, or was not asked for.
        wanted: whole minutes that should do for what was not tried; 0 is not known.
        unreached: the clock ended the first run to the target, so how long one takes is not known.
        aim_why: why it was for that, where the minutes decided; "" else.
    """

    aim: TuneAim
    first: Plan
    plan: Plan
    changes: tuple[str, ...]
    path: tuple[Step, ...]
    ratio: Interval | None
    whole: bool
    memory: float | None
    before_s: float | None
    after_s: float | None
    seconds: float
    left: tuple[str, ...] = ()
    no_gain: tuple[str, ...] = ()
    up: bool = False
    interrupted: bool = False
    target: Target | None = None
    unmeasured: str = ""
    wanted: int = 0
    unreached: bool = False
    aim_why: str = ""

    @property
    def now_s(self) -> float | None:
        """Seconds of a step at the first one's time of day: the first step over the ratio.

        A change of learning may make it another, which its runs tell.

        A device that others use too is not as fast at the end as at the beginning, which the
        ratio does not feel.
        """
        if self.before_s is None or self.ratio is None or self.learned:
            return self.after_s
        return self.before_s / self.ratio.value

    @property
    def break_even(self) -> float | None:
        """Steps after which the tuning time is won back; None where no step was won.

        None too where the bill is in runs to the target, known or not.
        """
        if self.target is not None or (self.aim == "quality" and self.first.goal.bits_per_byte):
            return None
        if self.before_s is None or self.now_s is None or self.now_s >= self.before_s:
            return None
        return break_even_steps(self.seconds, self.before_s, self.now_s)

    @property
    def length(self) -> Length | None:
        """When a run of the tuned plan ends by its budgets or its schedule."""
        return length_of(self.first, self.now_s)

    @property
    def break_even_runs(self) -> float | None:
        """Runs to the target after which the tuning time is won back; inf where they save none.

        None where no target is known, or one of both plans misses it.
        """
        saved_s = None if self.target is None else self.target.saved_s
        if saved_s is None:
            return None
        return self.seconds / saved_s if saved_s > 0 else inf

    @property
    def dollars(self) -> float | None:
        """Price of the tuning; None where the plan names none."""
        price = self.first.hardware.dollars_per_hour
        return None if price is None else self.seconds / 3600 * price

    @property
    def kept(self) -> tuple[Step, ...]:
        """Changes that stayed."""
        return tuple(step for step in self.path if step.verdict == "kept")

    @property
    def not_shown(self) -> tuple[Step, ...]:
        """Changes that look better, and were not shown to be, or to learn the same, nor since."""
        kept = {step.changes for step in self.kept}
        return tuple(
            step for step in self.path if step.verdict == "not shown" and step.changes not in kept
        )

    @property
    def learned(self) -> bool:
        """Whether a change of learning stayed."""
        return any(step.stage == "learning" for step in self.kept)

    @property
    def provisional(self) -> tuple[Step, ...]:
        """Changes that stayed on fewer steps than are wanted, or without a run to the target."""
        return tuple(step for step in self.kept if step.provisional)

    @property
    def untried(self) -> tuple[str, ...]:
        """Changes that were not begun, or that the clock cut off."""
        ended = {step.changes for step in self.path if step.verdict != "not tried"}
        cut = [" ".join(step.changes) for step in self.path if step.changes not in ended]
        return tuple(dict.fromkeys((*cut, *self.left)))

    @property
    def more(self) -> str:
        """What to give for all that was not tried, and what it does."""
        does = "gives a run to the target at least twice as long" if self.unreached else "should do"
        return f"--minutes {self.wanted} {does}"

    @property
    def counted(self) -> bool:
        """Whether the peaks were measured; a device that counts no bytes has those foreseen."""
        return any(step.peak_bytes is not None for step in self.kept)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "aim": self.aim, "aim_why": self.aim_why or None,
            "name": self.plan.name, "changes": list(self.changes),
            "ratio": None if self.ratio is None else asdict(self.ratio), "whole": self.whole,
            "memory": self.memory, "memory_measured": self.counted,
            "before_s": self.before_s, "after_s": self.after_s,
            "after_from": "runs to the target" if self.learned else "steps timed in turn",
            "tokens_per_s": self.plan.batch.tokens / self.after_s if self.after_s else None,
            "target": self.target and {**asdict(self.target), "shown": self.target.shown},
            "target_unmeasured": self.unmeasured or None, "minutes_wanted": self.wanted or None,
            "target_unreached": self.unreached,
            "provisional": [list(step.changes) for step in self.provisional],
            "not_shown": [list(step.changes) for step in self.not_shown],
            "tuning_s": self.seconds, "tuning_dollars": self.dollars,
            "break_even_steps": self.break_even, "break_even_runs": self.break_even_runs,
            "horizon_steps": None if self.length is None else self.length.steps,
            "path": [self._row(step) for step in self.path],
            "left": list(self.left), "no_gain_foreseen": list(self.no_gain),
            "time_was_up": self.up, "interrupted": self.interrupted,
        }  # fmt: skip

    def _row(self, step: Step) -> dict[str, Any]:
        """A trial as JSON values, with what it bought where it was kept."""
        length = length_of(self.first, step.after_s)
        return {
            **asdict(step), "saved_s": step.saved_s, "break_even_steps": step.break_even,
            "worth": step.worth(length), "bought": step.bought(length),
        }  # fmt: skip

    @property
    def measured(self) -> int:
        """How many plans were."""
        return sum(step.ratio is not None or step.after_s is not None for step in self.path)

    @property
    def told_measured(self) -> str:
        """That in words."""
        return f"{self.measured} {'plan' if self.measured == 1 else 'plans'} measured"

    def sentence(self) -> str:
        """The end in words."""
        kept, spent = len(self.kept), format_seconds(self.seconds)
        what = f"{self.told_measured} in {spent}, {kept} kept"
        what += f", {len(self.not_shown)} not shown" if self.not_shown else ""
        if not self.path and self.interrupted:
            return f"Nothing was measured in {spent}; the plan is as it was."
        if not self.path:
            return (
                "Nothing is foreseen to be better than the plan as it is, so nothing was measured."
            )
        if not self.measured:
            return f"No plan could be measured in {spent}; the plan is as it was."
        if not kept and any(step.ratio and step.verdict == "not tried" for step in self.path):
            return f"No change was measured for long enough to be kept: {what}."
        if not kept:
            what += self._nearest()
            shown = "could be shown to be" if self.not_shown else "is"
            return f"Nothing that was tried {shown} better than the plan as it is: {what}."
        gains = [] if self.target is None else [self.target.sentence()]
        if self.ratio is not None:
            own = " by the changes of execution" if self.learned else ""
            gains.append(f"{_speed(self.ratio.value)}{own}")
        if self.memory is not None:
            verb = "is" if self.counted else "is foreseen to be"
            gains.append(f"the peak {verb} {self.memory:.3f} times what it was")
        what += self._provisionally()
        said = " and ".join(gains) or "it runs now"
        said += f", but {self.unmeasured}" if self.unmeasured else ""
        return f"{said[0].upper()}{said[1:]}: {what}. {self.bill}".rstrip()

    def _nearest(self) -> str:
        """What came nearest to a gain where nothing was kept, and whether all was tried."""
        timed = [s for s in self.path if s.ratio is not None and s.stage != "learning"]
        best = max(timed, key=lambda s: s.ratio.value if s.ratio else 0.0, default=None)
        if best is None or best.ratio is None:
            return ""
        rest = "" if self.up else ", and nothing else is foreseen to make a step shorter"
        name, by = " ".join(best.changes), told(best.ratio)
        return f"; the fastest of them, {name}, is {by} times as fast{rest}"

    def _provisionally(self) -> str:
        """How many of the kept changes are not sure, and why."""
        unsure, most = self.provisional, f"on fewer than {ACCEPT.timed} steps"
        few = sum(step.ratio is not None and step.steps < ACCEPT.timed for step in unsure)
        if self.unmeasured:
            return f", {len(unsure)} of them provisionally" + (f", {few} {most}" if few else "")
        return f", {few} of them provisionally: {most}" if few else ""

    @property
    def won_back(self) -> str:
        """When the tuning time is, in words; nothing where that is not known."""
        runs, steps = self.break_even_runs, self.break_even
        if runs is not None:
            unit = "such run" if runs <= 1 else "such runs"
            return f"won back after {ceil(runs):,} {unit}" if isfinite(runs) else "never won back"
        return "" if steps is None else f"won back after {steps:,.0f} steps"

    @property
    def beyond(self) -> str:
        """What the plan ends after, where that is before its own steps won the tuning time back."""
        steps, ends = self.break_even, self.length
        return "" if steps is None or ends is None or steps <= ends.steps else ends.ends

    @property
    def bill(self) -> str:
        """Whether the tuning pays, as a sentence; nothing where that is not known."""
        won = self.won_back
        if self.beyond:
            told = f"The tuning does not pay for this plan alone, which ends after {self.beyond}"
            return f"{told}; it would be {won}."
        return f"The tuning is {won}." if won else ""


def _speed(ratio: float) -> str:
    if ratio < 1:
        return f"a step takes {1 / ratio:.2f} times as long"
    return f"a step is {ratio:.2f} times as fast"


def command(folder: Path) -> str:
    """What runs the result."""
    return f"headrace train {shell(folder / PLAN)}"


def named(tuned: Tuned) -> Plan:
    """The tuned plan, whose runs are not the first plan's."""
    return tuned.plan.replaced(name=f"{tuned.first.name}-tuned")


def write_plan(tuned: Tuned, folder: Path) -> Path:
    """The tuned plan, with its way as comments above it."""
    head = [f"# {tuned.first.name}, tuned for {tuned.aim}: {tuned.sentence()}"]
    head += [f"# {step.line()}" for step in tuned.kept]
    path = folder / PLAN
    text = "\n".join(head).encode("ascii", "replace").decode()
    write_whole(path, f"{text}\n\n{named(tuned).to_toml()}")
    return path


def dumps(tuned: Tuned) -> str:
    """The path as JSON; numbers that are not finite become null."""
    plain = json.loads(json.dumps(tuned.plain()), parse_constant=lambda word: None)
    return json.dumps(plain, indent=1)
