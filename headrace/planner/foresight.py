"""What a run would be: whether it fits, where its step would go, how long and how much.

Memory and time come of the same ledger, which every technique edits; the planner knows none of them
by name. Time needs a machine's rates, measured by probes or assumed from a datasheet, and says
which. Where a technique does not say yet what it does to a step's time, no time is predicted: a
number that leaves a part out would look like one.

A plan fits when its tensors, replayed through the allocator's rules, find room in less than all of
the memory. Times carry intervals that hold 80% of what was measured so far, by what they rest on.
Steps of one plan that were measured (`calibrated`, or `after` a run) move the prediction of others.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.build import predict
from headrace.context import check_supported
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.ledger import Ledger, Line
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.core.technique import Catalogue, Context
from headrace.core.units import format_bytes, format_count, format_seconds
from headrace.core.work import StepTime, step_time
from headrace.planner.calibration import Calibration, Measured
from headrace.planner.intervals import STEP, Between, Tier, step_between
from headrace.planner.reserved import Reserved, reserve, workspace_bytes

TIGHT = 0.93
"""Of the memory that is left beside the driver's: above it, pieces that nothing fits may decide."""
KINDS = {"product": "matrix products", "attention": "attention", "stream": "memory traffic",
         "host link": "the host link"}  # fmt: skip
EXPANDABLE = "expandable_segments"
"""A size of the ledger that is not 0 where segments grow."""


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
        parts_s: of it, by kind of work, the update apart.
        tokens_per_s: None likewise.
        hours, dollars: to the goal, without compiling, evaluation and checkpoints; None where no
            budget of the goal tells.
        unknown: why no time is predicted.
        instants: allocated at each instant of a step.
        reserved_bytes: at most, by the allocator; None where it is no GPU's.
        tier: what the time rests on.
        between: 80% intervals of step_s, tokens_per_s, hours and dollars where there are any.
        until: what ends the run, in words.
        calibrated_by: the plan whose measured steps moved the prediction; "" without.
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
    between: dict[str, Between] = field(default_factory=dict)
    until: str = ""
    calibrated_by: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def foresee(
    plan: Plan, context: Context, machine: Machine, calibration: Calibration | None = None
) -> Foresight:
    """What a plan would take on a machine.

    Args:
        plan: the run.
        context: where.
        machine: its rates.
        calibration: by measured steps of one plan there.

    Raises:
        ConfigError, UnsupportedError: a technique cannot run there, or two clash.
    """
    check_supported(list(plan.techniques.values()), context)
    ledger = _with_scores(predict(plan, context), context)
    cuda = context.device == "cuda"
    workspace = workspace_bytes(context.capability) if cuda else 0
    instant, peak_bytes = ledger.peak()
    left = machine.memory_bytes - machine.context_bytes
    fits, reserved = _room(ledger, peak_bytes + workspace, workspace, left, cuda)
    time, unknown = _time(plan, context, ledger, machine)
    tier: Tier = "after_probes" if machine.source == "probes" else "no_gpu"
    step_s = None if time is None else time.step_s
    if time is not None and calibration is not None:
        tier, step_s, time = "after_20_steps", calibration.step_s(time), calibration.applied(time)
    until, hours, between = _length(plan, step_s, tier)
    price = plan.hardware.dollars_per_hour
    if hours is not None and price is not None and "hours" in between:
        ends = between["hours"]
        between["dollars"] = Between(price * ends.low, price * ends.high)
    return Foresight(
        device=machine.name, rates=machine.source, rates_say=machine.says,
        peak_bytes=peak_bytes + workspace, peak_at=instant,
        owners={**dict(ledger.owners()), **_workspaces(workspace)}, capacity_bytes=left, fits=fits,
        step_s=step_s, parts_s={} if time is None else _parts(time),
        tokens_per_s=None if step_s is None else plan.batch.tokens / step_s, hours=hours,
        dollars=None if hours is None or price is None else hours * price, unknown=unknown,
        instants={name: held + workspace for name, held in ledger.instants().items()},
        reserved_bytes=reserved, tier=tier, between=between, until=until,
        calibrated_by=calibration.plan if calibration is not None and time is not None else "",
    )  # fmt: skip


