"""What measurements tell: ratios with intervals, tests over seeds, how right forecasts were.

Two plans are timed as A B B A, again and again: what heats up, throttles or drifts steadily costs
both sides the same. Step times are ratios to each other, so all is done on logarithms. Within a
block the median stands for its steps, which one slow step does not move; a cost that falls on few
steps (every tenth, say) moves it as little, so for such a plan give the mean of each block instead.
The interval is Student's t over pairs of neighbouring blocks. A steady drift widens it, and leaves
its middle where it is. A block that is off as a whole widens it too: then more blocks are needed,
and the answer until then is "undecided".

Left out: distributions fitted to step times, and bootstraps. With 4 to 12 blocks neither is better
than t. Sequences that are empty, of two lengths or not positive where time is meant are errors of
the caller (ValueError).

Sources: the t distribution's finite sums are Abramowitz and Stegun 26.7.3 and 26.7.4; the interval
of a share is Wilson's (1927); tau-b is Kendall's (1945).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from statistics import NormalDist, fmean, median, stdev
from typing import Literal

Block = float | Sequence[float]
"""A block of steps: the seconds of each, or one number that stands for all."""
NO_SPREAD = 1e-9
"""Logarithms of times that are closer than this were read off a coarse clock."""


@dataclass(frozen=True)
class Interval:
    """A number between two others.

    Args:
        low: the lower end.
        value: the best estimate.
        high: the upper end.
        n: how many observations it rests on.
    """

    low: float
    value: float
    high: float
    n: int

    def holds(self, value: float) -> bool:
        """Whether `value` lies inside, ends included."""
        return self.low <= value <= self.high


# --- two plans, timed in turn ----------------------------------------------------------------


def order_abba(rounds: int) -> list[Literal["A", "B"]]:
    """The order of blocks: A B B A, `rounds` times. It begins and ends with A."""
    if rounds < 1:
        raise ValueError(f"{rounds} rounds; 1 is the fewest")
    return ["A", "B", "B", "A"] * rounds


def paired_ratio(a: Sequence[Block], b: Sequence[Block], level: float = 0.95) -> Interval:
    """The time of a step in `a` over that in `b`: above 1, `b` is faster.

    Args:
        a: the blocks of A in the order in which they were measured, in seconds.
        b: those of B; in an A B B A order block i of both are neighbours.
        level: of the interval.

    Returns:
        exp of the mean of the pairs' log ratios, with n pairs. One pair has the interval (0, inf):
        nothing is known of its noise.
    """
    _same_length(a, b)
    logs = [_log(_middle(x)) - _log(_middle(y)) for x, y in zip(a, b, strict=True)]
    mean, n = fmean(logs), len(logs)
    if n == 1:
        return Interval(0.0, math.exp(mean), math.inf, 1)
    half = t_two_sided(level, n - 1) * stdev(logs) / math.sqrt(n)
    return Interval(math.exp(mean - half), math.exp(mean), math.exp(mean + half), n)


def drifted(first: Block, last: Block, limit: float) -> bool:
    """Whether the A blocks at both ends differ by more than `limit`, a share (0.01 is 1%).

    Then the device was not the same at both ends, and the ratio should be measured again.
    """
    return abs(_log(_middle(last)) - _log(_middle(first))) > math.log1p(limit)


def accept(ratio: Interval, margin: float) -> Literal["better", "worse", "undecided"]:
    """What a ratio of times before over after says of the change.

    Args:
        ratio: from `paired_ratio(before, after)`.
        margin: the gain that counts, a share (0.01 is 1%).

    Returns:
        "better" when the whole interval lies above 1 + margin, "worse" when it lies below
        1 / (1 + margin), else "undecided": too noisy, or too small a difference to count.
    """
    if margin < 0:
        raise ValueError(f"a margin of {margin}; 0 is the least")
    if ratio.low > 1 + margin:
        return "better"
    return "worse" if ratio.high < 1 / (1 + margin) else "undecided"


def break_even_steps(tuning_s: float, before_s: float, after_s: float) -> float:
    """Steps after which the seconds that tuning took are saved; inf when a step is no faster."""
    saved_s = before_s - after_s
    return tuning_s / saved_s if saved_s > 0 else math.inf


# --- seeds -----------------------------------------------------------------------------------


def seeds_better(ours: Sequence[float], theirs: Sequence[float], level: float = 0.99) -> bool:
    """Whether `ours` needs less time to the target than `theirs`, seed for seed.

    A one-sided t test on the logarithms of the pairs' ratios. A failed run took infinitely long,
    of which a t test knows nothing:

    - a seed with which only ours failed: not better, whatever the others say;
    - both failed: the pair tells nothing and is left out;
    - only theirs failed: a win without a size. The t test goes without the pair, a sign test over
      all pairs stands beside it, and one of them must be sure at half of the error; with fewer
      than two sizes the sign test is alone.

    Ratios that are all the same, off a coarse clock, are left to the sign test. It needs 5 seeds
    for a level of 0.95, and 7 for 0.99.

    Args:
        ours: time to the target, inf for a failure; seconds, steps or dollars.
        theirs: likewise, with the same seeds in the same order.
        level: 0.99 accepts one change in a hundred that does nothing.
    """
    _same_length(ours, theirs)
    _check_level(level)
    for time in (*ours, *theirs):
        if time != math.inf:
            _log(time)
    pairs = [(o, t) for o, t in zip(ours, theirs, strict=True) if min(o, t) != math.inf]
    if any(o == math.inf for o, _ in pairs):
        return False
    sized = [_log(t) - _log(o) for o, t in pairs if t != math.inf]
    failed, error = len(pairs) - len(sized), 1 - level
    by_sign = _sign_error(failed + sum(gain > NO_SPREAD for gain in sized), len(pairs))
    if len(sized) < 2 or stdev(sized) < NO_SPREAD:
        return by_sign < error
    t = fmean(sized) / (stdev(sized) / math.sqrt(len(sized)))
    by_size = 0.5 - math.copysign(_inside(abs(t), len(sized) - 1), t) / 2
    return min(by_size, by_sign) < error / 2 if failed else by_size < error


def _sign_error(wins: int, n: int) -> float:
    """The probability of that many wins or more of n when both sides are alike."""
    return sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n


# --- how right it was ------------------------------------------------------------------------


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """The distance of each prediction as a share of what was measured, without its sign."""
    _same_length(predicted, measured)
    if 0 in measured:
        raise ValueError("an error is no share of a measured 0")
    return [abs(p - m) / abs(m) for p, m in zip(predicted, measured, strict=True)]


def median_absolute_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The median of `relative_errors`: 0.25 is a quarter of what was measured."""
    return median(relative_errors(predicted, measured))


