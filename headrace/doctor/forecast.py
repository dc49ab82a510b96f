"""Forecast what a change of a plan would gain on this run, between two ends, or why nobody can.

A gain is the time of a step before over after, less 1. There are three sources:

By the ledger: both plans are predicted, and the ratio of their steps is applied to what the run
measured. Waits for data and for other ranks are no part of the ledger and stay as they were
measured; what is left of the step scales the prediction to this run. How fast its host launches
says nothing of its device: steps that wait for launches scale no steps that do not, and those scale
no steps that do. Where a run's signals say that its device waited for launches, its step is what
its host takes, and the device's part stays as it is predicted. Where the two are further apart than
`APART`, the ledger does not describe this run and says nothing.

By share: of a finding whose share of the step is measured and that the ledger does not price, a
remedy takes away between half and all. The middle of the gain is at three quarters. How often that
holds nobody measured: these ends are no 80% interval, and `source` "share" says so.

Else nothing is forecast, with the reason; a guess would look like a number.

The ledger's interval is to hold 80 to 90% of gains. Its half-width in the logarithm of the ratio
grows with the work that a change adds and takes away, `ERROR.least + ERROR.share x work`, the work
as a share of the device's, but at least |log ratio|: a compiled block that computes half again is
as hard to predict as both, though they nearly cancel. `python benchmarks/forecast_error.py` fits
it to what was forecast before and measured then (the least mean interval score: width, and distance
outside of it). On a device that no forecast was compared on, the rate of the work that is moved
may be off as far as the ends of a step's interval are widened there (predict/intervals.py), and the
interval is so much wider.

A host launches no plan at the pace that it launched another at. Natural runs (natural.jsonl) say
what launches of eager and of compiled code usually take (`usual_launch`), how far single plans lie
from that, and how far the same plan does some minutes later. Where the host decides this run, its
own pace counts for both plans; where the device does, the usual one, up to the pace at which the
host ran ahead. The interval is around the gains by each of these paces. They come from
`python benchmarks/natural_error.py`, which also shows how many gains of workloads that it left out
lie inside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite, log, nan, prod, sqrt
from typing import Literal

from headrace.core.statistics import Interval
from headrace.costs.constants import number
from headrace.costs.work import HOST_S, SLOW_HOST
from headrace.data.packing.ledger import PackingLedger
from headrace.doctor.observation import Observation
from headrace.doctor.physics import host_binds, priced_idle
from headrace.doctor.stages import StageTimes
from headrace.predict.prediction import EDGE, NoInterval, Prediction

Source = Literal["ledger", "share", "none"]
APART = 2.0
"""How many times the prediction of a step may be too long or too short for this run."""
HOST_APART = 4.0
"""How many times too long or too short the host's part may be, where the device waits for it."""
REST = 0.6
"""Share of `HOST_S` that a host takes beside launching a step. Nine small plans whose launches were
recorded took 5.0 to 8.6 ms a step on an H100, 8.5 predicted (natural.jsonl)."""
ON_CPU = number("gain_on_cpu")
"""How far off a probed CPU's rates of the work that a change moves may be."""
SHORTEST_S = 2.5e-3
"""Least seconds that a host's part is divided by: a shorter part decides no step, and a CPU, whose
host is the device, has none."""
FEW_S = 2 * HOST_S
"""Usual seconds of launches up to which how far a host ran ahead says nothing of its pace: what
else it does in a step is not known well enough beside them."""
NOTHING = 1e-4
"""Share of a step: a change that the ledger says is smaller does nothing to its time."""
LEAST_TAKEN, MOST_TAKEN = 0.5, 1.0
"""Parts of a finding's share that a remedy takes away, at least and at most. Chosen."""


@dataclass(frozen=True)
class Error:
    """Hold how far the ledger's ratios were from measured ones, and in which rows."""

    least: float
    share: float
    n: int
    source: str


ERROR = Error(0.0095, 0.1, 93, "results/forecasts.jsonl: NVIDIA H200, 15 workloads")
"""Error in the logarithm of 85% of workloads outside of the fit and of 90% of receipts."""