def calibrated(plan: Plan, context: Context, machine: Machine, measured: Measured) -> Calibration:
    """What makes the model of a machine meet the measured steps of a plan.

    Raises:
        ConfigError: measured and predicted are too far apart to be of one plan and device.
        UnsupportedError: no time of the plan is predicted.
    """
    time, unknown = _time(plan, context, predict(plan, context), machine)
    if time is None:
        raise UnsupportedError(
            f"{plan.name} cannot calibrate other plans: its own time is not predicted: {unknown}",
            "a plan of techniques that say what they do to time",
        )
    return Calibration.of(time, measured, plan.name)


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
    file = folder / "plan.toml"
    if not file.is_file():
        raise ConfigError(f"{folder} is not a run: it has no plan.toml", "headrace train PLAN")
    plan = Plan.read(file.read_text(), catalogue)
    return calibrated(plan, at(context, plan), machine, Measured.of_run(folder))


def at(context: Context, plan: Plan) -> Context:
    """The same place for another plan."""
    precision = plan.model.precision
    if precision == "auto":
        precision = "bf16" if context.device == "cuda" else "fp32"
    return replace(context, plan=plan, ranks=plan.mesh.ranks, precision=precision)


def _room(
    ledger: Ledger, allocated: float, workspace: float, left: float, cuda: bool
) -> tuple[str, float | None]:
    """Whether it fits, and what the allocator would hold at most.

    It fits where its tensors find room in `TIGHT` of what is left, though the allocator may have to
    give back what is free on the way; where they would hold more than there is, it does not.
    """
    if not cuda:
        fits = "no" if allocated > left else "tight" if allocated > TIGHT * left else "yes"
        return fits, None

    def replayed(capacity: float) -> Reserved:
        grows = bool(ledger.sizes.get(EXPANDABLE))
        return reserve(ledger, capacity=capacity, workspace=workspace, expandable=grows)

    found = replayed(math.inf)
    if allocated > left:
        return "no", found.bytes
    if found.bytes <= TIGHT * left:
        return "yes", found.bytes
    fits = "yes" if allocated <= TIGHT * left and replayed(TIGHT * left).fits else "tight"
    return fits, replayed(left).bytes if found.bytes > left else found.bytes


def _with_scores(ledger: Ledger, context: Context) -> Ledger:
    """With the scores that torch's own attention keeps where no kernel of it can run.

    In fp32 none knows groups of keys: two plans that were to fit were out of memory, asking for a
    block's scores (rows 80 and 115 of techniques.jsonl).
    """
    sizes = ledger.sizes
    chosen = any(w.kind == "attention" and not w.kernel for w in ledger.work.values())
    grouped = sizes["heads"] != sizes["kv_heads"]
    if context.device != "cuda" or context.precision != "fp32" or not (chosen and grouped):
        return ledger
    each = 4 * sizes["rows"] * sizes["heads"] * sizes["length"] ** 2
    for layer in range(int(sizes["layers"])):
        ledger = ledger.with_line(f"{layer}/scores", Line(each, ("loss", "turn"), layer))
    return ledger


def _workspaces(bytes: float) -> dict[str, float]:
    """As owners of memory, where there are any."""
    return {"library workspaces": bytes} if bytes else {}


def _time(
    plan: Plan, context: Context, ledger: Ledger, machine: Machine
) -> tuple[StepTime | None, str]:
    """The step's time, or why there is none."""
    silent = [name for name, technique in plan.techniques.items() if not technique.timed]
    if silent:
        return None, f"{', '.join(silent)} does not say yet what it does to a step's time"
    if context.device != "cuda" or context.precision not in ("bf16", "fp16"):
        return (
            None,
            f"time is modelled in half precision on a GPU, not in {context.precision} on "
            f"{context.device}",
        )
    if plan.mesh.ranks > 1:
        return None, "time over several ranks is not modelled yet"
    try:
        return step_time(ledger.work, machine, ledger.sizes["micro_batches"]), ""
    except UnsupportedError as error:
        return None, error.message


def _parts(time: StepTime) -> dict[str, float]:
    """Seconds by kind, with the update on its own, the largest first."""
    found = {"the update": time.of("optimizer")}
    for (phase, kind), spent_s in time.device_s.items():
        if phase != "optimizer":
            found[KINDS[kind]] = found.get(KINDS[kind], 0.0) + spent_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# --- how long --------------------------------------------------------------------------------


