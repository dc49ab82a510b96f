"""Predict what a run would be: whether it fits, where its step would go, how long and how much.

Memory and time come from the same ledger, which every technique edits. The planner knows no
technique by name. Time needs a machine's rates, which are measured by probes or assumed from a
datasheet, and the prediction says which. Where a technique does not say yet what it does to a
step's time, no time is predicted: a number that leaves a part out would look like a prediction.

A plan fits when its tensors, replayed through the allocator's rules, need less than all of the
memory. Times on the GPU that steps were measured on carry intervals. These hold 80% of what was
measured so far, by what the prediction rests on. On other GPUs the intervals are wider, and say by
how much and why. Measured steps of one plan (`calibrated`, or `after` a run) correct the prediction
of others.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from headrace.assemble.build import make_ledger, make_ledgers
from headrace.assemble.context import check_supported, precision_of
from headrace.core.command import rerun_without
from headrace.core.errors import UnsupportedError
from headrace.costs.constants import number
from headrace.costs.footprint import Footprint, make_footprint
from headrace.costs.host import UNPROBED
from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.machine import Machine
from headrace.costs.step import StepTime
from headrace.inference.load import read_recorded_plan, resolve_run
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context
from headrace.predict import ranks
from headrace.predict.calibration import Calibration, MeasuredPlan, check_device
from headrace.predict.ending import Curve, ending
from headrace.predict.failures import Failures, failures_of
from headrace.predict.intervals import (
    EXACT,
    STEP,
    Basis,
    Between,
    Tier,
    Widening,
    step_between,
    widening,
    workload,
)

TIGHT = number("tight_share")
PART_NAMES = {
    "product": "matrix products",
    "attention": "attention",
    "stream": "memory traffic",
    "host link": "the host link",
    "collective": "exposed communication",
    "network": "exposed communication between hosts",
    "wait": "waiting for other ranks' layers",
    "host": "Python between operations",
}
"""Kind of work -> the part of a step that its seconds are shown as."""
LAUNCHES, DATA, EDGE = "waiting for launches", "waiting for data", "the pause between steps"
IDLE = (LAUNCHES, DATA, EDGE, PART_NAMES["wait"])
"""Parts of a step in which the device does nothing."""


class NoInterval(StrEnum):
    """Name why a step's time has no interval; the values are what a reader is shown."""

    RANKS = (
        "no step of several GPUs was measured here, so how far off it is is not known: what is "
        "sent is counted, and how fast, and what hides it, is not"
    )
    LAUNCHED = (
        "it waits for launches, and so few such steps were measured that its error is not known"
    )
    FP32 = "of fp32 two models were measured, by which its rates are set: of others it is not known"
    ON_CPU = "no prediction was compared with measured steps of a CPU yet"
    FEW = "too few steps of its kind were measured, or none, to know how far off it is"


@dataclass(frozen=True)
class RatesUsed:
    """Name what a prediction rests on.

    Args:
        device: name of the device.
        source: where the device's rates are from, "datasheet" or "probes".
        says: what is assumed, or how the rates were measured.
        between_ranks: where numbers of several ranks are from; "" for one rank.
        calibrated_by: name of the plan whose measured steps corrected the prediction; "" without.
        tier: what the prediction was given: a datasheet, probes, or measured steps.
        basis: what the widths of its intervals rest on.
        widening: how much wider its intervals are than on the device that steps were compared on,
            and why.
    """

    device: str
    source: str
    says: str
    between_ranks: str = ""
    calibrated_by: str = ""
    tier: Tier = "no_gpu"
    basis: Basis = "no_gpu"
    widening: Widening = EXACT


