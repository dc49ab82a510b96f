"""How far predictions of a step's time are off, and the intervals that they get for it.

An interval holds 80% of what is measured. Its width stands for what the planner knew: rates of a
datasheet, rates probed on this machine, or 20 measured steps of one plan. Widths come from rows of
results/ and from nothing else: `python benchmarks/residuals.py` computes them, leaving out one
shape at a time, so that they hold for a shape that was not looked at. They are ratios of measured
to predicted, and not symmetric: what a model leaves out takes time.
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
    "no_gpu": Width(0.942, 1.056, 148, "steps of an H200, a shape that was not looked at"),
    "after_probes": Width(0.916, 1.056, 148, "steps of an H200, by rates that were probed on one"),
    "after_20_steps": Width(0.928, 1.078, 148, "steps of an H200, set by one of another shape"),
}
"""tier -> how far a step's time is off. Rows of techniques.jsonl, limits.jsonl and peers.jsonl at
0841e19, 0c5601c and 09386a9, of 160m, 1b and one of 7b. What the model has of steps (core/work.py)
is fitted to the same rows, so for this it was fitted without a shape each time: that shape's are
then off by a mean of 1.6% (160m), 2.2% (1b) and 5.5% (7b, whose one row took longer than its
prediction; nothing here explains it). A row of another shape that sets the model hands on what is
its own: on a device that the constants are from it tells less than they do. After 20 steps
the rates are the datasheet's; with probed ones it is 0.905 to 1.105. Probes asked for flex
attention in rows of 2,048 tokens only; by it, two sparse patterns in rows of 32,768 are predicted
16 and 18% too long."""


def step_between(step_s: float, tier: Tier) -> Between:
    """Seconds that 80% of such plans take."""
    width = STEP[tier]
    return Between(width.low * step_s, width.high * step_s)
