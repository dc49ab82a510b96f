"""Return a run's loss as curves: nats turned into bits per byte, long runs thinned.

Validation is measured in bits per byte. The training loss is in nats per token and is converted
with the validation text's tokens per byte, which makes the two comparable but is exact only for
text that the tokenizer cuts alike; the page says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.core.units import format_count
from headrace.report.chart import ChartAxis
from headrace.report.run_files import RunFiles

Array = NDArray[np.float64]
Column = Literal["wall_s", "tokens"]
BUCKETS = 200
"""Most points of a training curve; a chart is some 500 pixels wide."""
BUCKET_STEPS = 5
"""Fewest steps that one point averages, when the run is long enough."""


@dataclass(frozen=True)
class LossCurve:
    """Hold a curve: [N] places and values, and the range that each value averages."""

    x: Array
    y: Array
    low: Array
    high: Array


def training_curve(run: RunFiles, column: Column, *, in_bits: bool) -> LossCurve:
    """Return the training loss, in buckets of equal numbers of steps: mean, lowest and highest."""
    x, y = run.metrics[column], run.metrics["loss"]
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known] * _scale(run, in_bits)
    buckets = max(min(len(x), 24), min(BUCKETS, len(x) // BUCKET_STEPS))
    if not buckets:
        return LossCurve(x, y, y, y)
    starts = np.arange(buckets) * len(x) // buckets
    sizes = np.diff(starts, append=len(x))
    mean_x, mean_y = (np.add.reduceat(v, starts) / sizes for v in (x, y))
    return LossCurve(mean_x, mean_y, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts))


def validation_curve(run: RunFiles, column: Column) -> LossCurve:
    """Return the validation loss in bits per byte at every evaluation."""
    points = [
        (getattr(row, column), row.bits_per_byte)
        for row in run.report.evaluated
        if getattr(row, column) is not None
    ]
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return LossCurve(x, y, y, y)


def _scale(run: RunFiles, in_bits: bool) -> float:
    """Return what one nat per token is on the vertical axis."""
    ratio = run.tokens_per_byte if in_bits else None
    return ratio / math.log(2) if ratio else 1.0


def ceiling(curves: Sequence[LossCurve], goal: float | None) -> float | None:
    """Return where to cut the vertical axis so that first steps flatten nothing, or None."""
    known = [c for c in curves if len(c.y) > 1]
    if not known:
        return None
    low = min(float(c.low.min()) for c in known)
    # After a twentieth of a run the slow part has begun.
    settled = max(float(c.high[c.x >= 0.05 * c.x.max()].max(initial=low)) for c in known)
    highest = max(float(c.high.max()) for c in known)
    cut = max(settled, goal or 0.0) + 0.05 * (settled - low)
    return cut if highest > cut + 0.5 * (cut - low) else None


def time_axis(longest_s: float) -> tuple[ChartAxis, float]:
    """Return the time axis in seconds, minutes or hours, and how many seconds its unit has."""
    for unit, length_s in (("hours", 3600.0), ("minutes", 60.0)):
        if longest_s >= 2 * length_s:
            return ChartAxis(f"wall time, {unit}", lambda v: f"{v:g}"), length_s
    return ChartAxis("wall time, seconds", lambda v: f"{v:g}"), 1.0


def token_axis() -> ChartAxis:
    """Return the token axis."""
    return ChartAxis("training tokens", format_count)
