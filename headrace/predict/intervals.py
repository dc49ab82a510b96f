"""How far predictions of a step's time are off, and the intervals that they get for it.

An interval holds 80% of what is measured. Its width stands for what the planner knew: rates of a
datasheet, rates probed on this machine, or 20 measured steps of one plan, of another workload or of
the same one; a probed CPU has a width of its own, once rows tell one. Widths come from rows of
results/ and from nothing else: `python benchmarks/residuals.py` computes them, leaving out one
shape at a time, so that they hold for a shape that was not looked at. They are ratios of measured
to predicted, and not symmetric: what a model leaves out takes time. All of a GPU's rows are of one
kind, and of a CPU `python benchmarks/foresight_cpu.py` tells the width. On any other GPU each end
lies some times as far (`widening`): those factors rest on no steps, but on how far apart the
numbers are that are assumed there, and every answer says so.
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
"""What a width stands for: a tier, 20 steps of a plan of the same `workload`, or a probed CPU."""


@dataclass(frozen=True)
class Width:
    """Of 80% of all measured steps, as ratios to the predicted one.

    Args:
        low: the lower end.
        high: the upper end.
        n: rows that it rests on.
        says: which.
    """

    low: float
    high: float
    n: int
    says: str


@dataclass(frozen=True)
class Between:
    """An 80% interval around a predicted number."""

    low: float
    high: float


def _width(name: str, says: str) -> Width:
    """Return a width of `constants.toml`."""
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
"""How far a step's time is off, by what the prediction rests on."""
MEASURED_ON = "H200"
"""The GPU whose steps the widths are of."""
SAME_CHIP, ASSUMED = number("wider_same_chip"), number("wider_assumed")
PROBED, STEPPED = number("wider_probed"), number("wider_measured")


@dataclass(frozen=True)
class Widening:
    """How much less is known of a device than of the one that steps were compared on.

    Args:
        times: as far that each end of an interval lies.
        why: the reason, for a reader; "" where it is 1.
    """

    times: float = 1.0
    why: str = ""


EXACT = Widening()
"""Of the device that steps were compared on."""


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
    if machine.source == "probes":
        return Widening(
            PROBED, f"{known}; what steps of {device} take beyond its kernels is assumed"
        )
    if lookup(device).family == "hopper":
        return Widening(SAME_CHIP, f"{known}, which have the chip of {device}")
    return Widening(ASSUMED, f"{known}; what {device} reaches of its datasheet's peaks is assumed")


def workload(plan: Plan, context: Context, ledger: Ledger) -> Mapping[str, Work]:
    """What the trunk would do in a step: equal for one model, length of rows and tokens a step.

    The keys of two plans do not tell: a run writes down what they may leave open, as the size of
    the vocabulary. Rows of a forward pass are no part of it: how many is a choice, as techniques.

    Args:
        plan: the run.
        context: where.
        ledger: what is predicted of it there.
    """
    model = plan.model.model_copy(update={"vocab": int(ledger.sizes["vocab"])})
    length, precision = plan.data.sequence_length, context.precision
    return baseline_work(model, rows=plan.rows_per_step, length=length, precision=precision)


def step_between(step_s: float, basis: Basis, times: float = 1.0) -> Between:
    """Return the seconds between which 80% of such plans take.

    Args:
        step_s: as predicted.
        basis: what that rests on.
        times: as far that each end lies, see `Widening`.
    """
    width = STEP[basis]
    return Between(width.low / times * step_s, width.high * times * step_s)