@dataclass(frozen=True)
class Hosts:
    """Hold how far a host's pace lies from what is known of it, both as factors.

    Args:
        drift: from the pace at the same launches minutes before.
        spread: from the usual pace at another plan's launches (`usual_launch`).
    """

    drift: float
    spread: float


HOSTS = Hosts(number("host_drift"), number("host_spread"))
"""What 80% of natural runs on GPUs show."""
_Steps = list[tuple[float, float]]
"""Seconds of a step before and after a change, as it may be."""


@dataclass(frozen=True)
class MeasuredRun:
    """Hold what a run measured; without it a forecast is one of the plan's prediction.

    Args:
        step_s: seconds of a steady step, its wait for data in it.
        waits_s: seconds of it in which the device waited for data or for other ranks.
        inactive: techniques that were asked for and do nothing.
        unreached: as of `Observation`.
        lowest_step: the step after which the validation loss was lowest; 0 where it is not known.
        slack_s: seconds of it in which the host waited for the device.
        by_host: whether the device had run dry of launches, and the host was never ahead.
        stages: what ranks of a pipeline take for their passes; None without a pipeline.
        packing: what each way of making rows does to the run's text, where its shards are there.
    """

    step_s: float | None = None
    waits_s: float = 0.0
    inactive: tuple[str, ...] = ()
    slack_s: float = 0.0
    by_host: bool = False
    packing: PackingLedger | None = None
    unreached: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    lowest_step: int = 0
    stages: StageTimes | None = None

    @staticmethod
    def of(seen: Observation) -> "MeasuredRun":
        """Return the means of a run's steady steps, since a step's waits fall on few of them."""
        lowest = min(zip(seen.val_nats, seen.val_steps, strict=True), default=(0.0, 0))[1]
        if not seen.steps:
            return MeasuredRun(inactive=seen.inactive, unreached=seen.unreached, lowest_step=lowest)
        step_s = sum(seen.step_s) / seen.steps
        waits = [seen.share(seen.input_s) or 0.0, seen.share(seen.communication_s) or 0.0]
        slack = (seen.share(seen.slack_s) or 0.0) if seen.slack_s else nan
        return MeasuredRun(
            step_s,
            step_s * min(1.0, sum(waits)),
            seen.inactive,
            slack_s=step_s * slack if isfinite(slack) else 0.0,
            by_host=host_binds(seen) and (bool(seen.dry) or priced_idle(seen)),
            unreached=seen.unreached,
            lowest_step=lowest,
            stages=seen.stages,
        )


@dataclass(frozen=True)
class Forecast:
    """Hold a gain between its ends, and what it is from.

    Args:
        gain: time before over after, less 1; None where it is not forecast.
        source: what it is from. By the ledger 80% of gains lie between the ends; by a share nobody
            knows.
        unknown: why not, or what the forecast leaves out.
    """

    gain: Interval | None
    source: Source
    unknown: str = ""


def between(log_ratio: float, *others: float, moved: float = 0.0, widened: float = 1.0) -> Interval:
    """Return the gain of a ratio that the ledger gives, and the ends of 80%.

    Args:
        log_ratio: logarithm of the time of a step before over after.
        others: what it may be as well; the ends are around all of them.
        moved: see `moved`.
        widened: how far off the rates of a device may be that no forecast was compared on: the
            work that a change moves takes so many times as long, or as short.
    """
    every = (log_ratio, *others)
    share = ERROR.share + log(widened)
    halves = [ERROR.least + share * max(abs(one), moved) for one in every]
    low = min(one - half for one, half in zip(every, halves, strict=True))
    high = max(one + half for one, half in zip(every, halves, strict=True))
    return Interval(exp(low) - 1, exp(log_ratio) - 1, exp(high) - 1, ERROR.n)


def moved(before: Prediction, after: Prediction) -> float:
    """Return the work that a change adds and takes away, as a share of the device's.

    Where the device decides it is at least the logarithm of both steps' ratio.
    """
    names = before.time.work_s | after.time.work_s
    works = [[one.time.work_s.get(name, 0.0) for name in names] for one in (before, after)]
    steps = prod(map(sum, works))
    return sum(abs(a - b) for a, b in zip(*works, strict=True)) / sqrt(steps) if steps else 0.0


