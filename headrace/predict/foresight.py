"""What a run would be: whether it fits, where its step would go, how long and how much.

Memory and time come of the same ledger, which every technique edits; the planner knows none of them
by name. Time needs a machine's rates, measured by probes or assumed from a datasheet, and says
which. Where a technique does not say yet what it does to a step's time, no time is predicted: a
number that leaves a part out would look like one.

A plan fits when its tensors, replayed through the allocator's rules, find room in less than all of
the memory. Times on the GPU that steps were measured on carry intervals that hold 80% of what was
measured so far, by what they rest on; on others these are wider, and say by how much and why.
Steps of one plan that were measured (`calibrated`, or `after` a run) move the prediction of others.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.assemble.build import predict, predict_each
from headrace.assemble.context import check_supported, precision_of
from headrace.core.command import again_without
from headrace.core.errors import UnsupportedError
from headrace.core.units import format_bytes, format_count, format_seconds
from headrace.costs.host import UNPROBED
from headrace.costs.ledger import DERIVED, WORDS, Ledger
from headrace.costs.machine import Machine
from headrace.costs.reserved import Footprint, as_held
from headrace.costs.work import StepTime
from headrace.inference.load import read_recorded_plan, resolve_run
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context
from headrace.predict import ranks
from headrace.predict.calibration import Calibration, Measured, check_device
from headrace.predict.ending import Curve, ending
from headrace.predict.intervals import (
    EXACT,
    STEP,
    Basis,
    Between,
    Tier,
    Widening,
    widening,
    workload,
)

TIGHT = 0.93
"""Of the memory that is left beside the driver's: above it, pieces that nothing fits may decide."""
KINDS = {"product": "matrix products", "attention": "attention", "stream": "memory traffic",
         "host link": "the host link", "collective": "exposed communication",
         "wait": "waiting for other ranks' layers",
         "host": "Python between operations"}  # fmt: skip
LAUNCHES, DATA, EDGE = "waiting for launches", "waiting for data", "the pause between steps"
LAUNCHED = "it waits for launches, and so few such steps were measured that its error is not known"
FP32 = "of fp32 two models were measured, by which its rates are set: of others it is not known"
ON_CPU = "no prediction was compared with measured steps of a CPU yet"
FEW = "too few steps of its kind were measured, or none, to know how far off it is"
IDLE = (LAUNCHES, DATA, EDGE, KINDS["wait"])
"""Parts of a step in which the device does nothing."""


@dataclass(frozen=True)
class Foresight:
    """A plan's prediction.

    Args:
        device: on which.
        rates: "datasheet" or "probes": where the machine's rates are from.
        rates_say: what is assumed, or how they were measured.
        peak_bytes, peak_at: allocated, and when in a step.
        owners: the lines held then, summed over layers, the largest first, and the libraries'.
        capacity_bytes: the device's memory without what the driver and libraries hold.
        fits: "yes", "tight" or "no".
        step_s: seconds of a steady step; None where it is not predicted.
        parts_s: all of it, by kind of work, the update apart, and what the device waits for.
        tokens_per_s: None likewise.
        hours, dollars: to the goal, without compiling, evaluation and checkpoints, or with them
            by a run's clock; None where no budget of the goal tells.
        unknown: why no time is predicted.
        instants: allocated at each instant of a step.
        reserved_bytes: at most, by the allocator; None where it is no GPU's.
        tier, basis: what the time rests on, and what its intervals do.
        between: 80% intervals of step_s, tokens_per_s, hours and dollars where there are any.
        no_interval: why the step's time has none.
        widening: how much wider intervals are than those of steps that were compared, and why.
        until: what ends the run, in words.
        steps: that fit until then, as `hours` counts them; None where that is not known.
        context_bytes: what the driver and libraries hold beside `capacity_bytes`.
        buffers_bytes: likewise what communication between ranks holds.
        between_ranks: where numbers of several ranks are from; "" for one.
        calibrated_by: the plan whose measured steps moved the prediction; "" without.
        host_s: of a step, what the host takes to launch it and does besides; 0 without a time.
        work_s: what the device works in a step, by kind; what it does again, and the update, apart.
    """

    device: str
    rates: str
    rates_say: str
    peak_bytes: float
    peak_at: str
    owners: dict[str, float]
    capacity_bytes: float
    fits: str
    step_s: float | None
    parts_s: dict[str, float]
    tokens_per_s: float | None
    hours: float | None
    dollars: float | None
    unknown: str
    instants: dict[str, float] = field(default_factory=dict)
    reserved_bytes: float | None = None
    tier: Tier = "no_gpu"
    basis: Basis = "no_gpu"
    between: dict[str, Between] = field(default_factory=dict)
    no_interval: str = ""
    widening: Widening = EXACT
    until: str = ""
    steps: int | None = None
    context_bytes: float = 0.0
    buffers_bytes: float = 0.0
    between_ranks: str = ""
    calibrated_by: str = ""
    host_s: float = 0.0
    work_s: dict[str, float] = field(default_factory=dict)

    @property
    def waits_for_launches(self) -> bool:
        """Whether the host is foreseen to be slower than the device."""
        return LAUNCHES in self.parts_s

    @property
    def device_s(self) -> float:
        """Of a step, what the device works and moves; 0 where no time is predicted."""
        idle = (LAUNCHES, DATA, EDGE)
        return sum(spent_s for name, spent_s in self.parts_s.items() if name not in idle)

    def shares(self) -> dict[str, float]:
        """Of a step, by part, the largest first; none where no time is predicted."""
        return {
            name: spent_s / self.step_s for name, spent_s in self.parts_s.items() if self.step_s
        }

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def _held(each: list[Ledger], context: Context) -> Footprint:
    """Return what the rank that holds most holds where it runs."""
    most = max(each, key=lambda one: one.peak()[1])
    return as_held(most, context.device, context.precision, context.capability)


