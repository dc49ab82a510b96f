"""What came of two plans that were timed in turn: which is better, and do they compute the same?

The time is a ratio with its interval (core/statistics), which a device that drifts makes wider.
Only where the interval cannot decide is the drift told beside it, and no prediction is corrected by
such a reading.

For memory, less of the peak is better where it costs no larger share of the time, and where a step
stays within twice the first plan's, with all that was kept before. Beyond that it is kept only if
the plan without it leaves a long run no room: the largest saving of a peak may cost four times the
step, which nobody wants who has the memory.

A change of execution may move losses by rounding alone, and rounding grows from step to step: where
two trainings went says nothing of a change that is exact. Both plans began with the same weights
and read the same rows, so:

- where all that differs is exact, the loss and every gradient's norm of several batches, all at the
  first weights, lie within the bands that the guard of a run allows. Nothing else is asked;
- else the mean of all losses lies within what another seed would move it. That noise is not trained
  for: it is read off the first plan's own losses, whose scatter around their trend (second
  differences, by their median) is what other rows bring. Two means of n losses differ by its
  root(2/n), and twice that is allowed. Other initial weights would add to it, so this is the
  stricter limit.

Equal losses after some dozen steps are no proof of equal learning. What is approximate is told as
such, and a run compares its first step again (guard.py).
"""

from dataclasses import asdict, dataclass, replace
from math import isfinite, sqrt
from statistics import fmean, median
from typing import Any, Literal

from headrace.core.plan import Plan
from headrace.core.statistics import Interval, accept, drifted
from headrace.core.units import format_bytes
from headrace.guard import ALL, BANDS, MEAN, apart
from headrace.trials.kinds import Kind, kind_of
from headrace.trials.pairs import Measure
from headrace.trials.readings import NOT_DONE, Reading
from headrace.trials.turns import MARGIN, Size, ratio_of

Verdict = Literal["better", "worse", "undecided", "not shown", "different", "refused", "cut"]
Aim = Literal["time", "money", "memory", "quality"]
ROUNDING = 0.01
"""Of the guard's band: by so much of itself rounding may move a mean loss, however quiet it is."""
SEEDS_APART = 2.0
"""Standard deviations of the noise between seeds that a mean loss may lie away."""
NORMAL_MEDIAN = 0.6745
"""Median distance from the mean of a normal distribution, in standard deviations."""
DRIFT = {"cuda": 0.015, "cpu": 0.15}
"""Share by which the first plan's blocks at both ends may differ without a word."""
FULL = 0.97
"""Of the device's memory beside the driver's: what is measured above it is not kept, for a long run
meets longer rows and more fragments than a trial."""
DRIFTED = "the device was not as fast at the end as at the beginning"
"""What is told where that may be why nothing was decided."""
DEAR = 2.0
"""Times as long as the first plan's a step may become for less memory, where the plan fits. Making
all activations again adds a third to a step's products, so twice is room for more than one such."""


@dataclass(frozen=True)
class Compared:
    """What came of two plans.

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
        enough: seeds that should show it; None is not known.
        rates: tokens per second of steady steps in runs to the target, of both.
    """

    verdict: Verdict
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
    rates: tuple[float | None, float | None] = (None, None)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Rules:
    """By what a pair is judged.

    Args:
        aim: what is to become less.
        device: "cuda" or "cpu", whose noise differs.
        precision: of the plan where it runs.
        capacity_bytes: of the device beside what the driver holds; None is not looked at.
        peaks: predicted bytes of both plans, told beside what is measured, and all that is known
            on devices that do not count.
        slower: times as long as the first plan's a step of the plan before is, by what was kept.
    """

    aim: Aim = "time"
    device: str = "cpu"
    precision: str = "fp32"
    capacity_bytes: float | None = None
    peaks: tuple[float, float] | None = None
    slower: float = 1.0

    @property
    def margin(self) -> float:
        """The gain that counts."""
        return MARGIN.get(self.device, MARGIN["cpu"])


