"""How far predictions of a step's time are off, and the intervals that they get for it.

An interval holds 80% of what is measured. Its width stands for what the planner knew: rates of a
datasheet, rates probed on this machine, or 20 measured steps of one plan, of another workload or of
the same one. Widths come from rows of results/ and from nothing else:
`python benchmarks/residuals.py` computes them, leaving out one shape at a time, so that they hold
for a shape that was not looked at. They are ratios of measured to predicted, and not symmetric:
what a model leaves out takes time. All of these rows are of one kind of GPU; on any other there is
no interval, whatever its rates rest on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.core.ledger import Ledger
from headrace.core.plan import Plan
from headrace.core.technique import Context
from headrace.core.work import Work
from headrace.model.work import trunk_work

Tier = Literal["no_gpu", "after_probes", "after_20_steps"]
Basis = Tier | Literal["same_workload"]
"""What a width stands for: a tier, or 20 steps of a plan of the same `workload`."""


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


STEP: dict[Basis, Width] = {
    "no_gpu": Width(
        0.969, 1.032, 294, "measured steps of H200s lay, each foreseen without any of its own shape"
    ),
    "after_probes": Width(
        0.969, 1.033, 294, "measured steps of H200s lay, by the rates that some were probed at"
    ),
    "after_20_steps": Width(
        0.955, 1.048, 294, "measured steps of H200s lay, each set right by steps of another shape"
    ),
    "same_workload": Width(
        0.978, 1.017, 126, "measured steps of H200s lay, each set right by others of its workload"
    ),
}
"""basis -> how far a step's time is off. Rows of techniques.jsonl, limits.jsonl and peers.jsonl at
0841e19, 0c5601c and 09386a9, of 160m, 1b and one of 7b, and 150 of 24 more workloads in
plans.jsonl, which eight H200s measured, each workload on one. What the model has of steps
(core/work.py) is fitted to what was measured before the third list; here it is fitted without a
workload each time. after_probes is of the third list's GPUs as their own probes foretold, 46 rows,
and of the others by assumed rates, for their probes are not kept. A row of another shape that sets
the model hands on what is its own. One of the same workload tells the others to 1.1%: there the
first candidate of each sets the model, by steps of the same GPU."""


MEASURED_ON = "H200"
"""The GPU of these rows."""


def not_known_on(device: str) -> str:
    """Why a prediction on that device has no interval; "" where it has one."""
    if device.removeprefix("NVIDIA ").upper() == MEASURED_ON:
        return ""
    return (
        f"predictions were compared with measured steps on {MEASURED_ON}s only, so how far off "
        f"they are on {device} is not known"
    )


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
    return trunk_work(model, rows=plan.rows_per_step, length=length, precision=precision)


def step_between(step_s: float, basis: Basis) -> Between:
    """Seconds that 80% of such plans take."""
    width = STEP[basis]
    return Between(width.low * step_s, width.high * step_s)
