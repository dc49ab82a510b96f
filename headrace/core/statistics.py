"""Judge measurements: ratios with intervals, tests of equivalence, tests over seeds.

Two plans are timed as A B B A, again and again: what heats up, throttles or drifts steadily costs
both sides the same. Step times are ratios to each other, so all is done on logarithms. Within a
block the median stands for its steps, which one slow step does not move; a cost that falls on few
steps (every tenth, say) moves it as little, so for such a plan give the mean of each block instead.
The interval is Student's t over pairs of neighbouring blocks. A steady drift widens it, and leaves
its middle where it is. A block that is off as a whole widens it too; from `TRIMMED_PAIRS` on the
pairs furthest off may be left out at both ends, with the interval that belongs to such a mean.

A change of learning is tested while its seeds come in, and stops at the first that shows it: a
group-sequential test (Pocock 1977) whose error is shared among its looks by Bonferroni's rule, so
it holds however they depend on each other.

Left out: distributions fitted to step times, and bootstraps. With 4 to 12 blocks neither is better
than t. Sequences that are empty, of two lengths or not positive where time is meant are errors of
the caller (ValueError).

Left out for seeds: e-values, of which two pairs give 35 at most for a gain of ten spreads, where an
error of 1% needs 100; and spreads taken from earlier trainings, which would be a guess of this one.

Sources: the t distribution's finite sums are Abramowitz and Stegun 26.7.3 and 26.7.4; the interval
of a trimmed mean is Tukey's and McLaughlin's (1963).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, median
from typing import Literal

StepSeconds = float | Sequence[float]
"""A block of steps holds the seconds of each, or one number that stands for all."""
TRIMMED_PAIRS = 8
"""Least number of pairs with which a trimmed mean's interval holds its level; with 6 pairs an
interval of 95% holds 93%."""


@dataclass(frozen=True)
class Interval:
    """Hold an estimate and the two ends of its interval.

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
        """Return whether `value` lies in the interval, ends included."""
        return self.low <= value <= self.high


# --- two plans, timed in turn ----------------------------------------------------------------


def order_abba(rounds: int) -> list[Literal["A", "B"]]:
    """Return the order of blocks: A B B A, `rounds` times. It begins and ends with A."""
    if rounds < 1:
        raise ValueError(f"{rounds} rounds; 1 is the fewest")
    return ["A", "B", "B", "A"] * rounds


def paired_ratio(
    a: Sequence[StepSeconds],
    b: Sequence[StepSeconds],
    level: float = 0.95,
    *,
    trimmed: bool = False,
) -> Interval:
    """Return the time of a step in `a` over that in `b`: above 1, `b` is faster.

    Args:
        a: the blocks of A in the order in which they were measured, in seconds.
        b: the blocks of B; in an A B B A order block i of both are neighbours.
        level: confidence of the interval.
        trimmed: leave out a fifth of the pairs at both ends, where there are `TRIMMED_PAIRS`. With
            a tenth of the blocks off by up to 20% the interval of 10 pairs is half as wide.

    Returns:
        exp of the mean of the pairs' log ratios, with n pairs. One pair has the interval (0, inf):
        nothing is known of its noise. A trimmed mean has Tukey's and McLaughlin's interval.
    """
    same_length(a, b)
    logs = [_log(_middle(x)) - _log(_middle(y)) for x, y in zip(a, b, strict=True)]
    n = len(logs)
    if n == 1:
        return Interval(0.0, math.exp(logs[0]), math.inf, 1)
    mean, error, freedom = _mean_and_error(logs, trimmed=trimmed)
    half = t_two_sided(level, freedom) * error
    return Interval(math.exp(mean - half), math.exp(mean), math.exp(mean + half), n)


def _mean_and_error(values: Sequence[float], *, trimmed: bool) -> tuple[float, float, int]:
    """Return a mean of two values or more, its standard error, and that one's degrees of freedom.

    Args:
        values: in any order.
        trimmed: leave out a fifth of them at both ends, where there are `TRIMMED_PAIRS`.
    """
    n, ordered = len(values), sorted(values)
    cut = n // 5 if trimmed and n >= TRIMMED_PAIRS else 0
    kept = ordered[cut : n - cut]
    spread = _deviation([kept[0]] * cut + kept + [kept[-1]] * cut) * n / len(kept)
    return fmean(kept), spread / math.sqrt(n), len(kept) - 1


