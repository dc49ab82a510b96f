"""How far predictions of a step's time are off, and the intervals that they get for it.

An interval holds 80% of what is measured. Its width stands for what the planner knew: rates of a
datasheet, rates probed on this machine, or 20 measured steps of one plan. Widths come from rows of
results/ and from nothing else: `python benchmarks/residuals.py` computes them, leaving out one
shape at a time, so that they hold for a shape that was not looked at. They are ratios of measured
to predicted, and not symmetric: what a model leaves out takes time. All of these rows are of one
kind of GPU; on any other there is no interval, whatever its rates rest on.
"""

from dataclasses import dataclass
from typing import Literal

Tier = Literal["no_gpu", "after_probes", "after_20_steps"]


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


STEP: dict[Tier, Width] = {
    "no_gpu": Width(0.969, 1.035, 252, "steps of H200s, a shape that was not looked at"),
    "after_probes": Width(0.972, 1.028, 252, "steps of H200s, by the rates of the same ones"),
    "after_20_steps": Width(0.951, 1.051, 252, "steps of H200s, set by one of another shape"),
}
"""tier -> how far a step's time is off. Rows of techniques.jsonl, limits.jsonl and peers.jsonl at
0841e19, 0c5601c and 09386a9, of 160m, 1b and one of 7b, and 104 of sixteen more workloads in
plans.jsonl, which six H200s measured, each workload on one. What the model has of steps
(core/work.py) is fitted to the same rows, so for this it was fitted without a workload each time.
Those of the sixteen are then off by a mean of 1.3% by the probes of their own GPUs, 160m and 1b by
2% to 3%, and 7b, whose one row took longer than its prediction, by 3.5%. Of other rows no probes
were kept: after_probes counts them by assumed rates. A row of another shape that sets the model
hands on what is its own; one of the same shape tells its others to 1.2%."""


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


def step_between(step_s: float, tier: Tier, device: str) -> Between | None:
    """Seconds that 80% of such plans take; None where that is not known."""
    if not_known_on(device):
        return None
    width = STEP[tier]
    return Between(width.low * step_s, width.high * step_s)
