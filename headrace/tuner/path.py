"""Hold the path from a plan to a better one, and its bill.

The bill of a faster step is in steps, that of a sooner target in runs to it.
"""

import json
from dataclasses import asdict, dataclass
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any

from headrace.core.files import shell, write_whole
from headrace.core.inline import inline_table
from headrace.core.limits import TuneAim
from headrace.core.statistics import Interval, break_even_steps
from headrace.core.units import format_seconds
from headrace.plan.plan import Plan
from headrace.tuner.paired_blocks import ACCEPT
from headrace.tuner.rungs import Screen
from headrace.tuner.trial_row import Length, TrialRow, format_ratio, length_of

PLAN, PATH, PAGE, TRIALS = "tuned.toml", "path.json", "tune.html", "trials.jsonl"
LOG = "trials.log"
"""File names of a tuning folder."""
UNMEASURED = "the time to the target was not measured"


@dataclass(frozen=True)
class Target:
    """Hold the time to the plan's target, compiling on the clock, of the first plan and the last.

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
        """Return whether it is known if the target comes sooner or later."""
        return self.better or not self.ratio.holds(1.0)

    @property
    def sooner(self) -> bool:
        """Return whether it is known to come sooner."""
        return self.shown and self.ratio.value > 1

    @property
    def saved_s(self) -> float | None:
        """Return the seconds that a run saves; None where that is not shown, or one missed it."""
        one, two = self.before_s, self.after_s
        if one is None or two is None or not (isfinite(one) and isfinite(two) and self.shown):
            return None
        return one - two

    @property
    def how(self) -> str:
        """Render what the ratio is."""
        if self.whole:
            words = f"first plan beside last over {self.ratio.n} seeds"
            return f"{words}, {self.missed} more missed it" if self.missed else words
        return "product of the kept changes: to the target over seeds, of a step for the others"

    def sentence(self) -> str:
        """Render the ratio as a clause."""
        value = self.ratio.value
        if not self.shown:
            ratio = f"{format_ratio(self.ratio)} times as soon, {self.how}"
            return f"the target is not shown to come sooner ({ratio})"
        soon = f"{value:.2f} times as soon" if value >= 1 else f"{1 / value:.2f} times as late"
        return f"the target comes {soon} ({self.how})"


@dataclass(frozen=True)
class Tuned:
    """Hold the result of a tuning.

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
        no_gain: changes that were not tried, for nothing is predicted to be gained by them.
        up: the time was, before all was tried.
        interrupted: by Ctrl-C.
        target: the time to the target; None where no change of learning was kept, and no run went
            to it.
        no_run: changes stayed for a target that no run went to.
        unmeasured: why nothing is known of the time to the target that changes stayed for; "" where
            it is known, or was not asked for.
        wanted: whole minutes that should do for what was not tried; 0 is not known.
        unreached: the clock ended the first run to the target, so how long one takes is not known.
        aim_why: why it was for that, where the minutes decided; "" else.
        screens: of changes of learning by short runs, each of the changes of one plan.
    """

    aim: TuneAim
    first: Plan
    plan: Plan
    changes: tuple[str, ...]
    path: tuple[TrialRow, ...]
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
    no_run: bool = False
    wanted: int = 0
    unreached: bool = False
    aim_why: str = ""
    screens: tuple[Screen, ...] = ()

    @property
    def now_s(self) -> float | None:
        """Return the seconds of a step at the first one's time of day.

        A change of learning may change them, which its runs show. A device that others use too is
        not as fast at the end as at the beginning, which the ratio does not feel.
        """
        if self.before_s is None or self.ratio is None or self.learned:
            return self.after_s
        return self.before_s / self.ratio.value

    @property
    def break_even(self) -> float | None:
        """Return the steps after which the tuning breaks even; None where no step got faster.

        None too where the bill is in runs to the target, known or not.
        """
        if self.target is not None or (self.aim == "quality" and self.first.goal.bits_per_byte):
            return None
        if self.before_s is None or self.now_s is None or self.now_s >= self.before_s:
            return None
        return break_even_steps(self.seconds, self.before_s, self.now_s)

    @property
    def length(self) -> Length | None:
        """Return when a run of the tuned plan ends by its budgets or its schedule."""
        return length_of(self.first, self.now_s)

    @property
    def break_even_runs(self) -> float | None:
        """Return the runs to the target after which the tuning breaks even; inf where none does.

        None where no target is known, or one of both plans misses it.
        """
        saved_s = None if self.target is None else self.target.saved_s
        if saved_s is None:
            return None
        return self.seconds / saved_s if saved_s > 0 else inf

    @property
    def dollars(self) -> float | None:
        """Return the price of the tuning; None where the plan names none."""
        price = self.first.hardware.dollars_per_hour
        return None if price is None else self.seconds / 3600 * price

    @property
    def kept(self) -> tuple[TrialRow, ...]:
        """Return the changes that stayed."""
        return tuple(step for step in self.path if step.verdict == "kept")

    @property
    def not_shown(self) -> tuple[TrialRow, ...]:
        """Return the changes that look better, and were not shown to be, nor since."""
        kept = {step.changes for step in self.kept}
        return tuple(
            step for step in self.path if step.verdict == "not shown" and step.changes not in kept
        )

    @property
    def learned(self) -> bool:
        """Return whether a change of learning stayed."""
        return any(step.stage == "learning" for step in self.kept)

    @property
    def provisional(self) -> tuple[TrialRow, ...]:
        """Return the changes that stayed on few steps, or without a run to the target."""
        return tuple(step for step in self.kept if step.provisional)

    @property
    def untried(self) -> tuple[str, ...]:
        """Return the changes that were not begun, or that the clock cut off."""
        ended = {step.changes for step in self.path if step.verdict != "not tried"}
        cut = [" ".join(step.changes) for step in self.path if step.changes not in ended]
        return tuple(dict.fromkeys((*cut, *self.left)))

    @property
    def more(self) -> str:
        """Render the minutes for all that was not tried, and what they do."""
        does = "gives a run to the target at least twice as long" if self.unreached else "should do"
        return f"--minutes {self.wanted} {does}"

    @property
    def counted(self) -> bool:
        """Return whether the peaks were measured; else they are predicted."""
        return any(step.peak_bytes is not None for step in self.kept)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "aim": self.aim,
            "aim_why": self.aim_why or None,
            "name": self.plan.name,
            "changes": list(self.changes),
            "ratio": None if self.ratio is None else asdict(self.ratio),
            "whole": self.whole,
            "memory": self.memory,
            "memory_measured": self.counted,
            "before_s": self.before_s,
            "after_s": self.after_s,
            "after_from": "runs to the target" if self.learned else "steps timed in turn",
            "tokens_per_s": self.plan.batch.tokens / self.after_s if self.after_s else None,
            "target": self.target and {**asdict(self.target), "shown": self.target.shown},
            "target_unmeasured": self.unmeasured or None,
            "minutes_wanted": self.wanted or None,
            "target_unreached": self.unreached,
            "provisional": [list(step.changes) for step in self.provisional],
            "not_shown": [list(step.changes) for step in self.not_shown],
            "tuning_s": self.seconds,
            "tuning_dollars": self.dollars,
            "break_even_steps": self.break_even,
            "break_even_runs": self.break_even_runs,
            "horizon_steps": None if self.length is None else self.length.steps,
            "path": [self._row(step) for step in self.path],
            "screens": [screen.to_dict() for screen in self.screens],
            "left": list(self.left),
            "no_gain_foreseen": list(self.no_gain),
            "time_was_up": self.up,
            "interrupted": self.interrupted,
        }

    def __str__(self) -> str:
        return self.sentence()

    def _repr_html_(self) -> str:
        rows = [
            (
                " ".join(step.changes),
                step.verdict,
                "" if step.ratio is None else f"{format_ratio(step.ratio)} times as fast",
                step.reason,
            )
            for step in self.path
        ]
        return inline_table(self.sentence(), ("change", "verdict", "measured", "why"), rows)

    def _row(self, step: TrialRow) -> dict[str, Any]:
        """Return a trial as JSON values, with what it bought where it was kept."""
        length = length_of(self.first, step.after_s)
        return {
            **asdict(step),
            "saved_s": step.saved_s,
            "break_even_steps": step.break_even,
            "worth": step.worth(length),
            "bought": step.bought(length),
        }

    @property
    def measured(self) -> int:
        """Return how many plans were measured."""
        return sum(step.ratio is not None or step.after_s is not None for step in self.path)

    @property
    def count_measured(self) -> str:
        """Render how many plans were measured."""
        return f"{self.measured} {'plan' if self.measured == 1 else 'plans'} measured"

    def sentence(self) -> str:
        """Render the result, and that of each screen, as sentences."""
        return " ".join([self._result(), *(screen.sentence() for screen in self.screens)])

    def _result(self) -> str:
        """Render the result as a sentence."""
        kept, spent = len(self.kept), format_seconds(self.seconds)
        what = f"{self.count_measured} in {spent}, {kept} kept"
        what += f", {len(self.not_shown)} not shown" if self.not_shown else ""
        if not self.path and self.interrupted and not self.screens:
            return f"Nothing was measured in {spent}; the plan is as it was."
        if not self.path and self.screens:
            return f"Nothing was measured by whole runs in {spent}; the plan is as it was."
        if not self.path:
            return (
                "Nothing is predicted to be better than the plan as it is, so nothing was measured."
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
            verb = "is" if self.counted else "is predicted to be"
            gains.append(f"the peak {verb} {self.memory:.3f} times what it was")
        what += self._provisionally()
        sentence = " and ".join(gains) or "it runs now"
        sentence += f", but {self.unmeasured}" if self.unmeasured else ""
        return f"{sentence[0].upper()}{sentence[1:]}: {what}. {self.bill}".rstrip()

    def _nearest(self) -> str:
        """Render what came nearest to a gain where nothing was kept, and whether all was tried."""
        timed = [s for s in self.path if s.ratio is not None and s.stage != "learning"]
        best = max(timed, key=lambda s: s.ratio.value if s.ratio else 0.0, default=None)
        if best is None or best.ratio is None:
            return ""
        rest = "" if self.up else ", and nothing else is predicted to make a step shorter"
        name, by = " ".join(best.changes), format_ratio(best.ratio)
        return f"; the fastest of them, {name}, is {by} times as fast{rest}"

    def _provisionally(self) -> str:
        """Render how many of the kept changes are not sure, and why."""
        unsure, most = self.provisional, f"on fewer than {ACCEPT.timed} steps"
        few = sum(step.ratio is not None and step.steps < ACCEPT.timed for step in unsure)
        if self.unmeasured:
            return f", {len(unsure)} of them provisionally" + (f", {few} {most}" if few else "")
        return f", {few} of them provisionally: {most}" if few else ""

    @property
    def even_after(self) -> str:
        """Render after what the tuning breaks even; "" where it never does, or not known."""
        runs, steps = self.break_even_runs, self.break_even
        if runs is not None:
            unit = "such run" if runs <= 1 else "such runs"
            return f"{ceil(runs):,} {unit}" if isfinite(runs) else ""
        return "" if steps is None else f"{steps:,.0f} steps"

    @property
    def beyond(self) -> str:
        """Render what ends the plan before its own steps break even; "" where nothing does."""
        steps, ends = self.break_even, self.length
        return "" if steps is None or ends is None or steps <= ends.steps else ends.ends

    @property
    def bill(self) -> str:
        """Render whether the tuning pays, as a sentence; "" where that is not known."""
        if self.beyond:
            words = f"The tuning does not pay for this plan alone, which ends after {self.beyond}"
            return f"{words}; it would break even after {self.even_after}."
        if self.break_even_runs == inf:
            return "The tuning never breaks even."
        return f"The tuning breaks even after {self.even_after}." if self.even_after else ""


def _speed(ratio: float) -> str:
    if ratio < 1:
        return f"a step takes {1 / ratio:.2f} times as long"
    return f"a step is {ratio:.2f} times as fast"


def command(folder: Path) -> str:
    """Return the command that runs the result."""
    return f"headrace train {shell(folder / PLAN)}"


def named(tuned: Tuned) -> Plan:
    """Return the tuned plan under a name of its own."""
    return tuned.plan.replaced(name=f"{tuned.first.name}-tuned")


def write_plan(tuned: Tuned, folder: Path) -> Path:
    """Write the tuned plan, with its path as comments above it."""
    head = [f"# {tuned.first.name}, tuned for {tuned.aim}: {tuned.sentence()}"]
    head += [f"# {step.line()}" for step in tuned.kept]
    path = folder / PLAN
    text = "\n".join(head).encode("ascii", "replace").decode()
    write_whole(path, f"{text}\n\n{named(tuned).to_toml()}")
    return path


def dumps(tuned: Tuned) -> str:
    """Return the path as JSON; numbers that are not finite become null."""
    values = json.loads(json.dumps(tuned.to_dict()), parse_constant=lambda word: None)
    return json.dumps(values, indent=1)