def drifted(first: StepSeconds, last: StepSeconds, limit: float) -> bool:
    """Return whether the A blocks at both ends differ by more than `limit`, a share (0.01 is 1%).

    If so, the device was not the same at both ends, and the ratio should be measured again.
    """
    return abs(_log(_middle(last)) - _log(_middle(first))) > math.log1p(limit)


def accept(ratio: Interval, margin: float) -> Literal["better", "worse", "undecided"]:
    """Return the verdict on a change, by the ratio of times before over after.

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
    """Return the steps after which a tuning has saved the seconds that it took.

    It is inf when a step is no faster.
    """
    saved_s = before_s - after_s
    return tuning_s / saved_s if saved_s > 0 else math.inf


@dataclass(frozen=True)
class NoWorse:
    """Hold whether a mean lies below a margin.

    Args:
        verdict: "no worse" below the margin, "worse" above it, or neither was shown.
        mean: mean of the differences.
        half: half-width of the mean's interval, at twice the error of one test.
        enough: how many differences should show that it is no worse, four times of five, if the
            mean is what it looks like, or half of the margin where it looks larger than that.
    """

    verdict: Literal["no worse", "worse", "not shown"]
    mean: float
    half: float
    enough: int


def no_worse(
    differences: Sequence[float],
    margin: float,
    level: float = 0.95,
    batches: int = 8,
    *,
    trimmed: bool = False,
) -> NoWorse:
    """Test whether the mean of a series is below a margin, by a non-inferiority test.

    Neighbours in time are alike, so the spread is that of the means of `batches` equal pieces
    (batch means); what is left over at the beginning is left out. The test is one of the two of
    Schuirmann (1987): a mean far below 0 is no worse either.

    Args:
        differences: the series in order, with at least as many differences as batches.
        margin: the mean that counts as worse.
        level: confidence of the test.
        batches: number of pieces of which the spread is taken.
        trimmed: leave out a fifth of the pieces at both ends, where there are `TRIMMED_PAIRS`. Of 8
            normal ones the error is then a fifth more than the level says.
    """
    check_level(level)
    check_numbers(*differences)
    size = len(differences) // batches
    if size < 1 or batches < 2 or margin <= 0:
        raise ValueError(f"{len(differences)} differences in {batches} batches within {margin}")
    kept = differences[len(differences) - size * batches :]
    means = [fmean(kept[i : i + size]) for i in range(0, len(kept), size)]
    mean, error, freedom = _mean_and_error(means, trimmed=trimmed)
    sure = t_two_sided(2 * level - 1, freedom)
    half = sure * error
    room = max(margin - mean, margin / 2)
    enough = math.ceil(len(kept) * ((sure + NormalDist().inv_cdf(POWER)) * error / room) ** 2)
    verdict = (
        "no worse" if mean + half < margin else "worse" if mean - half > margin else "not shown"
    )
    return NoWorse(verdict, mean, half, enough)


# --- seeds -----------------------------------------------------------------------------------

LOOKS = {2: 0.4, 3: 0.25, 5: 0.1}
"""Number of seeds -> share of the error that the test after them may spend; the last test spends
the rest."""
SPENT = 0.4
"""Share of the error that all looks together spend. Two plans' times may scatter unlike each other,
for which a pooled t test is not made, and two or three seeds cannot tell whether they do. Simulated
on a million changes that gain nothing (runs of one plan by so many percent, of the other by so
many), seven seeds accept 0.3% at 30% and 30%, 0.5% at 13% and 3%, 0.5% at 30% and 10%, and 0.9% at
30% and 5%. Where one scatters 15 times as widely as the other (30% and 2%) it is 1.4%. With 0.8 it
was 1.7% at 30% and 5%. Welch's degrees of freedom hold 1% everywhere, but with two seeds they show
half as many gains where both plans scatter alike."""
SEED_SPREAD = 0.02
"""Least standard deviation over seeds that is assumed for the logarithm of a time, however close a
few of them lie: two runs may end at the same evaluation by chance."""
PAIRED_SEEDS = 5
"""Least number of seeds with which a paired test is made beside that of two samples."""
MOST_SEEDS = 99
POWER = 0.8
"""Probability that the number of seeds or differences given as enough would show the change."""


def look_error(n: int, most: int, error: float) -> float:
    """Return how much of `error` the test after `n` of `most` seeds may spend; 0 means no test."""
    if not 0 < n <= most:
        raise ValueError(f"{n} of {most} seeds")
    if n < most:
        return SPENT * error * LOOKS.get(n, 0.0)
    return SPENT * error * (1 - sum(share for k, share in LOOKS.items() if k < most))


def seeds_better(
    ours: Sequence[float], theirs: Sequence[float], most: int, level: float = 0.99
) -> bool:
    """Return whether the test after these seeds shows that `ours` needs less time to the target.

    Ask after each seed, and stop at the first yes. The tests after 2, 3, 5 and all seeds share the
    error among them (`LOOKS`), so that all together accept one change in a hundred that does
    nothing, or fewer, where one plan scatters up to six times as widely as the other (`SPENT`). A
    change that halves the time is shown by two seeds in 46% and by three in all of 100,000
    simulated, where a run's time scatters by 5%; one that is 1.75 times as soon by three seeds in
    66%, where the runs of one plan scatter by 13% and of the other by 3%.

    Args:
        ours: time to the target, inf for a failure; seconds, steps or dollars.
        theirs: the other plan's times, with the same seeds in the same order.
        most: seeds that are tried at most.
        level: confidence of all tests together.
    """
    check_level(level)
    error = look_error(len(ours), most, 1 - level)
    return error > 0 and seeds_error(ours, theirs) < error


def seeds_error(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the one-sided probability that times look so good where nothing was gained.

    It is a t test of two samples on logarithms: with two seeds it has two degrees of freedom, where
    a test of pairs has one. What the runs of a pair have in common, as an hour in which the machine
    was slow, only makes it stricter. From `PAIRED_SEEDS` on the test of pairs stands beside it, and
    the better of the two counts at half of the error. A spread below `SEED_SPREAD` counts as that.

    A failed run took infinitely long, of which a t test knows nothing:

    - a seed with which only ours failed: the probability is 1, whatever the others say;
    - both failed: the pair tells nothing and is left out;
    - only theirs failed: a win without a size. The t test goes without the pair, a sign test over
      all pairs stands beside it, and the better of the two counts at half of the error.
    """
    pairs = _finished(ours, theirs)
    if any(o == math.inf for o, _ in pairs):
        return 1.0
    sized = [(o, t) for o, t in pairs if t != math.inf]
    by_size = _size_error(sized) if len(sized) > 1 else 1.0
    if len(sized) == len(pairs):
        return by_size
    wins = sum(o < t for o, t in pairs)
    by_sign = sum(math.comb(len(pairs), k) for k in range(wins, len(pairs) + 1)) / 2 ** len(pairs)
    return min(1.0, 2 * min(by_size, by_sign))