@dataclass(frozen=True)
class MemoryPrediction:
    """Hold what a plan is predicted to need of a device's memory, in bytes.

    Args:
        peak_bytes: bytes that are allocated at most.
        peak_at: the instant of a step at which they are.
        owners: bytes of the lines at that instant, summed over layers, the largest first, and of
            libraries.
        instants: bytes that are allocated at each instant of a step.
        capacity_bytes: the device's memory without what the driver and communicators hold.
        fits: "yes", "tight" or "no".
        reserved_bytes: bytes that torch's allocator reserves at most; None where the device is no
            GPU.
        context_bytes: bytes that the driver and libraries hold beside `capacity_bytes`.
        buffers_bytes: bytes that communication between ranks holds beside it.
        stages_bytes: peak of tensors of a rank of each stage of a pipeline; one without stages.
    """

    peak_bytes: float
    peak_at: str
    owners: dict[str, float]
    instants: dict[str, float]
    capacity_bytes: float
    fits: str
    reserved_bytes: float | None = None
    context_bytes: float = 0.0
    buffers_bytes: float = 0.0
    stages_bytes: tuple[float, ...] = ()


@dataclass(frozen=True)
class TimePrediction:
    """Hold how long a steady step of a plan is predicted to take, in seconds.

    Args:
        step_s: seconds of a step; None where no time is predicted.
        tokens_per_s: tokens a second; None where no time is predicted.
        parts_s: part -> its seconds. The parts make up the whole step: kinds of work, the update
            apart, and what the device waits for.
        work_s: kind of work -> seconds that the device works on it; recomputation and the update
            are apart.
        host_s: seconds that the host takes to launch the step and for what else it does; 0 without
            a time.
        usual_launches_s: seconds that hosts took for the launches of such steps in runs.
        step_between: the 80% interval of `step_s`; None where there is none.
        rate_between: the 80% interval of `tokens_per_s`; None where there is none.
        unknown: why no time is predicted; "" where one is.
        no_interval: why the step's time has no interval; "" where it has one.
    """

    step_s: float | None
    tokens_per_s: float | None
    parts_s: dict[str, float] = field(default_factory=dict)
    work_s: dict[str, float] = field(default_factory=dict)
    host_s: float = 0.0
    usual_launches_s: float = 0.0
    step_between: Between | None = None
    rate_between: Between | None = None
    unknown: str = ""
    no_interval: NoInterval | Literal[""] = ""

    @property
    def waits_for_launches(self) -> bool:
        """Return whether the host is predicted to be slower than the device."""
        return LAUNCHES in self.parts_s

    @property
    def device_s(self) -> float:
        """Return the seconds of a step that the device computes or sends; 0 without a time."""
        idle = (LAUNCHES, DATA, EDGE)
        return sum(spent_s for name, spent_s in self.parts_s.items() if name not in idle)

    def shares(self) -> dict[str, float]:
        """Return the share of a step that each part takes, the largest first."""
        return {
            name: spent_s / self.step_s for name, spent_s in self.parts_s.items() if self.step_s
        }


@dataclass(frozen=True)
class RunPrediction:
    """Hold when a run is predicted to end, and what it costs until then.

    Hours and dollars leave out compiling, evaluation and checkpoints, unless they come from the
    clock of a run. They count what failures are expected to take.

    Args:
        until: what ends the run, in words.
        steps: number of steps that fit until then; None where unavailable.
        hours: hours until then; None where unavailable.
        dollars: price of those hours in dollars; None where no price is given.
        hours_between: the 80% interval of `hours`; None where there is none.
        dollars_between: the 80% interval of `dollars`; None where there is none.
        failures: what failures take of those hours; None where none is expected.
    """

    until: str = ""
    steps: int | None = None
    hours: float | None = None
    dollars: float | None = None
    hours_between: Between | None = None
    dollars_between: Between | None = None
    failures: Failures | None = None