@dataclass(frozen=True)
class Gain:
    """Asked after a first look: whether more steps are worth their time.

    Args:
        kind: what the change does to learning.
        rules: by what the pair is judged.
    """

    kind: Kind
    rules: Rules

    @property
    def aim(self) -> Aim:
        """What is to become less."""
        return self.rules.aim

    def __call__(self, reading: Reading) -> bool:
        """Whether the second plan may be better, and computes the same."""
        found = judge(reading, self.kind, self.rules)
        if found.verdict not in ("better", "undecided") or found.ratio is None:
            return False
        if self.aim == "memory":
            return found.verdict == "better"
        return found.ratio.value > 1 and found.ratio.high > 1 + self.rules.margin


def compare(
    first: Plan, second: Plan, measure: Measure, rules: Rules, *, size: Size, together: bool,
    limit_s: float, screen: bool = False,
) -> Compared:  # fmt: skip
    """Measure two plans in turn and judge.

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
    kind = kind_of(first, second)
    if screen:
        size = replace(size, worth=Gain(kind, rules))
    return judge(measure(first, second, size=size, together=together, limit_s=limit_s), kind, rules)


def judge(reading: Reading, kind: Kind, rules: Rules) -> Compared:
    """What a reading tells of the second plan."""
    other = reading.beside or Reading()
    for one in (other, reading):
        if one.refused.startswith(NOT_DONE):
            return Compared("cut", one.refused)
    if reading.refused:
        return Compared("refused", reading.refused)
    if other.refused:
        why = f"the plan before it cannot run: {other.refused}"
        return Compared("better", why, after_s=median(reading.seconds), steps=reading.steps,
                        peak_bytes=reading.peak_bytes, ready_s=reading.ready_s)  # fmt: skip
    off, noise, why = _losses(other, reading, kind, rules.precision)
    ratio = ratio_of(other.seconds, reading.seconds)
    found = Compared(
        "undecided", why, ratio=ratio,
        before_s=median(other.seconds), after_s=median(reading.seconds),
        memory=_memory(other, reading, rules), peak_bytes=reading.peak_bytes, loss=off, noise=noise,
        steps=reading.steps, screened=reading.screened, ready_s=reading.ready_s,
        compile_s=reading.compile_s,
    )  # fmt: skip
    if why:
        return replace(found, verdict="different", reason=why)
    if room := _no_room(reading, rules):
        return replace(found, verdict="refused", reason=f"it leaves a long run no room: {room}")
    if rules.aim == "memory":
        return _by_memory(found, rules, tight=_no_room(other, rules))
    limit = DRIFT.get(rules.device, DRIFT["cpu"])
    return _by_time(found, rules, drifted(other.seconds[0], other.seconds[-1], limit))


def _no_room(reading: Reading, rules: Rules) -> str:
    """What it holds of the device, where a long run would not fit."""
    held, most = reading.reserved_bytes or reading.peak_bytes, rules.capacity_bytes
    if not most or not held or held <= FULL * most:
        return ""
    return f"{format_bytes(held)} of {format_bytes(most)}"


def _by_time(found: Compared, rules: Rules, moved: bool) -> Compared:
    """By the interval alone; that the device moved is told where it cannot decide."""
    ratio = found.ratio
    assert ratio is not None, "both were timed"
    verdict = accept(ratio, rules.margin)
    told = {
        "better": f"all of the interval lies above {1 + rules.margin:.3f}",
        "worse": f"no gain: all of the interval lies below {1 / (1 + rules.margin):.3f}",
        "undecided": f"not all of the interval {ratio.low:.3f} to {ratio.high:.3f} lies above "
        f"{1 + rules.margin:.3f}",
    }  # fmt: skip
    moved &= verdict == "undecided"
    more = f", and {DRIFTED}" if moved else ""
    return replace(found, verdict=verdict, reason=told[verdict] + more, drifted=moved)


def _by_memory(found: Compared, rules: Rules, tight: str) -> Compared:
    """Less memory is better where it costs no larger share of the time, nor is dear.

    Args:
        found: both were timed.
        rules: by what it is judged.
        tight: the plan before leaves a long run no room, in words.
    """
    memory, ratio = found.memory, found.ratio
    assert ratio is not None, "both were timed"
    if memory is None:
        return replace(
            found,
            verdict="undecided",
            reason="its memory is not measured, and nothing is predicted of it",
        )
    told = _peak_told(found, memory, rules)
    if memory > 1 / (1 + rules.margin):
        verdict: Verdict = "worse" if memory > 1 + rules.margin else "undecided"
        return replace(found, verdict=verdict, reason=told)
    if memory / ratio.value > 1:
        return replace(
            found,
            verdict="worse",
            reason=f"{memory:.3f} of the peak for {1 / ratio.value:.3f} of the time",
        )
    times = rules.slower / ratio.value
    if times <= DEAR or ratio.value >= 1:
        return replace(found, verdict="better", reason=told)
    if tight:
        why = f"{told}; a step takes {times:.1f} times as long as the first plan's"
        why += f", and the plan before leaves a long run no room: {tight}"
        return replace(found, verdict="better", reason=why)
    why = f"{told}, but a step takes {times:.1f} times as long as the first plan's, and "
    why += f"{DEAR:g} times is the most for memory where a plan fits without it"
    return replace(found, verdict="worse", reason=why)


def _peak_told(found: Compared, memory: float, rules: Rules) -> str:
    """The peak beside the one before, with what was predicted of it where it was measured."""
    if found.peak_bytes is None:
        return f"the peak is foreseen to be {memory:.3f} times what it was"
    peaks = rules.peaks
    said = f" (predicted {peaks[1] / peaks[0]:.3f})" if peaks and peaks[0] else ""
    return f"the peak is {memory:.3f} times what it was{said}"


def _memory(one: Reading, two: Reading, rules: Rules) -> float | None:
    """The second's peak over the first's: measured, or predicted where nothing counts."""
    if one.peak_bytes and two.peak_bytes:
        return two.peak_bytes / one.peak_bytes
    if one.reserved_bytes and two.reserved_bytes:
        return two.reserved_bytes / one.reserved_bytes
    return rules.peaks[1] / rules.peaks[0] if rules.peaks and rules.peaks[0] else None


def _losses(
    one: Reading, two: Reading, kind: Kind, precision: str
) -> tuple[float | None, float | None, str]:
    """Difference of the mean losses, the seeds' noise, and why they are not the same, if not."""
    if not all(map(isfinite, two.losses)):
        return None, None, "its loss is not finite"
    n = min(len(one.losses), len(two.losses))  # steps that both took
    a, b = one.losses[:n], two.losses[:n]
    if not n:
        return None, None, ""
    if a == b and one.norms[:n] == two.norms[:n]:
        return 0.0, seed_noise(a), ""
    band = BANDS.get(precision, BANDS["bf16"])
    off, noise = fmean(b) - fmean(a), seed_noise(a)
    if kind == "exact":
        return off, noise, _other_numbers(one, two)
    allowed = max(SEEDS_APART * noise, ROUNDING * band * abs(fmean(a)))
    if abs(off) <= allowed:
        return off, noise, ""
    told = f"its mean loss is off by {off:+.4g} nats, and another seed moves it by {allowed:.2g}"
    return off, noise, told


