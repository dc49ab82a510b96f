"""Find jumps, rises and relapses in a series of losses or gradient norms."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median

NORMAL = 1.4826
"""Ratio of a normal deviation to its median absolute deviation."""
NEAR = 8
"""Steps that make one level of a series."""
NEWEST_STEPS = 2048
"""Newest steps in which jumps are looked for."""


@dataclass(frozen=True)
class Limits:
    """Define when a number jumps.

    Args:
        sigmas: deviations above the level before it.
        window: the most numbers before it that the deviation is taken from.
        fewest: the fewest of them.
    """

    sigmas: float
    window: int
    fewest: int


def finite(values: Sequence[float] | None) -> tuple[float, ...]:
    """Return the values that are finite."""
    return tuple(value for value in values or () if isfinite(value))


def jumps(values: Sequence[float], limits: Limits, least: float) -> int:
    """Count the numbers that lie far above those before them, and by `least` of their level.

    Deviations come from the median absolute difference between neighbours, so neither a trend nor
    the jumps themselves widen them. Numbers that jumped are left out of what later ones are
    compared with (as ZClip does, arXiv 2504.02507). What stays up for more than NEAR steps is a
    new level and no jump.
    """
    calm: list[float] = []
    count, up = 0, 0
    for value in values[-NEWEST_STEPS:]:
        level = median(calm[-NEAR:]) if calm else value
        if len(calm) >= limits.fewest:
            spread = deviation(calm[-limits.window :])
            if value > level + max(limits.sigmas * spread, least * abs(level)):
                count, up = count + 1, up + 1
                if up <= NEAR:
                    continue
                count, calm = count - up, []
        calm.append(value)
        up = 0
    return count


def deviation(values: Sequence[float]) -> float:
    """Return the deviation of one number, by the median absolute difference of neighbours.

    It is robust against outliers and leaves the trend out.
    """
    steps = [abs(b - a) for a, b in pairwise(values)]
    return median(steps) * NORMAL / 2**0.5 if steps else 0.0


def rises(values: Sequence[float], sigmas: float, least: float) -> bool:
    """Return whether the last quarter lies above the first, by `sigmas` and by `least` of it."""
    if len(values) < 16:
        return False
    quarter = len(values) // 4
    first, last = median(values[:quarter]), median(values[-quarter:])
    return last - first > max(sigmas * deviation(values), least * abs(first))


def relapsed(values: Sequence[float], sigmas: float, least: float, steps: int) -> int:
    """Count the numbers far above the lowest level before them, at least `steps` in a row.

    A level is the median of three neighbours. Far above is by so many deviations and by `least` of
    the level.
    """
    scatter = sigmas * deviation(values)
    best, count, run = float("inf"), 0, 0
    for index, value in enumerate((*values, -float("inf"))):
        if value > best + max(scatter, least * abs(best)):
            run += 1
        else:
            count, run = count + run * (run >= steps), 0
        best = min(best, median(values[max(0, index - 2) : index + 1] or (best,)))
    return count
