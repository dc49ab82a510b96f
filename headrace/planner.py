"""What a run would be: whether it fits, where its step would go, how long and how much.

Memory and time come of the same ledger, which every technique edits; the planner knows none of them
by name. Time needs a machine's rates, measured by probes or assumed from a datasheet, and says
which. Where a technique does not say yet what it does to a step's time, no time is predicted: a
number that leaves a part out would look like one.
"""

from dataclasses import asdict, dataclass
from typing import Any

from headrace.build import predict
from headrace.context import check_supported
from headrace.core.errors import UnsupportedError
from headrace.core.ledger import Ledger
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.core.technique import Context
from headrace.core.units import format_bytes, format_count, format_seconds
from headrace.core.work import StepTime, step_time

TIGHT = 0.93
"""Of the memory that is left beside the driver's: above it, pieces that nothing fits may decide."""
KINDS = {"product": "matrix products", "attention": "attention", "stream": "memory traffic",
         "host link": "the host link"}  # fmt: skip


@dataclass(frozen=True)
class Foresight:
    """A plan's prediction.

    Args:
        device: on which.
        rates: "datasheet" or "probes": where the machine's rates are from.
        rates_say: what is assumed, or how they were measured.
        peak_bytes, peak_at: allocated, and when in a step.
        owners: the lines held then, summed over layers, the largest first.
        capacity_bytes: the device's memory without what the driver and libraries hold.
        fits: "yes", "tight" or "no".
        step_s: seconds of a steady step; None where it is not predicted.
        parts_s: of it, by kind of work, the update apart.
        tokens_per_s: None likewise.
        hours, dollars: to the plan's end, without compiling, evaluation and checkpoints.
        unknown: why no time is predicted.
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

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def foresee(plan: Plan, context: Context, machine: Machine) -> Foresight:
    """What a plan would take on a machine.

    Raises:
        ConfigError, UnsupportedError: a technique cannot run there, or two clash.
    """
    check_supported(list(plan.techniques.values()), context)
    ledger = predict(plan, context)
    instant, peak_bytes = ledger.peak()
    left = machine.memory_bytes - machine.context_bytes
    time, unknown = _time(plan, context, ledger, machine)
    step_s = None if time is None else time.step_s
    steps, price = plan.horizon_steps, plan.hardware.dollars_per_hour
    hours = None if step_s is None or steps is None else steps * step_s / 3600
    return Foresight(
        device=machine.name, rates=machine.source, rates_say=machine.says,
        peak_bytes=peak_bytes, peak_at=instant,
        owners=dict(ledger.owners()), capacity_bytes=left,
        fits="no" if peak_bytes > left else "tight" if peak_bytes > TIGHT * left else "yes",
        step_s=step_s, parts_s={} if time is None else _parts(time),
        tokens_per_s=None if step_s is None else plan.batch.tokens / step_s, hours=hours,
        dollars=None if hours is None or price is None else hours * price, unknown=unknown,
    )  # fmt: skip


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


def told(plan: Plan, found: Foresight) -> str:
    """The prediction for a reader."""
    owners = ", ".join(f"{n} {format_bytes(b)}" for n, b in list(found.owners.items())[:4])
    fits = {"yes": "it fits", "tight": "it fits tightly", "no": "it does not fit"}[found.fits]
    rates = {"datasheet": "rates assumed from its datasheet; `headrace probe` measures them",
             "probes": "rates measured by probes"}[found.rates]  # fmt: skip
    lines = [
        f"{plan.name} on {found.device} ({rates})", "",
        f"memory: {fits}: {format_bytes(found.peak_bytes)} of "
        f"{format_bytes(found.capacity_bytes)}, at the {found.peak_at}", f"  most of it: {owners}",
    ]  # fmt: skip
    if found.step_s is None:
        return "\n".join([*lines, f"time: not predicted: {found.unknown}"])
    parts = ", ".join(f"{name} {spent_s / found.step_s:.0%}" for name, spent_s in
                      found.parts_s.items())  # fmt: skip
    lines += [
        f"time: {format_seconds(found.step_s)} a step, "
        f"{format_count(found.tokens_per_s or 0)} tokens/s", f"  where it goes: {parts}",
    ]  # fmt: skip
    if found.hours is not None:
        price = "" if found.dollars is None else f", ${found.dollars:,.2f}"
        lines.append(f"to step {plan.horizon_steps}: {format_seconds(3600 * found.hours)}{price}")
    return "\n".join(lines)
