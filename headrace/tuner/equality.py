"""Judge whether two plans compute the same: at the same weights, then by a training's losses.

Both plans begin with the same weights and read the same rows. The first batches are all computed at
the first weights. Each has its loss and the norm of every gradient, which must lie within the bands
that the guard of a run allows. That is asked of every change.

- Where all that differs is exact, nothing else is asked: rounding errors grow from step to step,
  and the end of two trainings is no evidence.
- What is approximate is trained on. The two losses of a step are of the same batch, so their
  difference leaves out the variance of batches. A one-sided test shows that its mean lies below a
  margin ("same"), or above ("different"), or neither ("not shown"), with the steps that should
  show it. A lower loss is no reason against a change. The first half of a training is left out, in
  which the plans have hardly begun to differ.
- Longer is not surer: two trainings that differ by rounding drift apart, by 0.03 nats after 1,000
  steps of 160M parameters (equal_learning.jsonl), where 0.01 are allowed. What rounds the operands
  of products, anew in each step, does two things, and both show early. A gradient that points
  elsewhere learns less in every step, which the losses of `BRIEF_STEPS` show. Noise that it adds
  raises the loss at which a training settles, and it is in the gradients' squares at the same
  weights from the first batch. Where these differ by less than `NOISE`, a training of `BRIEF_STEPS`
  is enough. Of planted errors that judged right what keeps 3, 2 and 1 bits, and wrong a noise that
  has nothing to do with the numbers that it is added to: 0.05 nats came later. So other errors
  than of operands are trained for `LEAST_STEPS`.
- Two trainings drift apart before such a difference shows: at 1B parameters by 0.02 nats within 200
  steps. So where both plans are in one process, and the change rounds operands, the second takes
  over the first's weights and moments every `STRETCH` steps. Errors that would grow are gone then,
  and two are left, each with its limit. What rounding adds to the losses of these steps may be
  `NATS`: it is there from a stretch's first step on, where the weights are the same. What is
  learned less is seen without that: before the second takes over, the first computes
  one loss with the second's weights and one with its own. They may differ by `SLOWER` of what a
  stretch lowers the loss. A steep beginning makes of any difference a large one: at 1B parameters
  one of eight was 0.093 nats, and the others 0.002 at most. So it is a trimmed mean of them: what
  a stretch that is left out lost is in its own steps' losses, of which none is left out.
- Where weights or moments are kept rounded, the error stays from step to step, and a short training
  does not show it: bf16 weights of 60M parameters lost nothing in 320 steps and 0.02 to 0.03 nats
  in 1,000 (tuner_trials.jsonl). Such a change is trained for `STATE_STEPS`.

Measured with four layers of 96 features and 512 tokens a step, between two exact plans: no
difference for 75 steps, then 0.03 nats from step to step. A step predicts little of the next (a
correlation of 0.1), and the mean of 25 steps came to 0.01. So batches of ten steps and more stand
for their mean.

Equal losses after some hundred steps are no proof of equal learning over thousands. An approximate
change is reported as approximate, and a run compares its first step once more (guard.py).
"""

from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import fmean, median
from typing import Literal

from headrace.core.statistics import no_worse
from headrace.plan.technique import Effect, Rounds
from headrace.train.guard import ALL, MEAN, apart
from headrace.tuner.readings import Reading

NATS = 0.01
"""The mean loss per token that an approximate change may lose over the second half of a training.
Two seeds of a plan lie 0.008 apart after 400 steps."""
LEARNED = 0.02
"""Share of what was learned meanwhile that it may lose, where that is less than `NATS`: a
training that has hardly begun hides what is lost later."""
BATCHES = 8
"""Batch means of consecutive steps from which the test takes the spread."""
BRIEF_STEPS = 64
"""Steps of a training below which no equality is shown: the second half has batches of four."""
NOISE = 0.02
"""Share by which a change may raise the mean square of a batch's gradient at the same weights, and
be shown by a short training: so much more noise is a fiftieth of what a smaller batch would add."""
LEAST_STEPS = 160
"""Steps of a training below which no equality is shown of a change that adds more noise than that:
the second half has batches of ten."""
WANTED_STEPS = 320
"""Steps of a training that goes on to show it. The test then says once how many more are needed."""
STRETCH = 16
"""Steps of a training after which the second plan takes over the first's state."""
STRETCHES = 8
"""Stretches below which no equality is shown by them: one for each batch mean."""
SLOWER = 0.01
"""Share of its learning that an approximate change may lose. After t steps that are so many fewer,
a training whose loss falls by s nats while they double is 0.014 s behind, so within `NATS` where s
is 0.7 and less. Errors that stay, as numbers of a gradient that are always 0, show less than they
cost, since moments are taken over too: it is asked of operands alone, which round anew."""
SURE = 2.0
"""Standard deviations of what was learned by which the bound on a lag is narrower: other batches
move it."""
STATE_STEPS = 1000
"""Steps of a training below which nothing is shown of a change whose rounding stays in weights or
moments from step to step."""
LEVEL = 1 - 0.05 / 3
"""Level of each of three tests at most: after the timed steps, and after each of two longer
trainings."""
TRIMMED_LEVEL = 1 - 0.7 * (1 - LEVEL)
"""Level of the test of a trimmed mean, which of 8 and of 15 normal lags errs 1.2 and 1.35 times as
often as it says. Of lags that are skewed to one side (exponential) it errs in 12%, and a whole mean
in 8%."""
NORMAL_MEDIAN = 0.6745
"""Median distance from the mean of a normal distribution, in standard deviations; no unit."""