def by_ledger(
    before: Prediction, after: Prediction, measured: MeasuredRun, hosts: Hosts = HOSTS
) -> Forecast:
    """Return what the ledger says of a change on this run."""
    if before.time.step_s is None or after.time.step_s is None:
        return Forecast(None, "none", after.time.unknown or before.time.unknown)
    if before.rates.between_ranks or after.rates.between_ranks:  # receipts are of one device
        return Forecast(None, "none", after.time.no_interval)
    few = [one.time.no_interval is NoInterval.FEW for one in (before, after)]
    if few[0] != few[1]:  # in both it is no difference
        return Forecast(None, "none", NoInterval.FEW)
    if measured.step_s is None:
        return _of_a_plan(before, after)
    left_s = measured.step_s - measured.waits_s
    if measured.by_host and before.time.host_s:
        whole = (left_s - _edge_s(before)) / before.time.host_s
        if unlike := _unlike(whole, HOST_APART, "of what this run's host takes"):
            return unlike
        steps_s = _where_the_host_decides(before, after, left_s, hosts)
    else:
        # Launches that nobody waits for say nothing; a device that decides says how fast it is.
        known = not before.time.waits_for_launches or after.time.waits_for_launches
        scale = left_s / before.time.step_s if known else 1.0
        if unlike := _unlike(scale, APART, "of this run's step"):
            return unlike
        host_s = left_s - measured.slack_s
        steps_s = _where_the_device_decides(before, after, left_s, host_s, scale, hosts)
    waits_s = measured.waits_s
    ratios = [log((one_s + waits_s) / (other_s + waits_s)) for one_s, other_s in steps_s]
    work = moved(before, after) * left_s / measured.step_s
    gain = between(*ratios, moved=work, widened=_widened(before))
    return Forecast(gain, "ledger")


def _of_a_plan(before: Prediction, after: Prediction) -> Forecast:
    """Forecast a plan that nobody ran, on a host as it is predicted, and on a slow one."""
    hosts_s = before.time.host_s, after.time.host_s
    paces = (
        (1.0, 1.0),
        (SLOW_HOST, SLOW_HOST),
        (SLOW_HOST, _differing(*hosts_s, SLOW_HOST, 1.0)),
        (1.0, _differing(*hosts_s, 1.0, SLOW_HOST)),
    )
    ratios = [log(_paced(before, one) / _paced(after, other)) for one, other in paces]
    work = moved(before, after)
    return Forecast(between(*ratios, moved=work, widened=_widened(before)), "ledger")


def _widened(before: Prediction) -> float:
    """Return how far off the rates of the work that a change moves may be."""
    return ON_CPU if before.rates.basis == "on_cpu" else before.rates.widening.of_gains


def _where_the_host_decides(
    before: Prediction, after: Prediction, left_s: float, hosts: Hosts
) -> _Steps:
    """Return what both steps may take where the first waited for launches, the likeliest first."""
    host_s = left_s - _edge_s(before)
    quick = min(1.0, host_s / before.time.device_s)  # it was done when the host was
    launches_s = before.time.usual_launches_s, after.time.usual_launches_s
    whole = host_s / (HOST_S + launches_s[0])
    pace = (host_s - REST * HOST_S) / launches_s[0] if launches_s[0] > REST * HOST_S else 0.0
    pace, rest = (pace, REST) if pace > 0 else (whole, whole)
    paces = [(one * pace, one * pace, rest) for one in (1.0, hosts.drift, 1 / hosts.drift)]
    paces += [
        (pace, _differing(*launches_s, pace, one * pace), rest)
        for one in (hosts.spread, 1 / hosts.spread)
    ]
    paces += [(whole, whole, whole)]
    return [
        (_launched(before, one, quick, rest), _launched(after, other, quick, rest))
        for one, other, rest in paces
    ]