def _other_numbers(one: Reading, two: Reading) -> str:
    """What two plans that should compute the same do not, at the same weights; "" if they do."""
    if not (one.firsts and two.firsts):
        return "nothing was compared at the same weights"
    freed = {*one.freed, *two.freed}
    for batch, (wanted, found) in enumerate(zip(one.firsts, two.firsts, strict=False), start=1):
        if not (isfinite(wanted.total) and isfinite(found.total)):  # a skipped step is refused
            continue
        wanted, found = (
            f._replace(norms={n: v for n, v in f.norms.items() if n not in freed})
            for f in (wanted, found)
        )
        off = apart(found, wanted)
        share = {name: v / two.limits.get(name, two.limits[""]) for name, v in off.items()}
        worst = MEAN if share[MEAN] > 1 else max(share, key=share.__getitem__)
        if share[worst] <= 1:
            continue
        told = f"at the same weights its loss of batch {batch} is"
        if worst == MEAN:
            return f"{told} {found.loss:.6g} nats, and {wanted.loss:.6g}"
        other, first = (
            f.total if worst == ALL else f.norms.get(worst, 0.0) for f in (found, wanted)
        )
        return f"the gradient of {worst} has norm {other:.6g} in batch {batch}, and {first:.6g}"
    return ""


def seed_noise(losses: list[float]) -> float:
    """Standard deviation, in nats, of the mean losses' difference between two seeds; 0 for few."""
    bends = [a - 2 * b + c for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    if not bends:
        return 0.0
    scatter = median(map(abs, bends)) / NORMAL_MEDIAN / sqrt(6)
    return scatter * sqrt(2 / len(losses))