def _length(
    plan: Plan, step_s: float | None, tier: Tier
) -> tuple[str, float | None, dict[str, Between]]:
    """What ends the run, hours until then, and the intervals of all that a step's time decides."""
    between: dict[str, Between] = {}
    if step_s is not None:
        ends = between["step_s"] = step_between(step_s, tier)
        tokens = plan.batch.tokens
        between["tokens_per_s"] = Between(tokens / ends.high, tokens / ends.low)
    budgets = dict(_budgets(plan, step_s))
    target = plan.goal.bits_per_byte
    loss = "" if target is None else (
        f"{target:g} bits per byte, nobody knows when: no loss curve is measured yet"
    )  # fmt: skip
    if not budgets:
        return loss, None, between
    until, hours = min(budgets.items(), key=lambda item: item[1])
    if "step_s" in between and step_s:
        low, high = (between["step_s"].low / step_s, between["step_s"].high / step_s)
        scaled = [(low, high) if name.startswith("step ") else (1.0, 1.0) for name in budgets]
        each = list(zip(budgets.values(), scaled, strict=True))
        between["hours"] = Between(min(h * s[0] for h, s in each), min(h * s[1] for h, s in each))
    elif not until.startswith("step "):
        between["hours"] = Between(hours, hours)
    return (f"{loss}; at the latest {until}" if loss else until), hours, between


def _budgets(plan: Plan, step_s: float | None) -> Iterator[tuple[str, float]]:
    """What may end the run -> hours until then. Minutes and dollars are exact."""
    goal, price = plan.goal, plan.hardware.dollars_per_hour
    by_tokens = -(-goal.tokens // plan.batch.tokens) if goal.tokens else None
    steps = min((n for n in (goal.steps, by_tokens) if n), default=None)
    if steps and step_s is not None:
        yield f"step {steps}", steps * step_s / 3600
    if goal.minutes:
        yield f"{goal.minutes:g} minutes", goal.minutes / 60
    if goal.dollars and price:
        yield f"${goal.dollars:,.2f}", goal.dollars / price


# --- for a reader ----------------------------------------------------------------------------


def told(plan: Plan, found: Foresight) -> str:
    """The prediction for a reader."""
    owners = ", ".join(f"{n} {format_bytes(b)}" for n, b in list(found.owners.items())[:4])
    fits = {"yes": "it fits", "tight": "it fits tightly", "no": "it does not fit"}[found.fits]
    rates = {"datasheet": "rates assumed from its datasheet; `headrace probe` measures them",
             "probes": "rates measured by probes"}[found.rates]  # fmt: skip
    if found.calibrated_by:
        rates += f"; set by measured steps of {found.calibrated_by}"
    held = "" if found.reserved_bytes is None else (
        f"; {format_bytes(found.reserved_bytes)} of it held by torch's allocator"
    )  # fmt: skip
    instants = ", ".join(f"{name} {format_bytes(b)}" for name, b in found.instants.items())
    lines = [
        f"{plan.name} on {found.device} ({rates})", "",
        f"memory: {fits}: {format_bytes(found.peak_bytes)} of "
        f"{format_bytes(found.capacity_bytes)}, at the {found.peak_at}{held}",
        f"  most of it: {owners}", f"  through a step: {instants}",
    ]  # fmt: skip
    if found.step_s is None:
        return "\n".join([*lines, f"time: not predicted: {found.unknown}", *_end_told(found)])
    parts = ", ".join(f"{name} {spent_s / found.step_s:.0%}" for name, spent_s in
                      found.parts_s.items())  # fmt: skip
    ends, rate = found.between["step_s"], found.between["tokens_per_s"]
    return "\n".join([
        *lines,
        f"time: {format_seconds(found.step_s)} a step ({format_seconds(ends.low)} to "
        f"{format_seconds(ends.high)}), {format_count(found.tokens_per_s or 0)} tokens/s "
        f"({format_count(rate.low)} to {format_count(rate.high)})",
        f"  so wide: 80% of {STEP[found.tier].n} {STEP[found.tier].says}",
        f"  where it goes: {parts}", *_end_told(found),
    ])  # fmt: skip


def _end_told(found: Foresight) -> list[str]:
    """When the run ends and what it costs until then."""
    if found.hours is None:
        return [f"until {found.until}"] if found.until else []
    line = f"until {found.until}: {format_seconds(3600 * found.hours)}"
    ends, price = found.between.get("hours"), found.between.get("dollars")
    if ends is not None and ends.low < ends.high:
        line += f" ({format_seconds(3600 * ends.low)} to {format_seconds(3600 * ends.high)})"
    if found.dollars is not None:
        line += f", ${found.dollars:,.2f}"
        if price is not None and price.low < price.high:
            line += f" (${price.low:,.2f} to ${price.high:,.2f})"
    return [line]
