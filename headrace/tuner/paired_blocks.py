"""Decide how much of two plans is measured, in which order, and how that fits the time left.

Blocks of steady steps go A B B A, over and over. Neighbouring blocks of a plan are taken without a
pause, so that only the first step of them is lost. After a first look (12 steps) a second plan that
shows no gain is left; another goes on to all the steps that are wanted. Ending early only where
nothing was gained makes no change look better than it is, so the look's blocks count among the
others. Where all of them leave a gain undecided, as many are taken once more and count with the
others: once, for each further extension would raise the chance of a false gain. A device that
drifts steadily moves no ratio of such pairs, and what it does to them is in their interval.

Once both are warm the time of their steps is known, and fewer are taken where they would not end in
time: first of a block, then of the rounds. Compiling cannot be cut short, so a part of the limit is
kept for it (`FITS`), and a plan that was delayed is still timed by the fewest blocks.

Two plans that do not fit together are timed in visits A B A, each of which builds its plan. Where a
training must show that they learn the same, the last visit goes on with it, and the second plan has
one more.

This module imports no torch: what takes the steps is given.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import ceil
from statistics import median
from typing import Any, Protocol

from headrace.core.statistics import Interval, accept, order_abba, paired_ratio
from headrace.plan.plan import Plan
from headrace.tuner.equality import STRETCH
from headrace.tuner.readings import Reading


class Worth(Protocol):
    """Decide whether a first look shows enough to measure on."""

    @property
    def aim(self) -> str:
        """Return the aim by which it is judged."""
        ...

    def __call__(self, reading: Reading) -> bool:
        """Return whether a second plan, whose reading has the first's beside it, is worth more."""
        ...

    def train_to(self, reading: Reading) -> int:
        """Return the steps that both should train to show a gain; 0 for no more."""
        ...

    @property
    def asks_stretches(self) -> bool:
        """Return whether the change is of the kind that stretches judge, where they can."""
        ...

    def by_stretches(self, reading: Reading) -> bool:
        """Return whether stretches that begin with the same state show that both learn the same."""
        ...

    @property
    def least_training(self) -> int:
        """Return the steps to which a visit trains at once, since a gain needs them; 0 for none."""
        ...


@dataclass(frozen=True)
class SampleSize:
    """Hold how much is measured of each plan, where there is time for it.

    Args:
        warm: steps before, which compile and are not timed.
        steps: timed in a block.
        rounds: of A B B A.
        block_s: the least that a block should last; short steps are taken more often.
        worth: asked after a first look; where it says no, that is all. None asks nobody.
    """

    warm: int = 3
    steps: int = 9
    rounds: int = 3
    block_s: float = 0.0
    worth: Worth | None = None

    @property
    def timed(self) -> int:
        """Return the steps of each plan that are timed."""
        return 2 * self.rounds * self.steps

    def longer(self, steps: int, step_s: float) -> int:
        """Return the steps of a block that lasts long enough."""
        return max(steps, min(MOST_STEPS, ceil(self.block_s / step_s)))

    def to_dict(self) -> dict[str, Any]:
        """Return what two readings of the same have in common, as JSON values."""
        aim = self.worth.aim if self.worth else ""
        rule = {"stretch": STRETCH} if self.worth and self.worth.asks_stretches else {}
        size = {"warm": self.warm, "steps": self.timed, "block_s": self.block_s, "aim": aim}
        return size | rule


