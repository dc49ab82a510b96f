"""Name what binds a run's steps, by how busy each resource of its device is.

A step is shared out: waits that were measured (for data, for other ranks), matmuls and attention,
work that only moves bytes, and the rest, in which the device does nothing that the ledger knows.
The run's own work is priced by the machine's rates, measured by probes or assumed. The rest of a
step is its host's, unless the signals say that the host runs ahead. So no verdict names computation
where matmuls do not fill the step: a device that does 1% of what it could waits for launches, or
runs kernels that are too small, and the verdict says so.

Every threshold of this file stands at its top.
"""

from dataclasses import dataclass
from math import inf, isnan, log
from statistics import fmean, median
from typing import Any

from headrace.costs.work import EDGE_S
from headrace.doctor.findings import Confidence, Finding, Kind
from headrace.doctor.observation import Observation

INPUT_SHARE = 0.08
"""Share of a step spent waiting for the loader from which it is named. TraceML warns from 0.10, and
a step of which a loader takes a tenth more than it should must not slip below by noise."""
SLACK_SHARE = 0.02
"""Share of the median step in which the host waits for the device, below which the host is never
ahead. A mean would count one step in which another thread held the interpreter."""
DRY_SHARE = 0.5
"""Share of the steps, at whose beginning the device has nothing to do, from which the host is
behind. Where it was measured it decides: a device's queue holds some thousand launches, and the
host of a step with more of them waits inside of the step and never behind it."""
IDLE_SHARE = 0.05
"""Share of a step, in which the device does nothing, from which slow launches are priced by it."""
LEFT_SHARE = 0.15
"""Share of a step, in which its work by the rates leaves a device idle, from which the host is
behind where the signals do not say. A step of 1b in single rows on an H100 had a quarter left, and
gained 82% by compiling (LOG.md); the rates are some 10% off."""
HALF = 0.5
"""Share of a step that its work fills at least where the device is what binds it, by the rates; and
the slack above which no rate says that the host is behind."""
TOO_SLOW = 2.0
"""Times as long as the step that its work may take by the rates: beyond it they are not those of
this device as the run had it. The forecast of a gain ends at the same (doctor/forecast.py)."""
LEAST_PEAK = 0.05
"""Share of the device's peak below which no step is bound by its matmuls, whatever they take."""
SURE_PEAK = 0.25
"""Share of the peak from which a device is busy where nothing prices its work. Trained models reach
0.3 to 0.5 of it in steps without waits."""


@dataclass(frozen=True)
class Step:
    """Share out the median step of an observation.

    Args:
        usual_s: seconds of it.
        left_s: seconds without the waits for data and other ranks.
        computes, moves: shares of it by the rates, scaled down where they exceed what is left.
        idle: the share that is left over.
        times: how many times as long as its work what is left is; None without a prediction.
    """

    usual_s: float
    left_s: float
    computes: float = 0.0
    moves: float = 0.0
    idle: float = 0.0
    times: float | None = None

    @staticmethod
    def of(seen: Observation) -> "Step":
        """Share out the median step."""
        usual_s, use = median(seen.step_s), seen.use
        waits = (seen.share(seen.input_s) or 0.0, seen.share(seen.communication_s) or 0.0)
        left_s = usual_s * max(0.0, 1.0 - sum(waits))
        if use.computes_s is None or use.device_s is None or not usual_s:
            return Step(usual_s, left_s)
        fits = min(1.0, left_s / use.device_s) if use.device_s else 1.0
        computes, moves = (fits * part_s / usual_s for part_s in (use.computes_s, use.moves_s))
        idle = max(0.0, left_s / usual_s - computes - moves)
        times = left_s / use.device_s if use.device_s else inf
        return Step(usual_s, left_s, computes, moves, idle, times)


# --- the host --------------------------------------------------------------------------------


def lead(seen: Observation) -> bool | None:
    """Return whether the host of a GPU runs ahead of it; None where nothing says.

    A host that never waits for a device with work left at a step's end may be ahead of a full
    queue. Or it is behind all through both passes, and an optimizer of few long kernels is left.
    """
    slack = slack_share(seen)
    if seen.device != "cuda" or slack is None:
        return None
    if slack >= SLACK_SHARE:
        return True
    return None if seen.dry and fmean(seen.dry) < DRY_SHARE else False


def slack_share(seen: Observation) -> float | None:
    """Return the share of the median step in which the host waits for the device."""
    if not seen.slack_s or any(map(isnan, seen.slack_s)):
        return None
    pairs = zip(seen.slack_s, seen.step_s, strict=False)
    return median([slack_s / step_s for slack_s, step_s in pairs if step_s] or [0.0])


