"""What a change of a plan would gain on this run, between two ends, or that nobody can tell.

A gain is the time of a step before over after, less 1. Three ways to one:

By the ledger: both plans are foreseen, and the ratio of their steps is applied to what the run
measured. Waits for data and for other ranks are no part of the ledger and stay as they were
measured; what is left of the step scales the prediction to this run. How fast its host launches
says nothing of its device: steps that wait for launches scale no steps that do not, nor the other
way. Where the two are further apart than `APART`, the ledger does not describe this run and says
nothing.

By share: of a finding whose share of the step is measured and that the ledger does not price, a
remedy takes away between half and all. The middle of the gain is at three quarters. How often that
holds nobody measured: these ends are no 80% interval, and `source` "share" says so.

Else nothing is forecast, with the reason; a guess would look like a number.

The ledger's interval is to hold 80 to 90% of gains. Its half-width in the logarithm of the ratio
grows with the change, `ERROR.least + ERROR.share x |log ratio|`, as `python
benchmarks/forecast_error.py` fits it to what was said before and measured then (the least mean
interval score: width, and distance outside of it). It is around what would be gained on a host of
the ledger's, and on one as slow as such hosts were seen.
"""

from dataclasses import dataclass
from math import exp, log
from typing import Literal

from headrace.core.statistics import Interval
from headrace.core.work import EDGE_S, SLOW_HOST
from headrace.doctor.window import Window
from headrace.planner.foresight import Foresight

Source = Literal["ledger", "share", "none"]
APART = 2.0
"""How many times the prediction of a step may be too long or too short for this run."""
NOTHING = 1e-4
"""Of a step: a change that the ledger says is smaller does nothing to its time."""
LEAST_TAKEN, MOST_TAKEN = 0.5, 1.0
"""Of a finding's share, what a remedy takes away."""
SHARE_ENDS = "between half and all of it"
"""What a reader is told of the ends of such a gain."""


@dataclass(frozen=True)
class Error:
    """How far the ledger's ratios were from measured ones, and in which rows."""

    least: float
    share: float
    n: int
    source: str


ERROR = Error(0.0105, 0.14, 45, "results/forecasts.jsonl: NVIDIA H200, 7 workloads")
"""Of 85% of those, in the logarithm of the ratio."""


@dataclass(frozen=True)
class Measured:
    """What a run measured; without it a forecast is one of the plan's prediction.

    Args:
        step_s: seconds of a steady step, its wait for data in it.
        waits_s: of it, seconds in which the device waited for data or for other ranks.
        inactive: techniques that were asked for and do nothing.
    """

    step_s: float | None = None
    waits_s: float = 0.0
    inactive: tuple[str, ...] = ()

    @staticmethod
    def of(window: Window) -> "Measured":
        """Of a run's steady steps: means, since a step's waits fall on few of them."""
        if not window.steps:
            return Measured(inactive=window.inactive)
        step_s = sum(window.step_s) / window.steps
        waits = [window.share(window.input_s) or 0.0, window.share(window.communication_s) or 0.0]
        return Measured(step_s, step_s * min(1.0, sum(waits)), window.inactive)


@dataclass(frozen=True)
class Forecast:
    """A gain between its ends, and what it is from.

    Args:
        gain: time before over after, less 1; None where it is not forecast.
        source: from what. Of the ledger 80% of gains lie between the ends; of a share nobody knows.
        unknown: why not, or what the forecast leaves out.
    """

    gain: Interval | None
    source: Source
    unknown: str = ""


def between(log_ratio: float, *others: float) -> Interval:
    """The gain of a ratio that the ledger tells, and the ends of 80%.

    Args:
        log_ratio: of a step before over after.
        others: what it may be as well; the ends are around all of them.
    """
    every = (log_ratio, *others)
    halves = [ERROR.least + ERROR.share * abs(one) for one in every]
    low = min(one - half for one, half in zip(every, halves, strict=True))
    high = max(one + half for one, half in zip(every, halves, strict=True))
    return Interval(exp(low) - 1, exp(log_ratio) - 1, exp(high) - 1, ERROR.n)


def by_ledger(before: Foresight, after: Foresight, measured: Measured) -> Forecast:
    """What the ledger says of a change on this run."""
    if before.step_s is None or after.step_s is None:
        return Forecast(None, "none", after.unknown or before.unknown)
    if before.between_ranks or after.between_ranks:  # receipts are of one device
        return Forecast(None, "none", after.no_interval)
    whole_s = before.step_s if measured.step_s is None else measured.step_s
    waits_s = 0.0 if measured.step_s is None else measured.waits_s
    alike = before.waits_for_launches == after.waits_for_launches
    scale = (whole_s - waits_s) / before.step_s if alike else 1.0
    if not 1 / APART <= scale <= APART:
        return Forecast(
            None, "none", f"the prediction of this run's step is {max(scale, 1 / scale):.1f} times "
            f"too {'short' if scale > 1 else 'long'}" if scale > 0 else "the step is all waiting",
        )  # fmt: skip
    ratio = whole_s / (scale * after.step_s + waits_s)
    slow = SLOW_HOST
    if measured.step_s is None:
        whole_s = max(whole_s, slow * before.host_s + EDGE_S)
    elif before.host_s:  # a step is no shorter than what its host takes
        slow = min(slow, max(1.0, (whole_s - waits_s - EDGE_S) / before.host_s))
    after_s = max(scale * after.step_s, slow * after.host_s + EDGE_S)
    return Forecast(between(log(ratio), log(whole_s / (after_s + waits_s))), "ledger")


def by_share(share: float, ledger: Forecast) -> Forecast:
    """A remedy that takes away between half and all of a share of the step.

    Args:
        share: of the step, or of the tokens in it: a step that does so much less is as good.
        ledger: what the change does to the rest of the step, where that is known.
    """
    if not 0 < share < 1:
        return Forecast(None, "none", "how much of the step it is was not measured")
    rest = 1.0 if ledger.gain is None else 1.0 + ledger.gain.value
    middle = (LEAST_TAKEN + MOST_TAKEN) / 2
    low, value, high = (rest / (1 - share * t) - 1 for t in (LEAST_TAKEN, middle, MOST_TAKEN))
    unknown = f"the rest of the step: {ledger.unknown}" if ledger.gain is None else ""
    return Forecast(Interval(low, value, high, 0), "share", unknown)