def foresee(
    plan: Plan,
    context: Context,
    machine: Machine,
    calibration: Calibration | None = None,
    curve: Curve | None = None,
) -> Foresight:
    """What a plan would take on a machine.

    Args:
        plan: the run.
        context: where.
        machine: its rates.
        calibration: by measured steps of one plan there.
        curve: of a run that learned as this one would.

    Raises:
        ConfigError, UnsupportedError: a technique cannot run there, or two clash.
    """
    check_supported(list(plan.techniques.values()), context)
    each = predict_each(plan, context)
    held = _held(each, context)
    ledger, cuda, more = held.ledger, context.device == "cuda", sum(held.beside.values())
    instant, peak_bytes = ledger.peak()
    buffers = ranks.buffers_bytes(ledger) if cuda else 0
    left = machine.memory_bytes - machine.context_bytes - buffers
    fits, reserved = _room(held, left)
    time, unknown = _time(plan, context, each, machine)
    tier: Tier = "after_probes" if machine.source == "probes" else "no_gpu"
    basis: Basis = "on_cpu" if context.device == "cpu" else tier
    step_s, set_by = None if time is None else time.step_s, ""
    if calibration is not None and time is not None and calibration.tells(time):
        step_s, time = calibration.step_s(time), calibration.applied(time)
        set_by = calibration.plan
        if calibration.tells(time):  # else the device's rates decide now, and not these steps
            tier = "after_20_steps"
            alike = calibration.workload == workload(plan, context, ledger)
            same: Basis = "same_workload" if alike else tier
            basis = basis if context.device == "cpu" else same
    no_interval = "" if time is None else _no_interval(context, ledger, time)
    wider = widening(machine, basis)
    known, price = None if no_interval else basis, plan.hardware.dollars_per_hour
    until, hours, between = ending(plan, step_s, known, curve, wider.times)
    if hours is not None and price is not None and (ends := between.get("hours")):
        between["dollars"] = Between(price * ends.low, price * ends.high)
    return Foresight(
        device=machine.name, rates=machine.source, rates_say=machine.says,
        peak_bytes=peak_bytes + more, peak_at=instant,
        owners=dict(ledger.owners()) | held.beside, capacity_bytes=left, fits=fits,
        step_s=step_s, parts_s={} if time is None or step_s is None else _parts(time, step_s),
        tokens_per_s=None if step_s is None else plan.batch.tokens / step_s, hours=hours,
        dollars=None if hours is None or price is None else hours * price, unknown=unknown,
        instants={name: bytes + more for name, bytes in ledger.instants().items()},
        reserved_bytes=reserved, tier=tier, basis=basis, between=between,
        no_interval=no_interval, until=until, widening=wider,
        steps=None if hours is None or step_s is None else int(3600 * hours / step_s + 1e-6),
        context_bytes=machine.context_bytes, calibrated_by=set_by, buffers_bytes=buffers,
        between_ranks=ranks.told(plan.mesh.ranks, machine, buffers) if cuda else "",
        host_s=time.host_s if time else 0.0, work_s=time.work_s if time else {},
    )  # fmt: skip