def seeds_ratio(
    ours: Sequence[float], theirs: Sequence[float], level: float = 0.95
) -> Interval | None:
    """Return their time over ours: above 1, `ours` is sooner; None where no seed has both.

    The interval is that of `seeds_error`'s test, over the seeds with which both came to the target;
    a single seed has the interval (0, inf).
    """
    check_level(level)
    sized = [pair for pair in _finished(ours, theirs) if math.inf not in pair]
    if not sized:
        return None
    n, mean = len(sized), fmean(_gains(sized))
    if n == 1:
        return Interval(0.0, math.exp(mean), math.inf, 1)
    tests = _tests(sized)
    inside = 1 - (1 - level) / len(tests)
    half = min(t_two_sided(inside, freedom) * error for error, freedom in tests)
    return Interval(math.exp(mean - half), math.exp(mean), math.exp(mean + half), n)


def seeds_enough(ours: Sequence[float], theirs: Sequence[float], level: float = 0.99) -> int | None:
    """Return how many seeds would show a gain of this size and spread, four times of five.

    It is None where nothing was gained, or more than `MOST_SEEDS` would be needed.
    """
    check_level(level)
    sized = [pair for pair in _finished(ours, theirs) if math.inf not in pair]
    gain = fmean(_gains(sized)) if sized else 0.0
    if gain <= 0:
        return None
    spread = _spread(sized) if len(sized) > 1 else SEED_SPREAD
    lucky = NormalDist().inv_cdf(POWER)
    for n in range(2, MOST_SEEDS + 1):
        sure = t_two_sided(1 - 2 * look_error(n, n, 1 - level), 2 * n - 2)
        if gain >= (sure + lucky) * spread * math.sqrt(2 / n):
            return n
    return None


