"""Judge two plans that were timed in alternation: which is better, and do they compute the same?

The time is a ratio with its interval (core/statistics), which a drifting device makes wider. Only
where the interval cannot decide is the drift reported beside it, and no prediction is corrected by
such a reading.

For memory, a smaller peak is better where it costs no larger share of the time, and where a step
stays within twice the first plan's, with all that was accepted before. Beyond that it is accepted
only if the plan without it leaves a long run no room. The largest saving of a peak may cost four
times the step, which is no gain where there is enough memory.

equality.py says whether both compute the same. A change that is better and approximate, and that
could not be shown to learn the same, is "not shown": it is not accepted.
"""

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from headrace.core.errors import RefusalKind
from headrace.core.limits import TuneAim
from headrace.core.statistics import Interval, accept, drifted
from headrace.core.units import format_bytes
from headrace.plan.plan import Plan
from headrace.plan.technique import Effect, Rounds
from headrace.tuner.effects import effect_of, rounding_of
from headrace.tuner.equality import BRIEF_STEPS, by_stretches, equality
from headrace.tuner.paired_blocks import MARGIN, SampleSize, ratio_of
from headrace.tuner.pairs import Measure
from headrace.tuner.readings import Reading

TrialVerdict = Literal["better", "worse", "undecided", "not shown", "different", "refused", "cut"]
DRIFT = {"cuda": 0.015, "cpu": 0.15}
"""Largest relative difference of the first plan's blocks at both ends that is no drift, by
device."""
FULL = 0.97
"""Largest share of the device's memory that a plan may hold. Above it a candidate is not accepted:
a long run meets longer rows and more fragments than a trial."""
DRIFTED = "the device was not as fast at the end as at the beginning"
"""Words for a drift that may be why nothing was decided."""
DEAR = 2.0
"""Longest step for less memory, in steps of the first plan, where the plan fits. Recomputing all
activations adds a third to a step's matmuls, so twice has room for more than one such change."""


@dataclass(frozen=True)
class Compared:
    """Hold the verdict on a second plan beside a first one.

    Args:
        verdict: of the second beside the first; "different": it does not compute the same; "not
            shown": it looks better, and what was measured cannot show that it is, or that it learns
            the same; "cut": time was up.
        reason: in words.
        ratio: seconds of a step, first over second: above 1 the second is faster.
        before_s, after_s: seconds of a step, the median of all blocks.
        memory: peak of the second over that of the first; None where it is not measured.
        peak_bytes: of the second, allocated.
        loss: mean loss of the second less that of the first, in nats per token.
        noise: what another seed would move the mean loss by, likewise.
        steps: timed of each.
        drifted: the interval cannot decide, and the device was not the same at both ends.
        screened: a first look showed no gain, and was all.
        ready_s: seconds that building, compiling and warming took.
        compile_s: by which the second's first steps took longer than as many steady ones.
        seeds: with which both went to the target.
        won: those with which the second was sooner there.
        enough: seeds that should show it, or steps of a training; None is not known.
        untrained_s: seconds that both would have had to train on for, so that it is shown.
        rates: tokens per second of steady steps in runs to the target, of both.
        refusal: of which kind the reason is, where a plan could not be measured.
    """

    verdict: TrialVerdict
    reason: str
    ratio: Interval | None = None
    before_s: float | None = None
    after_s: float | None = None
    memory: float | None = None
    peak_bytes: float | None = None
    loss: float | None = None
    noise: float | None = None
    steps: int = 0
    drifted: bool = False
    screened: bool = False
    ready_s: float = 0.0
    compile_s: float | None = None
    seeds: int = 0
    won: int = 0
    enough: int | None = None
    untrained_s: float = 0.0
    rates: tuple[float | None, float | None] = (None, None)
    refusal: RefusalKind | None = None


@dataclass(frozen=True)
class Rules:
    """Hold the rules by which a pair is judged.

    Args:
        aim: what is to become less.
        device: "cuda" or "cpu", whose noise differs.
        precision: of the plan where it runs.
        capacity_bytes: of the device beside what the driver holds; None is not looked at.
        peaks: predicted bytes of both plans, told beside what is measured, and all that is known
            on devices that do not count.
        slower: times as long as the first plan's a step of the plan before is, by what was kept.
        shown: that it learns the same was shown before, or is not asked.
        rounding: what the change rounds.
    """

    aim: TuneAim = "time"
    device: str = "cpu"
    precision: str = "fp32"
    capacity_bytes: float | None = None
    peaks: tuple[float, float] | None = None
    slower: float = 1.0
    shown: bool = False
    rounding: Rounds = "other"

    @property
    def margin(self) -> float:
        """Return the smallest gain that counts, as a share."""
        return MARGIN.get(self.device, MARGIN["cpu"])


