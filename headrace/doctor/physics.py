"""What binds a run's steps, by how busy each resource of its device is.

A step is shared out: waits that were measured (for data, for other ranks), products and attention,
work that only moves bytes, and the rest, in which the device does nothing that the ledger knows.
The run's own work is priced by the machine's rates, measured by probes or assumed. The rest of a
step is its host's, unless the signals say that the host runs ahead. So no verdict names computation
where products do not fill the step: a device that does 1% of what it could waits for launches, or
runs kernels that are too small, and is said to.

Every threshold of this file stands at its top.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isnan, log
from statistics import fmean, median

from headrace.core.units import format_seconds
from headrace.costs.machine import PROBE
from headrace.costs.work import EDGE_S
from headrace.doctor.findings import ABSTAINED, Finding
from headrace.doctor.window import Window
from headrace.predict.foresight import Foresight

INPUT_SHARE = 0.08
"""Share of a step spent waiting for the loader from which it is named. TraceML warns from 0.10, and
a step of which a loader takes a tenth more than it should must not slip below by noise."""
SLACK_SHARE = 0.02
"""Share of the median step in which the host waits for the device, below which the host is never
ahead. A mean would count one step in which another thread held the interpreter."""
DRY_SHARE = 0.5
"""Share of the steps, at whose beginning the device has nothing to do, from which the host is late.
Where it was read it decides: a device's queue holds some thousand launches, and the host of a step
with more of them waits inside of the step and never behind it."""
IDLE_SHARE = 0.05
"""Share of a step, in which the device does nothing, from which late launches are priced by it."""
LEFT_SHARE = 0.15
"""Share of a step, in which its work by the rates leaves a device idle, from which the host is late
where the signals do not tell. A step of 1b in single rows on an H100 had a quarter left, and gained
82% by compiling (LOG.md); the rates are some 10% off."""
HALF = 0.5
"""Share of a step that its work fills at least where the device is what binds it, by the rates; and
the slack above which no rate says that the host is late."""
TOO_SLOW = 2.0
"""Times as long as the step that its work may take by the rates: beyond it they are not those of
this device as the run had it. The forecast of a gain ends at the same (doctor/forecast.py)."""
LEAST_PEAK = 0.05
"""Share of the device's peak below which no step is bound by its products, whatever they take."""
SURE_PEAK = 0.25
"""Share of the peak from which a device is busy where nothing prices its work. Trained models reach
0.3 to 0.5 of it in steps without waits."""
COMPUTES, OTHER = ("product", "attention"), ("collective", "wait", "host")
"""Kinds of work that compute, and that neither compute nor move bytes: what other ranks take, and
what Python does between operations on a CPU."""
UNREAD = "kernels: which of them take the time is told by a trace"


@dataclass(frozen=True)
class Use:
    """What the work of one step takes of a device, by its rates.

    Args:
        computes_s: seconds of products and attention; None where no time is predicted.
        moves_s: seconds of work that only moves bytes, the update included.
        host_s: seconds that the host takes to launch all of it, and does besides.
        peak: share of the device's peak FLOPs at the run's precision; None where it is not known.
        rates: where the rates are from, in words.
        unknown: why no time is predicted.
    """

    computes_s: float | None = None
    moves_s: float = 0.0
    host_s: float = 0.0
    peak: float | None = None
    rates: str = ""
    unknown: str = "no plan is known of this loop"

    @staticmethod
    def of(seen: Foresight, peak: float | None = None) -> "Use":
        """Read it from the prediction of a run's own plan.

        Args:
            seen: the prediction.
            peak: share of the device's peak that the run reached.
        """
        if seen.step_s is None:
            return Use(peak=peak, unknown=seen.unknown)
        works: Mapping[str, float] = seen.work_s
        kinds = {name: name.partition(",")[0] for name in works}
        computes_s = sum(works[name] for name, kind in kinds.items() if kind in COMPUTES)
        other_s = sum(works[name] for name, kind in kinds.items() if kind in OTHER)
        words = {"probes": "measured by probes", "datasheet": "assumed from its datasheet"}
        return Use(
            computes_s, sum(works.values()) - computes_s - other_s, seen.host_s, peak,
            f"rates of {seen.device} {words.get(seen.rates, seen.rates)}", "",
        )  # fmt: skip

    @property
    def device_s(self) -> float | None:
        """Seconds of all work on the device."""
        return None if self.computes_s is None else self.computes_s + self.moves_s