ACCEPT = SampleSize()
"""Sample that is wanted: 54 steady steps of each plan. Where the clock allows fewer, a change is
accepted on those, but never on fewer than LOOK."""
LOOK_ROUNDS, LOOK_STEPS = 2, 3
LOOK = 2 * LOOK_ROUNDS * LOOK_STEPS
"""Steady steps of each plan in a look: the least that a change is accepted on, and enough to see
what is worth more of them (Megatron-Bridge's skills take 6 to 12)."""
PAIR_STEPS = 2 * LOOK + 2 * LOOK_ROUNDS + 1
"""Steps of two plans that such a look takes: consecutive blocks begin with a step that is not
timed."""
LEAST_STEPS = 3
"""Fewest steps of a block. Where time is too brief for as many, there are fewer rounds."""
MOST_STEPS, SHORTEST_S = 200, 1e-6
"""Most steps of a block of brief steps; and the fewest seconds that a step is taken to last."""
MARGIN = {"cuda": 0.005, "cpu": 0.02}
"""Smallest gain that counts, as a share of the step or of the peak, by device."""
FITS = 0.8
"""Share of its limit that a reading plans to take; the rest is for a plan that is delayed."""
STEADY = 0.9
"""Share of its limit that it plans to take once both plans are warm and timed: what they train on
for is known."""
TRAINED = 0.5
"""Share of its limit that a training may take which goes on to show that a change learns the
same."""
TRAININGS = 2
"""Times that it may go on: as far as a test needs at least, and as far as that test says."""
CLEAR, SLOW_S = 0.25, 30.0
"""A gain that a look alone decides, as a share, where more steps would take so many seconds: with
slow steps the time goes to what nobody has measured."""
TIMED = 0.3
"""Share of its limit that timed steps may take beyond a look where other trials wait: slow steps
would leave them no time."""


@dataclass(frozen=True)
class Limit:
    """Hold the seconds that a reading may take, on the clock that all processes share."""

    seconds: float = 3600.0
    began_s: float = field(default_factory=lambda: time.time())

    @property
    def spent_s(self) -> float:
        """Return the seconds since it was asked for."""
        return time.time() - self.began_s

    def left_s(self, share: float = FITS) -> float:
        """Return the seconds that are left of a share of the limit, to plan with."""
        return share * self.seconds - self.spent_s


# --- two that are in one process --------------------------------------------------------------


class WarmPlan(Protocol):
    """Hold a plan that is built and warm."""

    reading: Reading
    step_s: float

    def run(self, blocks: int, steps: int) -> None:
        """Take timed blocks, after one step that is not timed."""
        ...

    def train_to(self, steps: int) -> None:
        """Train on, untimed, until there were so many steps in all."""
        ...

    def take_over(self, other: Any) -> None:
        """Go on from another's state."""
        ...

    def loss_with(self, other: Any) -> float:
        """Return the next batch's loss with another's weights; it goes on from this one's state."""
        ...


def take_blocks(
    first: WarmPlan,
    second: WarmPlan,
    size: SampleSize,
    left_s: Callable[[], float],
    share_s: float,
    margin: float,
) -> None:
    """Take blocks of both into their readings: what is wanted, or what there is time for.

    Args:
        first: the first plan.
        second: the second.
        size: what is wanted.
        left_s: seconds that are left.
        share_s: seconds that timed steps may take where the second plan must be worth them; a look
            takes more where there are.
        margin: the gain that counts.
    """
    reading, other = second.reading, first.reading
    reading.seconds, other.seconds, reading.steps, reading.screened = [], [], 0, False
    began_s = left_s()
    ends_s = max(0.0, began_s - share_s) if size.worth else 0.0
    if size.worth is not None:
        _take_rounds(first, second, size, LOOK_ROUNDS, LOOK_STEPS, left_s())
        reading.screened = not size.worth(reading)
        if reading.screened or _clear(reading, size):
            return
    rounds = max(1, size.rounds - (reading.steps > 0))
    steps = ceil((size.timed - reading.steps) / (2 * rounds))
    _take_rounds(first, second, size, rounds, steps, left_s() - ends_s)
    spent_s = began_s - left_s()
    if _open(reading, size, margin) and left_s() - ends_s >= spent_s:
        _take_rounds(first, second, size, size.rounds, size.steps, left_s() - ends_s)


def _clear(reading: Reading, size: SampleSize) -> bool:
    """Return whether a look shows a gain in time so large that slow steps add nothing to it."""
    other = reading.beside
    assert size.worth is not None and other is not None
    both_s = median(other.seconds) + median(reading.seconds)
    brief = reading.steps < LOOK
    if brief or size.worth.aim == "memory" or (size.timed - reading.steps) * both_s < SLOW_S:
        return False
    return accept(ratio_of(other.seconds, reading.seconds), CLEAR) == "better"