Alike = Literal["same", "different", "not shown"]


@dataclass(frozen=True)
class Equality:
    """Hold whether two plans compute the same.

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


def least_steps(rounding: Rounds, noise: float = 0.0, *, together: bool = False) -> int:
    """Return the steps of a training below which no equality is shown.

    Args:
        rounding: what the change rounds.
        noise: share by which it raises the gradients' mean square; 0 where it is not known yet.
        together: both plans are in one process, so that one can take over the other's state.
    """
    if rounding == "state":
        return STATE_STEPS
    if together and rounding == "operands" and noise < NOISE:
        return STRETCH * STRETCHES
    return BRIEF_STEPS if rounding == "operands" and abs(noise) < NOISE else LEAST_STEPS


def by_stretches(one: Reading, two: Reading) -> bool:
    """Return whether stretches from the same state show that what rounds operands learns the same.

    Noise that a change adds raises the loss at which a training settles, and that takes longer.
    Smaller gradients have no noise more.
    """
    return two.shares_state and added_noise(one, two) < NOISE


def added_noise(one: Reading, two: Reading) -> float:
    """Return by which share the second's gradients are larger in the mean square; inf for none.

    Rounds errors that have nothing to do with a gradient add their squares to its own. They are
    of the first batches, at the same weights.
    """
    pairs = zip(one.firsts, two.firsts, strict=False)
    ratios = [(b.total / a.total) ** 2 for a, b in pairs if a.total and isfinite(b.total)]
    return fmean(ratios) - 1 if ratios else inf


def equality(one: Reading, two: Reading, effect: Effect, rounding: Rounds = "other") -> Equality:
    """Return whether two readings show that their plans compute the same.

    Args:
        one: the plan as it is.
        two: with the change.
        effect: what the change does to learning.
        rounding: what it rounds.
    """
    if not all(map(isfinite, (*two.losses, *two.lags))):
        return Equality("different", "its loss is not finite")
    n = min(len(one.losses), len(two.losses))  # steps that both took
    a, b = one.losses[:n], two.losses[:n]
    if not n:
        return Equality()
    off, noise = fmean(b) - fmean(a), seed_noise(a)
    if a == b and one.norms[:n] == two.norms[:n]:
        return Equality("same", "", 0.0, noise)
    why = _other_numbers(one, two, effect)
    if why or effect == "exact":
        return Equality("different" if why else "same", why, off, noise)
    if rounding == "operands" and by_stretches(one, two):
        return _kept_up(a, b, two.lags)
    return _trained(a, b, noise, least_steps(rounding, added_noise(one, two)))


def _trained(a: list[float], b: list[float], noise: float, least: int) -> Equality:
    """Judge by the second half of a training, with a one-sided test of its mean difference."""
    n, half = len(a), len(a) // 2
    learned = fmean(a[: max(1, n // 20)]) - fmean(a[half:])
    margin = min(NATS, LEARNED * learned)
    differences = [y - x for x, y in zip(a[half:], b[half:], strict=True)]
    if n < least:
        reason = f"{n} steps of a training are too few to show that it learns the same"
        wanted = least if least == BRIEF_STEPS else max(least, WANTED_STEPS)
        return Equality("not shown", reason, fmean(differences), noise, wanted)
    if margin <= 0:
        reason = f"nothing was learned in {n} steps, so that it learns the same is not shown"
        return Equality("not shown", reason, fmean(differences), noise, 2 * n)
    test = no_worse(differences, margin, LEVEL, BATCHES)
    reason = f"the mean loss of {len(differences)} steps is off by {test.mean:+.4f} nats"
    reason += f" ({test.mean - test.half:+.4f} to {test.mean + test.half:+.4f})"
    if test.verdict == "no worse":
        return Equality("same", "", test.mean, noise)
    if test.verdict == "worse":
        return Equality("different", f"{reason}, and {margin:.3g} are allowed", test.mean, noise)
    reason += f", so that it loses less than {margin:.3g} is not shown"
    return Equality("not shown", reason, test.mean, noise, max(2 * test.enough, n + n // 4))


def _kept_up(a: list[float], b: list[float], lags: list[float]) -> Equality:
    """Judge by stretches that began with the same state: what is added, and what is not learned.

    It gives no loss: what is added is no difference of two trainings.

    Args:
        a: losses of the first plan. The last are those of the stretches, and between two trainings
            of them of one step more, which begins with the same state too.
        b: the second's, of the same steps.
        lags: nats by which the first's loss is higher with the second's weights after a stretch.
    """
    n, count, steps = len(a), len(lags), STRETCH * len(lags)
    if count < STRETCHES:
        reason = f"{steps} steps from the same weights are too few to show that it learns the same"
        return Equality("not shown", reason, enough=n + STRETCH * (STRETCHES - count))
    run, added = a[-steps:], [y - x for x, y in zip(a[-steps:], b[-steps:], strict=True)]
    scatter = SURE * seed_noise(run) * sqrt(count)  # of two means of so few losses
    learned = fmean(run[:STRETCH]) - fmean(run[-STRETCH:])
    if learned <= scatter:
        reason = f"hardly anything was learned in {steps} steps, so that it learns the same is not"
        return Equality("not shown", f"{reason} shown", enough=n + steps)
    least, each, most = (
        amount / (count - 1) for amount in (learned - scatter, learned, learned + scatter)
    )
    more = no_worse(added, NATS, LEVEL, BATCHES)
    pieces = count if count < 2 * BATCHES else BATCHES  # none is left out
    less = no_worse(lags, SLOWER * least, TRIMMED_LEVEL, pieces, trimmed=True)
    share, half = less.mean / each, less.half / each
    reason = f"in {steps} steps from the same weights it adds {more.mean:+.4f} nats"
    reason += f" ({more.mean - more.half:+.4f} to {more.mean + more.half:+.4f}) and learns"
    reason += f" {share:.2%} less ({share - half:.2%} to {share + half:.2%})"
    allowed = f"{NATS:g} nats and {SLOWER:.0%} are allowed"
    if more.verdict == less.verdict == "no worse":
        return Equality()
    if more.verdict == "worse" or less.mean - less.half > SLOWER * most:
        return Equality("different", f"{reason}, and {allowed}")
    reason += f"; {allowed}, and that it keeps to them is not shown"
    wanted = max(more.enough, STRETCH * less.enough)
    return Equality("not shown", reason, enough=max(n + n // 4, n - steps + wanted))


def _other_numbers(one: Reading, two: Reading, effect: Effect) -> str:
    """Return what two plans compute differently at the same weights; "" if nothing.

    A plan's limits are those of its own approximations. Two may err apart from each other.
    """
    if not (one.firsts and two.firsts):
        return "nothing was compared at the same weights"
    freed = {*one.freed, *two.freed}
    for batch, (own, other) in enumerate(zip(one.firsts, two.firsts, strict=False), start=1):
        if not (isfinite(own.total) and isfinite(other.total)):  # a skipped step is refused
            continue
        own, other = (
            f._replace(norms={n: v for n, v in f.norms.items() if n not in freed})
            for f in (own, other)
        )
        off = apart(other, own)
        share = {name: v / _limit(one, two, name, effect) for name, v in off.items()}
        worst = MEAN if share[MEAN] > 1 else max(share, key=share.__getitem__)
        if share[worst] <= 1:
            continue
        reason = f"at the same weights its loss of batch {batch} is"
        if worst == MEAN:
            return f"{reason} {other.loss:.6g} nats, and {own.loss:.6g}"
        other, first = (f.total if worst == ALL else f.norms.get(worst, 0.0) for f in (other, own))
        return f"the gradient of {worst} has norm {other:.6g} in batch {batch}, and {first:.6g}"
    return ""


def _limit(one: Reading, two: Reading, name: str, effect: Effect) -> float:
    sides = [two] if effect == "exact" else [one, two]
    return sum(side.limits.get(name, side.limits[""]) for side in sides)


def seed_noise(losses: list[float]) -> float:
    """Return the standard deviation of two seeds' mean losses' difference, in nats; 0 for few.

    It is read off one plan's losses, whose scatter around their trend (second differences, by their
    median) is what other rows bring. Two means of n losses differ by its root(2/n).
    """
    bends = [a - 2 * b + c for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    if not bends:
        return 0.0
    scatter = median(map(abs, bends)) / NORMAL_MEDIAN / sqrt(6)
    return scatter * sqrt(2 / len(losses))