def host_binds(seen: Observation) -> bool:
    """Return whether the steps of a GPU wait for their host.

    The signals decide as long as the work could fill the step. Where it fills less than half, what
    is closer to its prediction does: a host that is ahead at the end of a step, by a slack that
    another thread of it may have made, keeps no device busy that has nothing to do.
    """
    if seen.device != "cuda" or not seen.steps:
        return False
    ahead, step = lead(seen), Step.of(seen)
    waits = (seen.share(seen.input_s) or 0.0) >= INPUT_SHARE
    if ahead is False and not waits:
        return True
    if step.times is None or step.idle < LEFT_SHARE:
        return False
    if ahead is None and seen.dry and not waits:
        return True
    if not priced_idle(seen):
        return False
    if ahead is None:
        return True
    pace = (step.left_s - EDGE_S) / seen.use.host_s if seen.use.host_s else inf
    closer = 0 < pace < inf and abs(log(pace)) < log(step.times)
    return closer and (slack_share(seen) or 0.0) < HALF


def priced_idle(seen: Observation) -> bool:
    """Return whether the work of a step fills less than half of it by the rates."""
    times = Step.of(seen).times if seen.steps else None
    return times is not None and HALF * times > 1


# --- the verdict -----------------------------------------------------------------------------


def binding(seen: Observation, busy: float | None = None) -> Finding:
    """Return the resource that binds the steps, or that nothing says which.

    Args:
        seen: an observation of at least one step.
        busy: share of a step in which kernels ran, by a trace.
    """
    step = Step.of(seen)
    if busy is None and (slow_host := host_is_behind(seen)) is not None:
        return slow_host
    if step.times is None:
        return _by_the_peak(seen)
    if step.times < 1 / TOO_SLOW:
        return _by_the_peak(seen, too_slow=True)
    if seen.device != "cuda" and step.idle > max(step.computes, step.moves):
        return _of_a_step(Kind.OPERATION_OVERHEAD, step.idle, seen, step)
    if seen.device == "cuda" and priced_idle(seen):
        filled = step.computes + step.moves
        return _of_a_step(Kind.SLOW_KERNELS, 1 - filled, seen, step, busy_share=busy)
    if step.moves > step.computes:
        return _of_a_step(Kind.MOVES_BYTES, step.moves, seen, step)
    peak = seen.use.peak
    if peak is not None and peak < LEAST_PEAK:
        return _of_a_step(Kind.SMALL_MATMULS, 1 - peak, seen, step)
    return _of_a_step(Kind.COMPUTES, step.computes, seen, step)


def host_is_behind(seen: Observation) -> Finding | None:
    """Return that a GPU waits for its host, with the share of a step in which it idles."""
    if not host_binds(seen):
        return None
    step = Step.of(seen)
    if step.idle >= IDLE_SHARE:
        return _of_a_step(Kind.GPU_IDLES, step.idle, seen, step)
    return _of_a_step(Kind.HOST_NEVER_AHEAD, 0.0, seen, step)


def _by_the_peak(seen: Observation, *, too_slow: bool = False) -> Finding:
    """Return what the share of the peak says where no time of the work is predicted."""
    use = seen.use
    facts = {
        "median_s": median(seen.step_s),
        "steps": seen.steps,
        "peak_share": use.peak,
        "device": seen.device,
    }
    if use.peak is not None and use.peak >= SURE_PEAK:
        return Finding(Kind.NEAR_THE_PEAK, use.peak, facts)
    if too_slow:
        facts |= {"rates": use.rates, "work_s": use.device_s or 0.0}
    else:
        facts["why"] = use.unknown
    return Finding(Kind.UNPRICED, 0.0, facts)


def _of_a_step(
    kind: Kind,
    share: float,
    seen: Observation,
    step: Step,
    confidence: Confidence = "inferred",
    **more: Any,
) -> Finding:
    """Return a finding with the numbers of every resource."""
    use, cuda = seen.use, seen.device == "cuda"
    facts: dict[str, Any] = {"device": seen.device, **more}
    if use.device_s is not None:
        facts |= {
            "work_s": use.device_s,
            "median_s": step.usual_s,
            "rates": use.rates,
            "computes_share": step.computes,
            "moves_share": step.moves,
            "times": step.times,
        }
        if use.host_s and cuda:
            facts["launches_s"] = use.host_s
    if use.peak is not None:
        facts["peak_share"] = use.peak
    if cuda and (slack := slack_share(seen)) is not None:
        facts["slack_share"] = slack
    if seen.dry:
        facts["dry_share"] = fmean(seen.dry)
    return Finding(kind, share, facts, confidence)