@dataclass(frozen=True)
class WorthMoreSteps:
    """Decide after a first look whether more steps are worth their time.

    Args:
        kind: what the change does to learning.
        rules: by what the pair is judged.
    """

    effect: Effect
    rules: Rules

    @property
    def aim(self) -> TuneAim:
        """Return what is to become less."""
        return self.rules.aim

    def __call__(self, reading: Reading) -> bool:
        """Return whether the second plan may be better and computes the same."""
        compared = judge(reading, self.effect, self.rules)
        if compared.verdict not in ("better", "undecided", "not shown") or compared.ratio is None:
            return False
        if self.aim == "memory":
            return compared.verdict != "undecided"
        return compared.ratio.value > 1 and compared.ratio.high > 1 + self.rules.margin

    @property
    def asks_stretches(self) -> bool:
        """Return whether the change rounds operands, and must be shown to learn the same."""
        asks = self.effect == "approximate" and not self.rules.shown
        return asks and self.rules.rounding == "operands"

    def by_stretches(self, reading: Reading) -> bool:
        """Return whether stretches that begin with the same state show that both learn the same."""
        return self.asks_stretches and by_stretches(reading.beside or Reading(), reading)

    @property
    def least_training(self) -> int:
        """Return the steps to which a visit trains at once: those of a short training, if any."""
        return BRIEF_STEPS if self.asks_stretches else 0

    def train_to(self, reading: Reading) -> int:
        """Return the steps that both should train so that a gain is shown; 0 for no more."""
        compared = judge(reading, self.effect, self.rules)
        return (compared.enough or 0) if compared.verdict == "not shown" else 0


def compare(
    first: Plan,
    second: Plan,
    measure: Measure,
    rules: Rules,
    *,
    size: SampleSize,
    together: bool,
    limit_s: float,
    screen: bool = False,
) -> Compared:
    """Measure two plans in alternation and judge them.

    Args:
        first: the plan as it is.
        second: with a change.
        measure: see `measure_with`.
        rules: by what it is judged.
        size: how much of each is measured.
        together: both fit on the device at once.
        limit_s: it ends after this.
        screen: what shows no gain in a first look is not measured on.
    """
    if limit_s <= 0:
        return Compared("cut", "no time was left")
    effect = effect_of(first, second)
    rules = replace(rules, rounding=rounding_of(first, second))
    if screen:
        size = replace(size, worth=WorthMoreSteps(effect, rules))
    return judge(
        measure(first, second, size=size, together=together, limit_s=limit_s), effect, rules
    )


def judge(reading: Reading, effect: Effect, rules: Rules) -> Compared:
    """Return the verdict of a reading on the second plan."""
    other = reading.beside or Reading()
    for one in (other, reading):
        if one.timed_out:
            return Compared("cut", one.refused, refusal=one.refusal)
    if reading.refused:
        return Compared("refused", reading.refused, refusal=reading.refusal)
    if other.refused:
        why = f"the plan before it cannot run: {other.refused}"
        return Compared(
            "better",
            why,
            after_s=median(reading.seconds),
            steps=reading.steps,
            peak_bytes=reading.peak_bytes,
            ready_s=reading.ready_s,
            refusal=RefusalKind.BASELINE,
        )
    alike = equality(other, reading, effect, rules.rounding)
    ratio = ratio_of(other.seconds, reading.seconds)
    compared = Compared(
        "undecided",
        alike.reason,
        ratio=ratio,
        before_s=median(other.seconds),
        after_s=median(reading.seconds),
        memory=_memory(other, reading, rules),
        peak_bytes=reading.peak_bytes,
        loss=alike.loss,
        noise=alike.noise,
        steps=reading.steps,
        screened=reading.screened,
        ready_s=reading.ready_s,
        compile_s=reading.compile_s,
    )
    if alike.verdict == "different":
        return replace(compared, verdict="different")
    if room := _no_room(reading, rules):
        return replace(compared, verdict="refused", reason=f"it leaves a long run no room: {room}")
    if rules.aim == "memory":
        compared = _by_memory(compared, rules, tight=_no_room(other, rules))
    else:
        limit = DRIFT.get(rules.device, DRIFT["cpu"])
        compared = _by_time(compared, rules, drifted(other.seconds[0], other.seconds[-1], limit))
    if compared.verdict != "better" or alike.verdict == "same" or rules.shown:
        return compared
    reason = f"{compared.reason}, but {alike.reason}"
    return replace(
        compared,
        verdict="not shown",
        reason=reason,
        enough=alike.enough,
        untrained_s=reading.untrained_s,
    )


