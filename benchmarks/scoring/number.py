"""Make a number with its count, its interval and what stands beside it."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from headrace.core.statistics import Interval
from scoring.accuracy import wilson
from scoring.rows import Spread

Number = dict[str, Any]
"""A number as a dictionary: its "value", its count "n", and further facts."""
NORMAL_95 = 1.96
"""Half the width of a 95% interval of a normal distribution, in standard errors."""
LEAST_ERROR = 1e-9
"""The least error of a repeat where repeats are weighted, as a share of a step.

An interval without a width would weigh infinitely.
"""


def as_number(value: float, n: int, **more: Any) -> Number:
    return {"value": value, "n": n, **more} if n else {"value": None, "n": 0, **more}


def as_share(hits: int, n: int, **more: Any) -> Number:
    return as_interval(wilson(hits, n), **more) if n else as_number(0, 0, **more)


def as_interval(interval: Interval, **more: Any) -> Number:
    return as_number(interval.value, interval.n, low=interval.low, high=interval.high, **more)


def beside_retracted(gone: Sequence[float], standing: Sequence[float]) -> Number:
    """Return how many rows were retracted, and the mean with them."""
    every = [*standing, *gone]
    with_them = {"with_retracted": as_number(fmean(every), len(every))} if gone else {}
    return {"retracted": len(gone), **with_them}


def pooled(spreads: list[Spread]) -> Spread:
    """Return the inverse-variance mean of repeats; half an interval is the error of a row.

    Repeats that contradict each other widen it, by Birge's ratio (Phys. Rev. 40, 207, 1932).
    """
    if len(spreads) == 1:
        return spreads[0]
    errors = [max((spread.high - spread.low) / 2, LEAST_ERROR) for spread in spreads]
    weights = [error**-2 for error in errors]
    value = sum(w * spread.value for w, spread in zip(weights, spreads, strict=True)) / sum(weights)
    off = [(spread.value - value) / e for e, spread in zip(errors, spreads, strict=True)]
    birge = NORMAL_95 * (sum(o * o for o in off) / (len(spreads) - 1)) ** 0.5
    half = max(1.0, birge) * sum(weights) ** -0.5
    return Spread(low=value - half, value=value, high=value + half)


def as_mean(
    spreads: list[Spread], worst: Callable[[list[float]], float], n: int, **more: Any
) -> Number:
    if not spreads:
        return as_number(0, 0, **more)
    values, low, high = (
        [m.value for m in spreads],
        min(m.low for m in spreads),
        max(m.high for m in spreads),
    )
    return as_number(fmean(values), n, low=low, high=high, worst=worst(values), **more)


def as_errors(errors: list[float], middle: Callable[[list[float]], float], **more: Any) -> Number:
    if not errors:
        return as_number(0, 0, **more)
    p95 = sorted(errors)[math.ceil(0.95 * len(errors)) - 1]
    return as_number(middle(errors), len(errors), p95=p95, worst=max(errors), **more)