def train_on(
    first: WarmPlan, second: WarmPlan, size: SampleSize, left_s: Callable[[], float], most_s: float
) -> None:
    """Train both on until it is shown whether they learn the same, where that is asked.

    What cannot be done in time by half is not begun. How many seconds are wanting is noted.

    Args:
        first: the first plan.
        second: the second.
        size: what is wanted; nothing is asked where a first look said no.
        left_s: seconds that are left.
        most_s: that it may take.
    """
    reading, other, ends_s = second.reading, first.reading, max(0.0, left_s() - most_s)
    if size.worth is None or reading.screened:
        return
    pair_s = max(first.step_s, SHORTEST_S) + max(second.step_s, SHORTEST_S)
    if stretches := size.worth.by_stretches(reading):
        pair_s += first.step_s / STRETCH  # for losses with the second's weights
    for _ in range(TRAININGS):
        more = size.worth.train_to(reading) - min(len(reading.losses), len(other.losses))
        fits = min(more, int((left_s() - ends_s) / pair_s))
        if more <= 0 or fits < more / 2:
            break
        steps = min(len(reading.losses), len(other.losses)) + fits
        if stretches:
            _train_in_stretches(first, second, fits // STRETCH)
        else:
            first.train_to(steps)
            second.train_to(steps)
        if fits < more:
            break
    more = size.worth.train_to(reading) - min(len(reading.losses), len(other.losses))
    reading.untrained_s = max(0, more) * pair_s


def _train_in_stretches(first: WarmPlan, second: WarmPlan, count: int) -> None:
    """Train both for so many stretches, each of which begins with the first's state.

    After each the first computes the loss of the next batch with the second's weights, and with its
    own, which is its next step.
    """
    taken = max(len(r.losses) for r in (first.reading, second.reading))
    first.train_to(taken)
    second.train_to(taken)
    second.take_over(first)
    for _ in range(count):
        taken += STRETCH
        first.train_to(taken)
        second.train_to(taken)
        loss = first.loss_with(second)
        first.train_to(taken + 1)
        second.reading.lags.append(loss - first.reading.losses[taken])


def ratio_of(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return a step's time of the first plan over the second's, from their alternating blocks."""
    return paired_ratio(first, second, trimmed=True)


def _open(reading: Reading, size: SampleSize, margin: float) -> bool:
    """Return whether a gain in time is asked for, was seen, and is undecided."""
    assert reading.beside is not None
    if size.worth is None or size.worth.aim == "memory" or not size.worth(reading):
        return False
    return accept(ratio_of(reading.beside.seconds, reading.seconds), margin) == "undecided"


def _take_rounds(
    first: WarmPlan, second: WarmPlan, size: SampleSize, rounds: int, steps: int, room_s: float
) -> None:
    """Take rounds of A B B A, as many and as long as there is room for, but one in any case.

    Neighbouring blocks of a plan are taken without a pause: only the first step of them is lost.
    """
    if steps < 1:
        return
    a_s, b_s = max(first.step_s, SHORTEST_S), max(second.step_s, SHORTEST_S)
    steps, fits = size.longer(steps, min(a_s, b_s)), 0.0
    while rounds:
        fits = (room_s - (rounds + 1) * a_s - rounds * b_s) / (2 * rounds * (a_s + b_s))
        if fits >= min(steps, LEAST_STEPS) or rounds == 1:
            break
        rounds -= 1
    if fits < 1 and second.reading.steps:
        return
    steps = max(1, int(min(steps, fits)))
    for name, consecutive in groupby(order_abba(rounds)):
        (first if name == "A" else second).run(len(list(consecutive)), steps)
    second.reading.steps += 2 * rounds * steps


# --- two that take turns in visits -----------------------------------------------------------


Visit = Callable[[Plan, int, int, float, int], Reading]
"""A function of a plan, blocks, steps of each that are wanted, the share of the seconds that are
left for timed ones, and the steps that it trains to in all. It returns a reading of that plan
alone."""


def visit_steps(step_s: float, blocks: int, size: SampleSize, room_s: float, limit: Limit) -> int:
    """Return the steps in a block of a visit: what is wanted, or what there is room for."""
    step_s = max(step_s, SHORTEST_S)
    if size.worth is not None:  # of three visits, which take a look together
        look_s = (1 + LOOK_STEPS * blocks) * step_s
        room_s = min(room_s, max(look_s, TIMED * limit.seconds * blocks / 8))
    return max(1, int(min(size.longer(size.steps, step_s), (room_s / step_s - 1) / blocks)))


def take_visits(
    visit: Visit,
    first: Plan,
    second: Plan,
    size: SampleSize,
    left_s: Callable[[], float],
    known: Sequence[Reading] = (),
) -> tuple[Reading, list[Reading]]:
    """Take visits A B A of two plans that do not fit together, and return the pair's reading.

    Args:
        visit: makes one.
        first: the plan as it is.
        second: with a change.
        size: what is wanted.
        left_s: seconds that are left.
        known: a visit of the first plan that has just been made.

    Returns:
        The second's reading, with the first's beside it; and the visit of the first that it ended
        with, if it did.
    """
    blocks = min(2, size.rounds)
    steps = ceil(size.timed / (2 * blocks))
    first_visits = [*known] or [visit(first, blocks, steps, 0.25, 0)]
    cut_off = first_visits[0].timed_out
    visited = first_visits[0]
    if not cut_off:
        trains = size.worth.least_training if size.worth is not None else 0
        fits = visited.seconds and trains * median(visited.seconds) < TIMED * left_s()
        visited = visit(second, 2 * blocks, steps, 0.5, trains if fits else 0)
    reading = _pair(first_visits, visited)
    if visited.refused or first_visits[0].refused:
        return reading, []
    if size.worth is not None and not size.worth(reading):
        reading.screened = True
        return reading, []
    if left_s() < first_visits[0].ready_s:  # no time to build it once more
        return reading, []
    if size.worth is not None and _clear(reading, size) and not size.worth.train_to(reading):
        return reading, []
    train, most_s = _visits_train(reading, size)
    if most_s > left_s():
        train, reading.untrained_s = 0, most_s
    last_visit = visit(first, blocks, steps, 0.25 if train else 1.0, train)
    if last_visit.timed_out:
        return reading, []
    if len(visited.losses) < train and not last_visit.refused:
        own = visit(second, 1, LEAST_STEPS, 0.1, train)
        if not own.refused:
            visited = replace(visited, losses=own.losses, norms=own.norms)
    untrained_s, reading = reading.untrained_s, _pair([*first_visits, last_visit], visited)
    reading.untrained_s = untrained_s or (0.0 if train else _visits_train(reading, size)[1])
    return reading, [last_visit] if not last_visit.refused else []


def _visits_train(reading: Reading, size: SampleSize) -> tuple[int, float]:
    """Return the steps that both must train to in visits of their own, and their seconds."""
    other = reading.beside
    steps = size.worth.train_to(reading) if size.worth and other else 0
    if not steps or other is None:
        return 0, 0.0
    is_trained = len(reading.losses) >= steps
    second_s = 0.0 if is_trained else reading.ready_s + steps * median(reading.seconds)
    return steps, steps * median(other.seconds) + second_s


def _pair(first_visits: Sequence[Reading], second: Reading) -> Reading:
    """Return the first's visits beside the second's; what both have."""
    seconds = [s for first in first_visits for s in first.seconds]
    n = min(len(seconds), len(second.seconds))
    whole = max(first_visits, key=lambda first: len(first.losses))
    bad = next((first for first in first_visits if first.refused), None)
    other = replace(
        whole,
        seconds=seconds if second.refused or bad else seconds[:n],
        refused=bad.refused if bad else "",
        refusal=bad.refusal if bad else None,
        steps=sum(first.steps for first in first_visits),
        ready_s=sum(first.ready_s for first in first_visits),
    )
    for name in ("peak_bytes", "reserved_bytes"):
        most = [v for first in first_visits if (v := getattr(first, name)) is not None]
        setattr(other, name, max(most, default=None))
    share = n / len(second.seconds) if second.seconds and not bad else 1
    return replace(
        second,
        seconds=second.seconds if bad else second.seconds[:n],
        beside=other,
        steps=min(other.steps or second.steps, int(share * second.steps)),
        ready_s=other.ready_s + second.ready_s,
    )