def calibrated(plan: Plan, context: Context, machine: Machine, measured: Measured) -> Calibration:
    """What makes the model of a machine meet the measured steps of a plan.

    Raises:
        ConfigError: measured and predicted are too far apart to be of one plan and device.
        UnsupportedError: no time of the plan is predicted.
    """
    ledger = predict(plan, context)
    time, unknown = _time(plan, context, [ledger], machine)
    if plan.mesh.ranks > 1:
        time, unknown = None, "its steps are those of several ranks"
    if time is None:
        raise UnsupportedError(
            f"{plan.name} cannot calibrate other plans: its own time is not predicted: {unknown}",
            again_without("--after", verb="plan demo"),
        )
    found = Calibration.of(time, measured, plan.name)
    return replace(found, workload=workload(plan, context, ledger))


def after(folder: Path, catalogue: Catalogue, context: Context, machine: Machine) -> Calibration:
    """What the steps of a run tell: its report.json, metrics.jsonl and plan.toml.

    Args:
        folder: runs/NAME, measured on this machine.
        catalogue: of techniques.
        context: of any plan there; the run's own takes its place.
        machine: its rates.

    Raises:
        ConfigError: it is no run with steady steps, or was measured on another device.
        UnsupportedError: no time of its plan is predicted.
    """
    folder = resolve_run(folder)
    check_device(folder, context.device, context.device_name)
    plan = read_recorded_plan(folder, catalogue)
    return calibrated(plan, at(context, plan), machine, Measured.of_run(folder))


def at(context: Context, plan: Plan) -> Context:
    """The same place for another plan."""
    precision = precision_of(plan, context.capability)
    return replace(context, plan=plan, ranks=plan.mesh.ranks, precision=precision)


def _room(held: Footprint, left: float) -> tuple[str, float | None]:
    """Whether it fits, and what the allocator would hold at most.

    It fits where its tensors find room in `TIGHT` of what is left, though the allocator may have to
    give back what is free on the way; where they would hold more than there is, it does not.
    """
    allocated, found = held.ledger.peak()[1] + held.workspace, held.free
    if found is None:
        fits = "no" if allocated > left else "tight" if allocated > TIGHT * left else "yes"
        return fits, None
    if allocated > left:
        return "no", found.bytes
    if found.bytes <= TIGHT * left:
        return "yes", found.bytes
    fits = "yes" if allocated <= TIGHT * left and held.replayed(TIGHT * left).fits else "tight"
    return fits, held.replayed(left).bytes if found.bytes > left else found.bytes


def _time(
    plan: Plan, context: Context, each: Sequence[Ledger], machine: Machine
) -> tuple[StepTime | None, str]:
    """The step's time, or why there is none."""
    if context.device not in ("cuda", "cpu"):
        return None, f"time is modelled on a GPU of NVIDIA and on a CPU, not on {context.device}"
    if context.device == "cpu" and machine.source != "probes":
        return None, UNPROBED
    silent = [name for name, technique in plan.techniques.items() if not technique.timed]
    if silent:
        return None, f"{', '.join(silent)} does not say yet what it does to a step's time"
    try:
        return ranks.slowest(each, machine), ""
    except UnsupportedError as error:
        return None, f"{error.message}; try: {error.remedy}" if error.remedy else error.message


def _no_interval(context: Context, ledger: Ledger, time: StepTime) -> str:
    """Why a time has no interval; "" where it has one."""
    if ledger.sizes["world_ranks"] > 1:
        return ranks.UNMEASURED
    if ledger.sizes.get(DERIVED):
        return FEW
    if context.device == "cpu":
        return ON_CPU if "on_cpu" not in STEP else FEW if context.precision != "fp32" else ""
    wide = context.precision == "fp32"
    return FP32 if wide else LAUNCHED if time.by_host else ""