def _finished(ours: Sequence[float], theirs: Sequence[float]) -> list[tuple[float, float]]:
    """Return the pairs of which at least one came to the target."""
    same_length(ours, theirs)
    for time in (*ours, *theirs):
        if time != math.inf:
            _log(time)
    return [pair for pair in zip(ours, theirs, strict=True) if min(pair) != math.inf]


def _gains(sized: Sequence[tuple[float, float]]) -> list[float]:
    return [_log(theirs) - _log(ours) for ours, theirs in sized]


def _spread(sized: Sequence[tuple[float, float]]) -> float:
    """Return the standard deviation of the logarithm of a time, pooled over both plans.

    It is at least `SEED_SPREAD`.
    """
    both = [_deviation([_log(time) for time in side]) for side in zip(*sized, strict=True)]
    return max(SEED_SPREAD, math.sqrt(fmean(s * s for s in both)))


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample of two or more.

    `statistics.stdev` computes it in fractions, which takes ten times as long.
    """
    mean = fmean(values)
    mean += fmean(value - mean for value in values)  # none is left where all are alike
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _tests(sized: Sequence[tuple[float, float]]) -> list[tuple[float, int]]:
    """Return the standard error of the mean gain, and its degrees of freedom, by each test."""
    n = len(sized)
    tests = [(_spread(sized) * math.sqrt(2 / n), 2 * n - 2)]
    if n >= PAIRED_SEEDS:
        own = max(SEED_SPREAD * math.sqrt(2), _deviation(_gains(sized)))
        tests.append((own / math.sqrt(n), n - 1))
    return tests


def _size_error(sized: Sequence[tuple[float, float]]) -> float:
    mean, tests = fmean(_gains(sized)), _tests(sized)
    p_values = []
    for error, freedom in tests:
        t = mean / error
        p_values.append(0.5 - math.copysign(_inside(abs(t), freedom), t) / 2)
    return min(1.0, len(tests) * min(p_values))


# --- Student's t -----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def t_two_sided(level: float, freedom: int) -> float:
    """Return the t so that Student's t lies in (-t, t) with probability `level`.

    It is 12.706 for a level of 0.95 and 1 degree of freedom.

    Args:
        level: a probability between 0 and 1.
        freedom: degrees of freedom, a whole number.
    """
    check_level(level)
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
    """Return the probability of (-t, t), t >= 0, as a finite sum over powers of a cosine."""
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


def _middle(block: StepSeconds) -> float:
    return median(block) if isinstance(block, Sequence) else block


def _log(time: float) -> float:
    if not 0 < time < math.inf:
        raise ValueError(f"a time of {time}; times are above 0 and finite")
    return math.log(time)


def check_numbers(*values: float) -> None:
    """Raise ValueError where a value is no number (NaN)."""
    if any(map(math.isnan, values)):
        raise ValueError("not a number (NaN)")


def same_length(x: Sequence[object], y: Sequence[object]) -> None:
    """Raise ValueError where sequences are empty, or of two lengths."""
    if not x or len(x) != len(y):
        raise ValueError(f"sequences of {len(x)} and {len(y)}; both need the same, and 1 at least")


def check_level(level: float) -> None:
    """Raise ValueError where a level of confidence does not lie between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"a level of {level}; it lies between 0 and 1")