@dataclass(frozen=True)
class Prediction:
    """Hold what a plan is predicted to need and to take on a machine."""

    rates: RatesUsed
    memory: MemoryPrediction
    time: TimePrediction
    run: RunPrediction

    def to_dict(self) -> dict[str, Any]:
        """Return every number as JSON values, in one table."""
        table = asdict(self)
        rates, time, run = table["rates"], table["time"], table["run"]
        rates |= {"rates": rates.pop("source"), "rates_say": rates.pop("says")}
        intervals = {
            "step_s": time.pop("step_between"),
            "tokens_per_s": time.pop("rate_between"),
            "hours": run.pop("hours_between"),
            "dollars": run.pop("dollars_between"),
        }
        del time["usual_launches_s"]  # the doctor's alone
        failures = self.run.failures
        run["failures"] = None if failures is None else failures.to_dict()
        between = {name: ends for name, ends in intervals.items() if ends is not None}
        return {**rates, **table["memory"], **time, **run, "between": between}


def _footprint(each: list[Ledger], context: Context) -> Footprint:
    """Return the memory of the rank that needs most, on the device where it runs."""
    most = max(each, key=lambda one: one.peak()[1])
    return make_footprint(most, context.device, context.precision, context.capability)


def predict(
    plan: Plan,
    context: Context,
    machine: Machine,
    calibration: Calibration | None = None,
    curve: Curve | None = None,
) -> Prediction:
    """Return what a plan would need and take on a machine.

    Args:
        plan: the plan of the run.
        context: where it would run.
        machine: the rates of the device there.
        calibration: correction by measured steps of one plan there; None without.
        curve: validations of a run that learned as this one would; None without.

    Raises:
        ConfigError, UnsupportedError: a technique cannot run there, or two clash.
    """
    check_supported(list(plan.techniques.values()), context)
    machine = machine.joined(plan.hardware.network_gb_per_s)
    each = make_ledgers(plan, context)
    footprint = _footprint(each, context)
    memory = _memory(footprint, machine, on_gpu=context.device == "cuda")
    memory = replace(memory, stages_bytes=tuple(one.peak()[1] for one in each))
    time, unknown = _time(plan, context, each, machine)
    tier: Tier = "after_probes" if machine.source == "probes" else "no_gpu"
    basis: Basis = "on_cpu" if context.device == "cpu" else tier
    step_s, set_by = None if time is None else time.step_s, ""
    if calibration is not None and time is not None and calibration.applies_to(time):
        step_s, time = calibration.step_s(time), calibration.applied(time)
        set_by = calibration.plan
        if calibration.applies_to(time):  # else the device's rates decide now, and not these steps
            tier = "after_20_steps"
            alike = calibration.workload == workload(plan, context, footprint.ledger)
            same: Basis = "same_workload" if alike else tier
            basis = basis if context.device == "cpu" else same
    no_interval = "" if time is None else _no_interval(context, footprint.ledger, time)
    wider = widening(machine, basis)
    ends = None if no_interval or step_s is None else step_between(step_s, basis, wider.times)
    rates = RatesUsed(
        device=machine.name,
        source=machine.source,
        says=machine.says,
        between_ranks=""
        if context.device != "cuda"
        else ranks.format_sources(plan.mesh.ranks, machine, memory.buffers_bytes),
        calibrated_by=set_by,
        tier=tier,
        basis=basis,
        widening=wider,
    )
    taken = TimePrediction(None, None, unknown=unknown)
    if time is not None and step_s is not None:
        taken = _taken(plan, time, step_s, ends, no_interval)
    run = _run(plan, step_s, ends, curve, on_gpu=context.device == "cuda")
    return Prediction(rates, memory, taken, run)


def _taken(
    plan: Plan,
    time: StepTime,
    step_s: float,
    ends: Between | None,
    no_interval: NoInterval | Literal[""],
) -> TimePrediction:
    """Return the prediction of a step that takes `step_s`, between its `ends`."""
    tokens = plan.batch.tokens
    return TimePrediction(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        parts_s=_parts(time, step_s),
        work_s=time.work_s,
        host_s=time.host_s,
        usual_launches_s=time.usual_launches_s,
        step_between=ends,
        rate_between=ends and Between(tokens / ends.high, tokens / ends.low),
        no_interval=no_interval,
    )


