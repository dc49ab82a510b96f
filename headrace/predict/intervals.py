"""Hold how far predicted step times are off, and compute their intervals from it.

An interval holds 80% of what is measured. Its width depends on what the planner knew: rates of a
datasheet, rates probed on this machine, or 20 measured steps of one plan, of another workload or of
the same one. A probed CPU has a width of its own, once measured rows give one.

Widths come from rows of results/ and from nothing else. `python benchmarks/residuals.py` computes
them and leaves out one shape at a time, so that they hold for a shape that was not looked at. They
are ratios of measured to predicted time, and not symmetric: what a model leaves out takes time. All
of a GPU's rows are of one kind. `python benchmarks/foresight_cpu.py` computes the width of a CPU.

On an H100 each end lies as far as natural runs ask for (`python benchmarks/natural_error.py`). On
any other GPU it lies some times as far (`widening`). Those factors rest on no steps, but on how far
apart the numbers are that are assumed there, and every answer says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.costs.constants import number, numbers
from headrace.costs.decoder_work import baseline_work
from headrace.costs.hardware import lookup
from headrace.costs.ledger import Ledger
from headrace.costs.machine import Machine
from headrace.costs.work import Work
from headrace.plan.plan import Plan
from headrace.plan.technique import Context

Tier = Literal["no_gpu", "after_probes", "after_20_steps"]
Basis = Tier | Literal["same_workload", "on_cpu"]
"""What a width rests on: a tier, 20 steps of a plan of the same `workload`, or a probed CPU."""


@dataclass(frozen=True)
class Width:
    """Hold the range of ratios of measured to predicted step time that covers 80% of all steps.

    Args:
        low: the lower end.
        high: the upper end.
        n: number of rows that it rests on.
        says: words that name these rows.
    """

    low: float
    high: float
    n: int
    says: str


@dataclass(frozen=True)
class Between:
    """Hold the two ends of an 80% interval around a predicted number."""

    low: float
    high: float


def _width(name: str, says: str) -> Width:
    """Return the width that `constants.toml` holds under a name."""
    low, high, rows = numbers(name)
    return Width(low, high, int(rows), says)


STEP: dict[Basis, Width] = {
    "no_gpu": _width(
        "width_no_gpu", "measured steps of H200s lay, each predicted without any of its own shape"
    ),
    "after_probes": _width(
        "width_after_probes", "measured steps of H200s lay, by the rates that some were probed at"
    ),
    "after_20_steps": _width(
        "width_after_20_steps",
        "measured steps of H200s lay, each set right by steps of another shape",
    ),
    "same_workload": _width(
        "width_same_workload",
        "measured steps of H200s lay, each set right by others of its workload",
    ),
}
"""What a prediction rests on -> how far a step's time is off."""
MEASURED_ON = "H200"
"""The GPU whose measured steps the widths come from."""
FORECAST_ON = "H100"
"""Another GPU, of which natural runs were predicted by probed rates (natural.jsonl)."""
SAME_CHIP, ASSUMED = number("wider_same_chip"), number("wider_assumed")
PROBED, STEPPED = number("wider_probed"), number("wider_measured")
NATURAL = number("wider_natural")


@dataclass(frozen=True)
class Widening:
    """Hold how much wider intervals are on a device than on the one that steps were compared on.

    Args:
        times: factor by which each end of an interval lies farther out.
        why: the reason, for a reader; "" where the factor is 1.
        compared: whether gains were forecast on this device and then measured, which needs no
            factor: what steps take beyond kernels is on both sides of a gain.
    """

    times: float = 1.0
    why: str = ""
    compared: bool = False

    @property
    def of_gains(self) -> float:
        """Return the factor for a gain, the ratio of two steps' times."""
        return 1.0 if self.compared else self.times


EXACT = Widening()
"""Widening of the device that steps were compared on: none."""


def widening(machine: Machine, basis: Basis) -> Widening:
    """Return how much wider the intervals of a device are, and why.

    Args:
        machine: the device's rates.
        basis: what the prediction rests on.
    """
    device = machine.name
    if basis == "on_cpu" or device.removeprefix("NVIDIA ").upper() == MEASURED_ON:
        return EXACT
    known = f"predictions were compared with measured steps on {MEASURED_ON}s only"
    if basis not in ("no_gpu", "after_probes"):
        return Widening(STEPPED, f"{known}; steps of {device} set this one right")
    if machine.source == "probes" and FORECAST_ON in device:
        devices = f"{MEASURED_ON}s, and with fewer on {FORECAST_ON}s"
        why = f"predictions were compared with measured steps on {devices}"
        return Widening(NATURAL, why, compared=True)
    if machine.source == "probes":
        why = f"{known}; what steps of {device} take beyond its kernels is assumed"
        return Widening(PROBED, why)
    if lookup(device).family == "hopper":
        return Widening(SAME_CHIP, f"{known}, which have the chip of {device}")
    return Widening(ASSUMED, f"{known}; what {device} reaches of its datasheet's peaks is assumed")


def workload(plan: Plan, context: Context, ledger: Ledger) -> Mapping[str, Work]:
    """Return the work of the baseline in a step, by which two workloads are compared.

    It is equal for plans of one model, sequence length and number of tokens a step. The plans' keys
    alone do not show that: a run records what they may leave open, as the size of the vocabulary.
    The sequences of a forward pass are no part of it, since they are a choice, as techniques are.

    Args:
        plan: the plan of the run.
        context: where it runs.
        ledger: what is predicted of the plan there.
    """
    model = plan.model.model_copy(update={"vocab": int(ledger.sizes["vocab"])})
    length, precision = plan.data.sequence_length, context.precision
    return baseline_work(model, rows=plan.rows_per_step, length=length, precision=precision)


def step_between(step_s: float, basis: Basis, times: float = 1.0) -> Between:
    """Return the seconds between which 80% of steps with such a prediction lie.

    Args:
        step_s: predicted seconds of a step.
        basis: what the prediction rests on.
        times: factor by which each end lies farther out, see `Widening`.
    """
    width = STEP[basis]
    return Between(width.low / times * step_s, width.high * times * step_s)
