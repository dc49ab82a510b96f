"""Do two plans compute the same? First at the same weights, then by what a training loses.

Both plans began with the same weights and read the same rows. The first batches are all at the
first weights, and each has its loss and the norm of every gradient: they lie within the bands that
the guard of a run allows, for every change.

- Where all that differs is exact, nothing else is asked: rounding grows from step to step, and
  where two trainings went says nothing of them.
- What is approximate is trained on. The two losses of a step are of the same batch, so their
  difference leaves out what the batch itself brings. By two one-sided tests its mean is shown to
  lie within a margin ("same"), or outside ("different"), or neither ("not shown"), with the steps
  that should show it. The first half of a training is left out, in which the plans have hardly
  begun to differ.

Measured with four layers of 96 features and 512 tokens a step, between two exact plans: nothing for
75 steps, then 0.03 nats from step to step, of which a step tells little of the next (a correlation
of 0.1); 25 of them came to 0.01 on average. So batches of ten steps and more stand for their mean.

Equal losses after some hundred steps are no proof of equal learning over thousands. What is
approximate is told as such, and a run compares its first step again (guard.py).
"""

from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean, median
from typing import Literal

from headrace.core.statistics import equivalence
from headrace.train.guard import ALL, MEAN, apart
from headrace.tuner.kinds import Kind
from headrace.tuner.readings import Reading

NATS = 0.01
"""The mean loss per token that an approximate change may gain or lose over the second half of a
training. Two seeds of a plan lie 0.008 apart after 400 steps."""
LEARNED = 0.02
"""Of what was learned meanwhile it may gain or lose as much, where that is less: a training that
has hardly begun hides what is lost later."""
BATCHES = 8
"""Means of steps in a row, of which the test takes the spread."""
LEAST_STEPS = 160
"""Of a training, below which nothing of the sort is shown: its half has batches of ten."""
WANTED_STEPS = 320
"""Of a training that goes on for it; the test then says how many more, once."""
LEVEL = 1 - 0.05 / 3
"""Of each of three tests at most: after the timed steps, and after each of two trainings on."""
NORMAL_MEDIAN = 0.6745
"""Median distance from the mean of a normal distribution, in standard deviations."""

Alike = Literal["same", "different", "not shown"]


@dataclass(frozen=True)
class Equality:
    """Whether two plans compute the same.

    Args:
        verdict: "not shown" where a training was too short to tell.
        reason: in words; "" where it is the same.
        loss: mean loss of the second less that of the first, in nats per token; None where there
            is none.
        noise: what another seed would move that by, likewise.
        enough: steps of a training that should show it; 0 where nothing is left to show.
    """

    verdict: Alike = "same"
    reason: str = ""
    loss: float | None = None
    noise: float | None = None
    enough: int = 0


def equality(one: Reading, two: Reading, kind: Kind) -> Equality:
    """What two readings say of it."""
    if not all(map(isfinite, two.losses)):
        return Equality("different", "its loss is not finite")
    n = min(len(one.losses), len(two.losses))  # steps that both took
    a, b = one.losses[:n], two.losses[:n]
    if not n:
        return Equality()
    off, noise = fmean(b) - fmean(a), seed_noise(a)
    if a == b and one.norms[:n] == two.norms[:n]:
        return Equality("same", "", 0.0, noise)
    why = _other_numbers(one, two, kind)
    if why or kind == "exact":
        return Equality("different" if why else "same", why, off, noise)
    return _trained(a, b, noise)


def _trained(a: list[float], b: list[float], noise: float) -> Equality:
    """By the second half of a training: two one-sided tests of its mean difference."""
    n, half = len(a), len(a) // 2
    learned = fmean(a[: max(1, n // 20)]) - fmean(a[half:])
    margin = min(NATS, LEARNED * learned)
    off = [y - x for x, y in zip(a[half:], b[half:], strict=True)]
    if n < LEAST_STEPS:
        told = f"{n} steps of a training are too few to show that it learns the same"
        return Equality("not shown", told, fmean(off), noise, WANTED_STEPS)
    if margin <= 0:
        told = f"nothing was learned in {n} steps, so that it learns the same is not shown"
        return Equality("not shown", told, fmean(off), noise, 2 * n)
    found = equivalence(off, margin, LEVEL, BATCHES)
    told = f"the mean loss of {len(off)} steps is off by {found.mean:+.4f} nats"
    told += f" ({found.mean - found.half:+.4f} to {found.mean + found.half:+.4f})"
    if found.verdict == "equal":
        return Equality("same", "", found.mean, noise)
    if found.verdict == "different":
        return Equality("different", f"{told}, and {margin:.3g} are allowed", found.mean, noise)
    told += f", so that it lies within {margin:.3g} is not shown"
    return Equality("not shown", told, found.mean, noise, max(2 * found.enough, n + n // 4))


def _other_numbers(one: Reading, two: Reading, kind: Kind) -> str:
    """What two plans do not compute alike at the same weights; "" if they do.

    A plan's limits are those of its own approximations. Two may err apart from each other.
    """
    if not (one.firsts and two.firsts):
        return "nothing was compared at the same weights"
    freed = {*one.freed, *two.freed}
    for batch, (wanted, found) in enumerate(zip(one.firsts, two.firsts, strict=False), start=1):
        if not (isfinite(wanted.total) and isfinite(found.total)):  # a skipped step is refused
            continue
        wanted, found = (
            f._replace(norms={n: v for n, v in f.norms.items() if n not in freed})
            for f in (wanted, found)
        )
        off = apart(found, wanted)
        share = {name: v / _limit(one, two, name, kind) for name, v in off.items()}
        worst = MEAN if share[MEAN] > 1 else max(share, key=share.__getitem__)
        if share[worst] <= 1:
            continue
        told = f"at the same weights its loss of batch {batch} is"
        if worst == MEAN:
            return f"{told} {found.loss:.6g} nats, and {wanted.loss:.6g}"
        other, first = (
            f.total if worst == ALL else f.norms.get(worst, 0.0) for f in (found, wanted)
        )
        return f"the gradient of {worst} has norm {other:.6g} in batch {batch}, and {first:.6g}"
    return ""


def _limit(one: Reading, two: Reading, name: str, kind: Kind) -> float:
    sides = [two] if kind == "exact" else [one, two]
    return sum(side.limits.get(name, side.limits[""]) for side in sides)


def seed_noise(losses: list[float]) -> float:
    """Standard deviation, in nats, of the mean losses' difference between two seeds; 0 for few.

    It is read off one plan's losses, whose scatter around their trend (second differences, by their
    median) is what other rows bring. Two means of n losses differ by its root(2/n).
    """
    bends = [a - 2 * b + c for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    if not bends:
        return 0.0
    scatter = median(map(abs, bends)) / NORMAL_MEDIAN / sqrt(6)
    return scatter * sqrt(2 / len(losses))