def _where_the_device_decides(
    before: Prediction, after: Prediction, left_s: float, host_s: float, scale: float, hosts: Hosts
) -> _Steps:
    """Return what both steps may take where the device decides the first, the likeliest first.

    Args:
        before: the prediction of the run's plan.
        after: the prediction of the changed plan.
        left_s: seconds of the measured step without waits.
        host_s: the part of them in which the host did not wait for the device.
        scale: how many times as long as predicted the device takes.
        hosts: how far paces of hosts lie from what is known of them.
    """
    # A host takes no longer than it ran ahead; of few launches that says nothing.
    launched_s, limit = before.time.usual_launches_s, hosts.spread
    if launched_s > FEW_S:
        limit = max(0.0, host_s - _edge_s(before) - REST * HOST_S) / launched_s
    slow = min(hosts.spread, hosts.drift * limit)
    launches_s = launched_s, after.time.usual_launches_s
    alike = before.time.waits_for_launches == after.time.waits_for_launches
    after_s = (
        scale * (after.time.step_s or 0.0)
        if alike
        else scale * after.time.device_s + _edge_s(after)
    )

    def steps(pace: float, other: float) -> tuple[float, float]:
        rest = min(REST, pace)
        first_s = left_s if pace <= limit else max(left_s, _launched(before, pace, 0.0, rest))
        return first_s, max(after_s, _launched(after, other, 0.0, rest))

    usual = min(1.0, limit)
    return [
        steps(usual, usual),
        steps(usual, usual / hosts.spread),
        steps(slow, slow),
        steps(slow, _differing(*launches_s, slow, 1 / hosts.spread)),
    ]


def _launched(one: Prediction, pace: float, device: float, rest: float) -> float:
    """Return the seconds of a step by how its launches, its device and the rest of its host run."""
    host_s = rest * min(HOST_S, one.time.host_s) + pace * one.time.usual_launches_s
    return max(device * one.time.device_s, host_s) + _edge_s(one)


def _paced(one: Prediction, pace: float) -> float:
    """Return the seconds of a step whose host takes so many times as long as predicted."""
    return max(one.time.device_s, pace * one.time.host_s) + _edge_s(one)


def _differing(first_s: float, second_s: float, pace: float, other: float) -> float:
    """Return the host's pace at the second plan, if what the first lacks is at another pace.

    Args:
        first_s: seconds of the host for the first plan.
        second_s: seconds of it for the second plan.
        pace: the pace at what both have.
        other: the pace at what one of them lacks.
    """
    least, most = sorted((first_s, second_s))
    return pace + (1 - least / max(most, SHORTEST_S)) * (other - pace)


def _edge_s(one: Prediction) -> float:
    """Return the seconds between two steps in which the device has nothing to do; 0 on a CPU."""
    return one.time.parts_s.get(EDGE, 0.0)


def _unlike(times: float, apart: float, what: str) -> Forecast | None:
    """Return that a prediction is no longer one of this run, where it is not."""
    if 1 / apart <= times <= apart:
        return None
    if times <= 0:
        return Forecast(None, "none", "the step is all waiting")
    off = f"{times:.1f} times too short" if times > 1 else f"{1 / times:.1f} times too long"
    return Forecast(None, "none", f"the prediction {what} is {off}")


def by_share(share: float, ledger: Forecast, *, left: float = 0.0) -> Forecast:
    """Forecast a remedy that takes away between half and all of a share of the step.

    Args:
        share: share of the step, or of the tokens in it: a step that does less is as good.
        ledger: what the change does to the rest of the step, where that is known.
        left: share of the step that stays at least: two that read take half as long, and not none.
    """
    if not 0 < share < 1:
        return Forecast(None, "none", "how much of the step it is was not measured")
    rest = 1.0 if ledger.gain is None else 1.0 + ledger.gain.value
    middle = (LEAST_TAKEN + MOST_TAKEN) / 2
    most = min(share, 1 - left)
    low, value, high = (rest / (1 - most * t) - 1 for t in (LEAST_TAKEN, middle, MOST_TAKEN))
    unknown = f"the rest of the step: {ledger.unknown}" if ledger.gain is None else ""
    return Forecast(Interval(low, value, high, 0), "share", unknown)