def coverage(intervals: Sequence[Interval], values: Sequence[float]) -> Interval:
    """The share of values that lie inside their intervals, with Wilson's interval of the share."""
    _same_length(intervals, values)
    inside = sum(i.holds(v) for i, v in zip(intervals, values, strict=True))
    return wilson(inside, len(values))


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """A share and its interval, which holds for few trials and near 0 and 1 too."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} of {n}")
    _check_level(level)
    share, z = successes / n, NormalDist().inv_cdf((1 + level) / 2)
    scale = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    return Interval(
        max(0.0, min(share, middle - half)), share, min(1.0, max(share, middle + half)), n
    )


def kendall_tau(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings: 1 the same order, -1 the reverse; ties count for neither.

    NaN when all of x, or all of y, are equal: that is no order.
    """
    _same_length(x, y)
    _check_numbers(*x, *y)
    order = ordered_x = ordered_y = 0
    for (x0, y0), (x1, y1) in combinations(zip(x, y, strict=True), 2):
        by_x, by_y = (x0 > x1) - (x0 < x1), (y0 > y1) - (y0 < y1)
        order += by_x * by_y
        ordered_x += by_x != 0
        ordered_y += by_y != 0
    return order / math.sqrt(ordered_x * ordered_y) if ordered_x and ordered_y else math.nan


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much slower the predicted best is than the measured best, as a share; 0 is the best pick.

    Of several that are predicted equally fast the slowest counts: luck is no merit.

    Args:
        predicted: seconds of a step, per candidate; inf for one that was said not to run.
        measured: likewise; inf for one that did not run.
    """
    _same_length(predicted, measured)
    _check_numbers(*predicted, *measured)
    _log(min(measured))
    best = min(predicted)
    picked = max(m for p, m in zip(predicted, measured, strict=True) if p == best)
    return picked / min(measured) - 1


# --- Student's t -----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def t_two_sided(level: float, freedom: int) -> float:
    """The t that a share `level` of the distribution lies within: 12.706 for 0.95 and 1 degree.

    Args:
        level: between 0 and 1.
        freedom: degrees of freedom, a whole number.
    """
    _check_level(level)
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom; 1 is the fewest")
    low, high = 0.0, math.pi / 2  # angles: t = sqrt(freedom) tan(angle)
    while low < (angle := (low + high) / 2) < high:
        if _inside(math.sqrt(freedom) * math.tan(angle), freedom) < level:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(low)


def _inside(t: float, freedom: int) -> float:
    """The probability of (-t, t), t not negative, as a finite sum over powers of a cosine."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


# --- checks ----------------------------------------------------------------------------------


def _middle(block: Block) -> float:
    return median(block) if isinstance(block, Sequence) else block


def _log(time: float) -> float:
    if not 0 < time < math.inf:
        raise ValueError(f"a time of {time}; times are above 0 and finite")
    return math.log(time)


def _check_numbers(*values: float) -> None:
    if any(map(math.isnan, values)):
        raise ValueError("not a number (NaN)")


def _same_length(x: Sequence[object], y: Sequence[object]) -> None:
    if not x or len(x) != len(y):
        raise ValueError(f"sequences of {len(x)} and {len(y)}; both need the same, and 1 at least")


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"a level of {level}; it lies between 0 and 1")