def _memory(footprint: Footprint, machine: Machine, *, on_gpu: bool) -> MemoryPrediction:
    """Return what a plan needs of the memory of a machine."""
    ledger, beside = footprint.ledger, sum(footprint.beside.values())
    buffers = ranks.buffers_bytes(ledger) if on_gpu else 0
    capacity = machine.memory_bytes - machine.context_bytes - buffers
    instant, peak_bytes = ledger.peak()
    fits, reserved = _room(footprint, capacity)
    return MemoryPrediction(
        peak_bytes=peak_bytes + beside,
        peak_at=instant,
        owners=dict(ledger.owners()) | footprint.beside,
        instants={name: bytes + beside for name, bytes in ledger.instants().items()},
        capacity_bytes=capacity,
        fits=fits,
        reserved_bytes=reserved,
        context_bytes=machine.context_bytes,
        buffers_bytes=buffers,
    )


def _run(
    plan: Plan,
    step_s: float | None,
    ends: Between | None,
    curve: Curve | None,
    *,
    on_gpu: bool,
) -> RunPrediction:
    """Return when a run ends by the time of its steps, and what it costs until then."""
    until, hours, between = ending(plan, step_s, ends, curve)
    price, failures = plan.hardware.dollars_per_hour, None
    if step_s is not None and hours is not None:
        failures = failures_of(plan, step_s, 3600 * hours, on_gpu=on_gpu)
    if failures is not None and not failures.goodput:  # it fails sooner than it saves
        return RunPrediction(until, failures=failures)
    if failures is not None and step_s is not None:  # a step takes its share of what is lost
        step_s /= failures.goodput
        ends = ends and failures.lengthened(ends)
        until, hours, between = ending(plan, step_s, ends, curve)
    if hours is None:
        return RunPrediction(until, hours_between=between)
    steps = None if step_s is None else int(3600 * hours / step_s + 1e-6)
    dollars_between = None
    if price is not None:
        dollars_between = between and Between(price * between.low, price * between.high)
    dollars = None if price is None else hours * price
    return RunPrediction(until, steps, hours, dollars, between, dollars_between, failures)


def calibrated(
    plan: Plan, context: Context, machine: Machine, measured: MeasuredPlan
) -> Calibration:
    """Return the calibration by which a machine's model meets the measured steps of a plan.

    Raises:
        ConfigError: measured and predicted time are too far apart to be of one plan and device.
        UnsupportedError: no time of the plan is predicted, or it has several ranks.
    """
    ledger = make_ledger(plan, context)
    time, unknown = _time(plan, context, [ledger], machine)
    if plan.mesh.ranks > 1:
        time, unknown = None, "its steps are those of several ranks"
    if time is None:
        raise UnsupportedError(
            f"{plan.name} cannot calibrate other plans: its own time is not predicted: {unknown}",
            rerun_without("--after", verb="plan demo"),
        )
    correction = Calibration.of(time, measured, plan.name)
    return replace(correction, workload=workload(plan, context, ledger))


def after(folder: Path, catalogue: Catalogue, context: Context, machine: Machine) -> Calibration:
    """Return the calibration by the measured steps of a run.

    It reads the run's report.json or metrics.jsonl, its plan, and the device that it ran on.

    Args:
        folder: the run's folder, as runs/NAME, measured on this machine.
        catalogue: the techniques that exist.
        context: context of any plan on this machine; the run's own plan takes the place of that
            plan.
        machine: the rates of this machine.

    Raises:
        ConfigError: it is no run with steady steps, or was measured on another device.
        UnsupportedError: no time of its plan is predicted.
    """
    folder = resolve_run(folder)
    check_device(folder, context.device, context.device_name)
    plan = read_recorded_plan(folder, catalogue)
    return calibrated(plan, at(context, plan), machine, MeasuredPlan.of_run(folder))