UNKNOWN = Use()
"""The use of a device by a loop of which nothing is known."""


@dataclass(frozen=True)
class Step:
    """The median step of a window, shared out.

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
    def of(window: Window, use: Use) -> "Step":
        """Share out the median step of a window."""
        usual_s = median(window.step_s)
        waits = (window.share(window.input_s) or 0.0, window.share(window.communication_s) or 0.0)
        left_s = usual_s * max(0.0, 1.0 - sum(waits))
        if use.computes_s is None or use.device_s is None or not usual_s:
            return Step(usual_s, left_s)
        fits = min(1.0, left_s / use.device_s) if use.device_s else 1.0
        computes, moves = (fits * part_s / usual_s for part_s in (use.computes_s, use.moves_s))
        idle = max(0.0, left_s / usual_s - computes - moves)
        times = left_s / use.device_s if use.device_s else inf
        return Step(usual_s, left_s, computes, moves, idle, times)


# --- the host --------------------------------------------------------------------------------


def lead(window: Window) -> bool | None:
    """Return whether the host of a GPU runs ahead of it; None where nothing tells.

    A host that never waits for a device with work left at a step's end may be ahead of a full
    queue. Or it is late all through both passes, and an optimizer of few long kernels is left.
    """
    slack = slack_share(window)
    if window.device != "cuda" or slack is None:
        return None
    if slack >= SLACK_SHARE:
        return True
    return None if window.dry and fmean(window.dry) < DRY_SHARE else False


def slack_share(window: Window) -> float | None:
    """Return the share of the median step in which the host waits for the device."""
    if not window.slack_s or any(map(isnan, window.slack_s)):
        return None
    pairs = zip(window.slack_s, window.step_s, strict=False)
    return median([slack_s / step_s for slack_s, step_s in pairs if step_s] or [0.0])


def host_binds(window: Window, use: Use) -> bool:
    """Return whether the steps of a GPU wait for their host.

    The signals decide as long as the work could fill the step. Where it fills less than half, what
    is closer to its prediction does: a host that is ahead at the end of a step, by a slack that
    another thread of it may have made, keeps no device busy that has nothing to do.
    """
    if window.device != "cuda" or not window.steps:
        return False
    ahead, step = lead(window), Step.of(window, use)
    waits = (window.share(window.input_s) or 0.0) >= INPUT_SHARE
    if ahead is False and not waits:
        return True
    if step.times is None or step.idle < LEFT_SHARE:
        return False
    if ahead is None and window.dry and not waits:
        return True
    if not priced_idle(window, use):
        return False
    if ahead is None:
        return True
    pace = (step.left_s - EDGE_S) / use.host_s if use.host_s else inf
    closer = 0 < pace < inf and abs(log(pace)) < log(step.times)
    return closer and (slack_share(window) or 0.0) < HALF


def priced_idle(window: Window, use: Use) -> bool:
    """Return whether the work of a step fills less than half of it by the rates."""
    times = Step.of(window, use).times if window.steps else None
    return times is not None and HALF * times > 1


# --- the verdict -----------------------------------------------------------------------------


def binding(window: Window, use: Use, busy: float | None = None) -> Finding:
    """Return the resource that binds the steps of a window, or that nothing tells.

    Args:
        window: at least one step.
        use: what their work takes.
        busy: share of a step in which kernels ran, by a trace.
    """
    step = Step.of(window, use)
    if busy is None and (late := late_launches(window, use)) is not None:
        return late
    if step.times is None:
        return _by_the_peak(window, use)
    if step.times < 1 / TOO_SLOW:
        return _by_the_peak(window, replace(use, unknown=_too_slow(use, step)))
    if window.device != "cuda" and step.idle > max(step.computes, step.moves):
        return Finding(
            "launch", step.idle,
            f"Operation overhead: the {_name(window)} computes nothing in {step.idle:.0%} of the "
            "step.", _evidence(window, use, step), "inferred", UNREAD,
        )  # fmt: skip
    if window.device == "cuda" and priced_idle(window, use):
        return _slow_kernels(window, use, step, busy)
    if step.moves > step.computes:
        return Finding(
            "memory bandwidth", step.moves,
            f"Memory bandwidth: work that only moves bytes takes {step.moves:.0%} of the step.",
            _evidence(window, use, step), "inferred", UNREAD,
        )  # fmt: skip
    return _computation(window, use, step)


def late_launches(window: Window, use: Use) -> Finding | None:
    """Return that a GPU waits for its host, with the share of a step in which it idles."""
    if not host_binds(window, use):
        return None
    step = Step.of(window, use)
    evidence = _evidence(window, use, step)
    if step.idle >= IDLE_SHARE:
        said = f"Launch overhead: the GPU idles {step.idle:.0%} of the step."
        return Finding("launch", step.idle, said, evidence, "inferred")
    return Finding(
        "launch", 0.0, "The host is never ahead of the device, which may wait for it.", evidence,
        "inferred", "how long the device idles: a trace tells",
    )  # fmt: skip


def _computation(window: Window, use: Use, step: Step) -> Finding:
    """Return that products fill the step, if they come near what the device could do."""
    evidence = _evidence(window, use, step)
    if use.peak is not None and use.peak < LEAST_PEAK:
        said = f"Products are too small for the device: it reaches {use.peak:.1%} of its peak."
        return Finding("kernel efficiency", 1 - use.peak, said, evidence, "inferred", UNREAD)
    return Finding(
        "computation", step.computes,
        f"Computation: matrix products and attention take {step.computes:.0%} of the step.",
        evidence, "inferred", UNREAD,
    )  # fmt: skip


def _slow_kernels(window: Window, use: Use, step: Step, busy: float | None) -> Finding:
    """Return that the device is busy with work that should take less than half of the step."""
    filled = step.computes + step.moves
    why = "the host is ahead of it" if busy is None else f"a trace saw it busy for {busy:.0%}"
    return Finding(
        "kernel efficiency", 1 - filled,
        f"Kernels take {step.times:.1f} times as long as the device's rates say.",
        f"{why}; {_evidence(window, use, step)}", "inferred", UNREAD,
    )  # fmt: skip


def _by_the_peak(window: Window, use: Use) -> Finding:
    """Return what the share of the peak tells where no time of the work is predicted."""
    evidence = f"median step {format_seconds(median(window.step_s))} over {window.steps} steps"
    if use.peak is not None and use.peak >= SURE_PEAK:
        said = f"Computation: the device works at {use.peak:.0%} of its peak."
        return Finding("computation", use.peak, said, evidence, "measured", UNREAD)
    reached = "" if use.peak is None else f"; {use.peak:.1%} of the device's peak"
    traced = "; a trace tells" if window.device == "cuda" else ""
    return Finding(
        ABSTAINED, 0.0, "What binds the steps is not known yet.", f"{evidence}{reached}",
        "measured", f"how busy the {_name(window)} is ({use.unknown}{traced})",
    )  # fmt: skip


def _too_slow(use: Use, step: Step) -> str:
    """Return that a step takes far less than its work does by the rates."""
    return (
        f"by {use.rates} its work takes {format_seconds(use.device_s or 0.0)}, and the step took "
        f"{format_seconds(step.usual_s)}: the rates are of another device, or were measured while "
        f"this one was busy; `{PROBE}` on a quiet machine measures them again"
    )


def _name(window: Window) -> str:
    return {"cuda": "GPU", "cpu": "CPU"}.get(window.device, "device")


def _evidence(window: Window, use: Use, step: Step) -> str:
    """Return the numbers of every resource, in one line."""
    told = []
    if use.device_s is not None:
        told += [
            f"its work takes {format_seconds(use.device_s)} of a step of "
            f"{format_seconds(step.usual_s)} by {use.rates}: products and attention "
            f"{step.computes:.1%}, moving bytes {step.moves:.1%}"
        ]
        if use.host_s and window.device == "cuda":
            told.append(f"launching it takes {format_seconds(use.host_s)} by the same")
    if use.peak is not None:
        told.append(f"{use.peak:.1%} of the device's peak")
    if window.device == "cuda" and (slack := slack_share(window)) is not None:
        told.append(f"the host waited for the device in {slack:.1%} of a step")
    if window.dry:
        dry = fmean(window.dry)
        told.append(f"{dry:.0%} of the steps began when the device had nothing left to do")
    return "; ".join(told)