def _no_room(reading: Reading, rules: Rules) -> str:
    """Return the memory that a plan holds where a long run would not fit; "" where it would."""
    reserved_bytes, most = reading.reserved_bytes or reading.peak_bytes, rules.capacity_bytes
    if not most or not reserved_bytes or reserved_bytes <= FULL * most:
        return ""
    return f"{format_bytes(reserved_bytes)} of {format_bytes(most)}"


def _by_time(compared: Compared, rules: Rules, moved: bool) -> Compared:
    """Judge by the interval alone; a drift is reported where it cannot decide."""
    ratio = compared.ratio
    assert ratio is not None, "both were timed"
    verdict = accept(ratio, rules.margin)
    reason = {
        "better": f"all of the interval lies above {1 + rules.margin:.3f}",
        "worse": f"no gain: all of the interval lies below {1 / (1 + rules.margin):.3f}",
        "undecided": f"not all of the interval {ratio.low:.3f} to {ratio.high:.3f} lies above "
        f"{1 + rules.margin:.3f}",
    }
    moved &= verdict == "undecided"
    more = f", and {DRIFTED}" if moved else ""
    return replace(compared, verdict=verdict, reason=reason[verdict] + more, drifted=moved)


def _by_memory(compared: Compared, rules: Rules, tight: str) -> Compared:
    """Judge by memory: less is better where it costs no larger share of the time.

    Args:
        compared: what was measured of both; both were timed.
        rules: by what it is judged.
        tight: the plan before leaves a long run no room, in words.
    """
    memory, ratio = compared.memory, compared.ratio
    assert ratio is not None, "both were timed"
    if memory is None:
        return replace(
            compared,
            verdict="undecided",
            reason="its memory is not measured, and nothing is predicted of it",
        )
    reason = _format_peak(compared, memory, rules)
    if memory > 1 / (1 + rules.margin):
        verdict: TrialVerdict = "worse" if memory > 1 + rules.margin else "undecided"
        return replace(compared, verdict=verdict, reason=reason)
    if memory / ratio.value > 1:
        return replace(
            compared,
            verdict="worse",
            reason=f"{memory:.3f} of the peak for {1 / ratio.value:.3f} of the time",
        )
    times = rules.slower / ratio.value
    if times <= DEAR or ratio.value >= 1:
        return replace(compared, verdict="better", reason=reason)
    if tight:
        why = f"{reason}; a step takes {times:.1f} times as long as the first plan's"
        why += f", and the plan before leaves a long run no room: {tight}"
        return replace(compared, verdict="better", reason=why)
    why = f"{reason}, but a step takes {times:.1f} times as long as the first plan's, and "
    why += f"{DEAR:g} times is the most for memory where a plan fits without it"
    return replace(compared, verdict="worse", reason=why)


def _format_peak(compared: Compared, memory: float, rules: Rules) -> str:
    """Render the peak beside the one before, with its prediction where it was measured."""
    if compared.peak_bytes is None:
        return f"the peak is predicted to be {memory:.3f} times what it was"
    peaks = rules.peaks
    predicted = f" (predicted {peaks[1] / peaks[0]:.3f})" if peaks and peaks[0] else ""
    return f"the peak is {memory:.3f} times what it was{predicted}"


def _memory(one: Reading, two: Reading, rules: Rules) -> float | None:
    """Return the second's peak over the first's: measured, or else predicted."""
    if one.peak_bytes and two.peak_bytes:
        return two.peak_bytes / one.peak_bytes
    if one.reserved_bytes and two.reserved_bytes:
        return two.reserved_bytes / one.reserved_bytes
    return rules.peaks[1] / rules.peaks[0] if rules.peaks and rules.peaks[0] else None