def at(context: Context, plan: Plan) -> Context:
    """Return the context of another plan at the same place."""
    precision = precision_of(plan, context.capability)
    return replace(context, plan=plan, ranks=plan.mesh.ranks, precision=precision)


def _room(footprint: Footprint, left: float) -> tuple[str, float | None]:
    """Return whether a plan fits, and the most bytes that the allocator would reserve.

    The plan fits where its tensors find room in `TIGHT` of what is left, though the allocator may
    have to give back free memory on the way. It does not fit where the tensors need more than is
    left. The bytes are None where they are unavailable.

    Args:
        footprint: what the plan needs.
        left: bytes of the device's memory that are left for the plan.
    """
    allocated, unlimited = footprint.ledger.peak()[1] + footprint.workspace, footprint.free
    if unlimited is None:
        fits = "no" if allocated > left else "tight" if allocated > TIGHT * left else "yes"
        return fits, None
    if allocated > left:
        return "no", unlimited.bytes
    if unlimited.bytes <= TIGHT * left:
        return "yes", unlimited.bytes
    fits = "yes" if allocated <= TIGHT * left and footprint.replayed(TIGHT * left).fits else "tight"
    return fits, footprint.replayed(left).bytes if unlimited.bytes > left else unlimited.bytes


def _time(
    plan: Plan, context: Context, each: Sequence[Ledger], machine: Machine
) -> tuple[StepTime | None, str]:
    """Return the time of a step, or None and why there is none."""
    if context.device not in ("cuda", "cpu"):
        return None, f"time is modelled on a GPU of NVIDIA and on a CPU, not on {context.device}"
    if context.device == "cpu" and machine.source != "probes":
        return None, UNPROBED
    if plan.vision is not None:
        return None, "the time of convolutions is not modelled: no machine's rates are probed"
    silent = [name for name, technique in plan.techniques.items() if not technique.timed]
    if silent:
        return None, f"{', '.join(silent)} does not say yet what it does to a step's time"
    try:
        return ranks.slowest(each, machine), ""
    except UnsupportedError as error:
        return None, f"{error.message}; try: {error.remedy}" if error.remedy else error.message


def _no_interval(context: Context, ledger: Ledger, time: StepTime) -> NoInterval | Literal[""]:
    """Return why a time has no interval; "" where it has one."""
    if ledger.sizes["world_ranks"] > 1:
        return NoInterval.RANKS
    if ledger.sizes.get(DERIVED):
        return NoInterval.FEW
    if context.device == "cpu":
        if "on_cpu" not in STEP:
            return NoInterval.ON_CPU
        return NoInterval.FEW if context.precision != "fp32" else ""
    if context.precision == "fp32":
        return NoInterval.FP32
    return NoInterval.LAUNCHED if time.by_host else ""


def _parts(time: StepTime, step_s: float) -> dict[str, float]:
    """Return the seconds of each part of a step, the largest first.

    The parts are kinds of work, with the update and waits on their own. What the step takes beyond
    the model's own time is the measured data wait.
    """
    launches_s = max(0.0, time.host_s - sum(time.device_s.values()))
    waits = {LAUNCHES: launches_s, DATA: step_s - time.step_s}
    sent_s = time.device_s.get(("optimizer", "collective"), 0.0)
    part_seconds = {"the update": time.of("optimizer") - sent_s}
    waits[EDGE] = time.edge_s
    part_seconds |= {name: spent_s for name, spent_s in waits.items() if spent_s > 0}
    for (phase, kind), spent_s in time.device_s.items():
        if phase != "optimizer" or kind == "collective":
            part_seconds[PART_NAMES[kind]] = part_seconds.get(PART_NAMES[kind], 0.0) + spent_s
    return dict(sorted(part_seconds.items(), key=lambda item: -item[1]))
