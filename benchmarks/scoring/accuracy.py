"""Score predictions against what was measured: errors, coverage, order and regret.

Sequences that are empty, of two lengths or not positive where time is meant are errors of the
caller (ValueError). The interval of a share is Wilson's (1927); tau-b is Kendall's (1945).
"""

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist, median

from headrace.core.statistics import Interval, check_level, check_numbers, same_length


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Return the distance of each prediction as a share of what was measured, without its sign."""
    same_length(predicted, measured)
    if 0 in measured:
        raise ValueError("an error is no share of a measured 0")
    return [abs(p - m) / abs(m) for p, m in zip(predicted, measured, strict=True)]


def median_absolute_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the median of `relative_errors`: 0.25 is a quarter of what was measured."""
    return median(relative_errors(predicted, measured))


def coverage(intervals: Sequence[Interval], values: Sequence[float]) -> Interval:
    """Return the share of values inside their intervals, with Wilson's interval of that share."""
    same_length(intervals, values)
    inside = sum(i.holds(v) for i, v in zip(intervals, values, strict=True))
    return wilson(inside, len(values))


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Return a share and its interval, which holds for few trials and near 0 and 1 too."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} of {n}")
    check_level(level)
    share, z = successes / n, NormalDist().inv_cdf((1 + level) / 2)
    scale = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    return Interval(
        max(0.0, min(share, middle - half)), share, min(1.0, max(share, middle + half)), n
    )


def kendall_tau(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Kendall's tau-b of two rankings: 1 the same order, -1 the reverse, ties for neither.

    It is NaN when all of x, or all of y, are equal: that is no order.
    """
    same_length(x, y)
    check_numbers(*x, *y)
    order = ordered_x = ordered_y = 0
    for (x0, y0), (x1, y1) in combinations(zip(x, y, strict=True), 2):
        by_x, by_y = (x0 > x1) - (x0 < x1), (y0 > y1) - (y0 < y1)
        order += by_x * by_y
        ordered_x += by_x != 0
        ordered_y += by_y != 0
    return order / math.sqrt(ordered_x * ordered_y) if ordered_x and ordered_y else math.nan


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return how much slower the predicted best is than the measured best, as a share of it.

    It is 0 where the best was picked. Among several that are predicted equally fast the slowest
    counts: luck is no merit.

    Args:
        predicted: seconds of a step, per candidate; inf for one that was predicted not to run.
        measured: seconds of a step, per candidate; inf for one that did not run.
    """
    same_length(predicted, measured)
    check_numbers(*predicted, *measured)
    if not 0 < min(measured) < math.inf:
        raise ValueError(f"a time of {min(measured)}; times are above 0 and finite")
    best = min(predicted)
    picked = max(m for p, m in zip(predicted, measured, strict=True) if p == best)
    return picked / min(measured) - 1
