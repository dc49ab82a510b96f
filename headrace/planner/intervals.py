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
    "no_gpu": Width(0.960, 1.042, 201, "steps of H200s, a shape that was not looked at"),
    "after_probes": Width(0.970, 1.029, 201, "steps of H200s, by the rates of the same ones"),
    "after_20_steps": Width(0.941, 1.062, 201, "steps of H200s, set by one of another shape"),
}
"""tier -> how far a step's time is off. Rows of techniques.jsonl, limits.jsonl and peers.jsonl at
0841e19, 0c5601c and 09386a9, of 160m, 1b and one of 7b, and 53 of eight more shapes in plans.jsonl,
which two on each of four H200s were measured on. What the model has of steps (core/work.py) is
fitted to the same rows, so for this it was fitted without a shape each time: that shape's are then
off by a mean of 1.7% (1b), 2.1% (160m), 4.9% (7b, whose one row took longer than its prediction;
nothing here explains it) and 2.2% (the eight; by the probes of their own GPUs 1.4%). Probes were
kept of the GPUs of the eight: after_probes counts the other rows by assumed rates. GPUs differ: one
of the four takes 4% longer for products than the others under load, which its probes tell and no
datasheet does. A row of another shape that sets the model hands on what is its own; one of the same
shape tells its others to 1.1%."""


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