def _parts(time: StepTime, step_s: float) -> dict[str, float]:
    """Seconds of a step by kind, with the update and waits on their own, the largest first.

    What is left of a step beside the model's own time are waits for data that were measured.
    """
    launches_s = max(0.0, time.host_s - sum(time.device_s.values()))
    waits = {LAUNCHES: launches_s, DATA: step_s - time.step_s}
    sent_s = time.device_s.get(("optimizer", "collective"), 0.0)
    found = {"the update": time.of("optimizer") - sent_s}
    waits[EDGE] = time.edge_s
    found |= {name: spent_s for name, spent_s in waits.items() if spent_s > 0}
    for (phase, kind), spent_s in time.device_s.items():
        if phase != "optimizer" or kind == "collective":
            found[KINDS[kind]] = found.get(KINDS[kind], 0.0) + spent_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# --- for a reader ----------------------------------------------------------------------------


def told(plan: Plan, found: Foresight) -> str:
    """The prediction for a reader."""
    owners = ", ".join(f"{n} {format_bytes(b)}" for n, b in list(found.owners.items())[:4])
    fits = {"yes": "it fits", "tight": "it fits tightly", "no": "it does not fit"}[found.fits]
    rates = {"datasheet": "rates assumed from its datasheet; `headrace probe` measures them",
             "probes": "rates measured by probes"}[found.rates]  # fmt: skip
    rates += f"; set by measured steps of {found.calibrated_by}" if found.calibrated_by else ""
    held = "" if found.reserved_bytes is None else (
        f"; torch's allocator would reserve {format_bytes(found.reserved_bytes)}"
    )  # fmt: skip
    instants = ", ".join(
        f"{format_bytes(found.instants[name])} {words}"
        for name, words in WORDS.items()
        if name in found.instants
    )
    driver = f", beside the CUDA context's {format_bytes(found.context_bytes)}"
    lines = [
        f"{plan.name} on {found.device}" + (f" ({rates})" if found.step_s else ""), "",
        f"memory: {fits}: {format_bytes(found.peak_bytes)} of "
        f"{format_bytes(found.capacity_bytes)}{driver if found.context_bytes else ''}, "
        f"{WORDS[found.peak_at]}{held}",
        f"  most of it: {owners}", f"  through a step: {instants}",
        *([found.between_ranks] if found.between_ranks else []),
    ]  # fmt: skip
    if found.step_s is None:
        return "\n".join([*lines, f"time: not predicted: {found.unknown}", *_end_told(plan, found)])
    parts = ", ".join(f"{name} {share:.0%}" for name, share in found.shares().items())
    step, rate = format_seconds(found.step_s), format_count(found.tokens_per_s or 0)
    ends, rates = found.between.get("step_s"), found.between.get("tokens_per_s")
    time = f"time, if it fitted: {step}" if found.fits == "no" else f"time: {step}"
    if ends is None or rates is None:
        said = [f"{time} a step, {rate} tokens/s", f"  no interval: {found.no_interval}"]
    else:
        said = [
            f"{time} a step ({format_seconds(ends.low)} to {format_seconds(ends.high)}), "
            f"{rate} tokens/s ({format_count(rates.low)} to {format_count(rates.high)})",
            f"  in brackets: where 80% of {STEP[found.basis].n} {STEP[found.basis].says}"
            f"{_wider(found.widening)}",
        ]
    return "\n".join([*lines, *said, f"  where it goes: {parts}", *_end_told(plan, found)])


def _wider(found: Widening) -> str:
    """Say how much wider an interval is, and why."""
    if found.times == 1:
        return ""
    return f", each end {found.times:g} times as far: {found.why}"


def _end_told(plan: Plan, found: Foresight) -> list[str]:
    """When the run ends, what fits until then, and what it costs."""
    until = f"until {found.until}{', if it fitted' if found.fits == 'no' else ''}"
    if found.hours is None:
        return [until] if found.until else []
    last, told = found.until.rpartition("; at the latest ")[2], []
    ends, price = found.between.get("hours"), found.between.get("dollars")
    wide = ends is not None and ends.low < ends.high
    if wide or not last.endswith(" minutes"):
        told.append(format_seconds(3600 * found.hours))
        if ends is not None and wide:
            told[-1] += (
                f" ({format_seconds(3600 * ends.low)} to {format_seconds(3600 * ends.high)})"
            )
    if found.steps is not None and not last.startswith("step "):
        tokens = format_count(found.steps * plan.batch.tokens)
        told.append(f"room for {format_count(found.steps)} steps, {tokens} tokens")
    if found.dollars is not None:
        told.append(f"${found.dollars:,.2f}")
        if price is not None and price.low < price.high:
            told[-1] += f" (${price.low:,.2f} to ${price.high:,.2f})"
    return [f"{until}{': ' if told else ''}{', '.join(told)}"]
