"""How much is measured of two plans, in which order, and how that fits the time that is left.

Blocks of steady steps go A B B A, again and again; neighbouring blocks of a plan are one run, so
that only the first step of it is lost. After a first look (12 steps) a second plan that shows no
gain is left; another goes on to all the steps that are wanted. Ending early only where nothing was
gained makes no change look better than it is, so the look's blocks count among the others. Where
all of them leave a gain undecided, as many are taken once more and count with the others: once, for
each more time is another chance for luck. A device that drifts steadily moves no ratio of such
pairs, and what it does to them is in their interval.

Once both are warm the time of their steps is known, and fewer are taken where they would not end
in time: first of a block, then of the rounds. Compiling cannot be cut short, so a part of the limit
is kept for it (`FITS`), and a plan that was late is still timed by the fewest blocks.

Two plans that do not fit together take turns in visits A B A, each of which builds its plan. Where
a training must show that they learn the same, the last visit goes on with it, and the second plan
has one more.

No torch here: what takes the steps is given.
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
from headrace.tuner.readings import Reading


class Worth(Protocol):
    """Whether a first look shows enough to measure on."""

    @property
    def aim(self) -> str:
        """By which it is judged."""
        ...

    def __call__(self, reading: Reading) -> bool:
        """Of a second plan's reading, with the first's beside it."""
        ...

    def train_to(self, reading: Reading) -> int:
        """Steps that both should train in all so that a gain can be kept; 0 for no more."""
        ...


@dataclass(frozen=True)
class Size:
    """How much is measured of each plan, where there is time for it.

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
        """Steps of each plan that are timed."""
        return 2 * self.rounds * self.steps

    def longer(self, steps: int, step_s: float) -> int:
        """Steps of a block that lasts long enough."""
        return max(steps, min(MOST_STEPS, ceil(self.block_s / step_s)))

    def plain(self) -> dict[str, Any]:
        """What two readings of the same have in common, as JSON values."""
        aim = self.worth.aim if self.worth else ""
        return {"warm": self.warm, "steps": self.timed, "block_s": self.block_s, "aim": aim}


ACCEPT = Size()
"""54 steady steps of each plan are wanted; where the clock allows fewer, a change is kept on
those, but never on fewer than LOOK."""
LOOK_ROUNDS, LOOK_STEPS = 2, 3
LOOK = 2 * LOOK_ROUNDS * LOOK_STEPS
"""12 steady steps of each plan: the least that a change is kept on, and enough to see what is worth
more of them (Megatron-Bridge's skills take 6 to 12)."""
PAIR_STEPS = 2 * LOOK + 2 * LOOK_ROUNDS + 1
"""Of two plans, that such a look takes: each run of blocks begins with one that is not timed."""
LEAST_STEPS = 3
"""Of a block; where time is too short for as many, there are fewer rounds."""
MOST_STEPS, SHORTEST_S = 200, 1e-6
"""Of a block of short steps; and seconds of a step, at least."""
MARGIN = {"cuda": 0.005, "cpu": 0.02}
"""The gain that counts, a share of the step or of the peak."""
FITS = 0.8
"""Of its limit a reading plans to take; the rest is for a plan that was late."""
TRAINED = 0.5
"""Of its limit that a training may take which goes on to show that a change learns the same."""
TRAININGS = 2
"""Times that it may go on: as far as a test needs at least, and as far as that says."""
TIMED = 0.3
"""Of its limit that timed steps may take beyond a look where others wait: slow steps would leave no
time."""


@dataclass(frozen=True)
class Limit:
    """Seconds that a reading may take, on the clock that all processes of a machine share."""

    seconds: float = 3600.0
    began_s: float = field(default_factory=lambda: time.time())

    @property
    def spent_s(self) -> float:
        """Since it was asked for."""
        return time.time() - self.began_s

    def left_s(self) -> float:
        """To plan with."""
        return FITS * self.seconds - self.spent_s


# --- two that are in one process --------------------------------------------------------------


class Side(Protocol):
    """A plan that is built and warm."""

    found: Reading
    step_s: float

    def run(self, blocks: int, steps: int) -> None:
        """So many timed blocks, after one step that is not timed."""
        ...

    def train_to(self, steps: int) -> None:
        """Train on, untimed, until it took so many steps in all."""
        ...


def take_turns(
    one: Side, two: Side, size: Size, left_s: Callable[[], float], share_s: float, margin: float
) -> None:
    """Blocks of both into their readings: what is wanted, or what there is time for.

    Args:
        one: the first plan.
        two: the second.
        size: what is wanted.
        left_s: seconds that are left.
        share_s: seconds that timed steps may take where the second plan must be worth them; a look
            takes more where there are.
        margin: the gain that counts.
    """
    found, other = two.found, one.found
    found.seconds, other.seconds, found.steps, found.screened = [], [], 0, False
    began_s = left_s()
    ends_s = max(0.0, began_s - share_s) if size.worth else 0.0
    if size.worth is not None:
        _turns(one, two, size, LOOK_ROUNDS, LOOK_STEPS, left_s())
        found.screened = not size.worth(found)
        if found.screened:
            return
    rounds = max(1, size.rounds - (found.steps > 0))
    steps = ceil((size.timed - found.steps) / (2 * rounds))
    _turns(one, two, size, rounds, steps, left_s() - ends_s)
    spent_s = began_s - left_s()
    if _open(found, size, margin) and left_s() - ends_s >= spent_s:
        _turns(one, two, size, size.rounds, size.steps, left_s() - ends_s)


def train_on(one: Side, two: Side, size: Size, left_s: Callable[[], float], most_s: float) -> None:
    """Train both on until it is shown whether they learn the same, where that is asked.

    What cannot be done in time by half is not begun; how many seconds are wanting is noted.

    Args:
        one: the first plan.
        two: the second.
        size: what is wanted; nothing is asked where a first look said no.
        left_s: seconds that are left.
        most_s: that it may take.
    """
    found, other, ends_s = two.found, one.found, max(0.0, left_s() - most_s)
    if size.worth is None or found.screened:
        return
    pair_s = max(one.step_s, SHORTEST_S) + max(two.step_s, SHORTEST_S)
    for _ in range(TRAININGS):
        more = size.worth.train_to(found) - min(len(found.losses), len(other.losses))
        fits = min(more, int((left_s() - ends_s) / pair_s))
        if more <= 0 or fits < more / 2:
            break
        steps = min(len(found.losses), len(other.losses)) + fits
        one.train_to(steps)
        two.train_to(steps)
        if fits < more:
            break
    more = size.worth.train_to(found) - min(len(found.losses), len(other.losses))
    found.untrained_s = max(0, more) * pair_s


def ratio_of(one: Sequence[float], two: Sequence[float]) -> Interval:
    """The time of a step of the first plan over the second's, from their blocks in turn."""
    return paired_ratio(one, two, trimmed=True)


def _open(found: Reading, size: Size, margin: float) -> bool:
    """Whether a gain in time is asked for, was seen, and may be one or not."""
    assert found.beside is not None
    if size.worth is None or size.worth.aim == "memory" or not size.worth(found):
        return False
    return accept(ratio_of(found.beside.seconds, found.seconds), margin) == "undecided"


def _turns(one: Side, two: Side, size: Size, rounds: int, steps: int, room_s: float) -> None:
    """Rounds of A B B A, as many and as long as there is room for; the first has one in any case.

    Neighbouring blocks of a plan are one run, so that only the first step of it is lost.
    """
    if steps < 1:
        return
    a_s, b_s = max(one.step_s, SHORTEST_S), max(two.step_s, SHORTEST_S)
    steps, fits = size.longer(steps, min(a_s, b_s)), 0.0
    while rounds:
        fits = (room_s - (rounds + 1) * a_s - rounds * b_s) / (2 * rounds * (a_s + b_s))
        if fits >= min(steps, LEAST_STEPS) or rounds == 1:
            break
        rounds -= 1
    if fits < 1 and two.found.steps:
        return
    steps = max(1, int(min(steps, fits)))
    for name, run in groupby(order_abba(rounds)):
        (one if name == "A" else two).run(len(list(run)), steps)
    two.found.steps += 2 * rounds * steps


# --- two that take turns in visits -----------------------------------------------------------


Visit = Callable[[Plan, int, int, float, int], Reading]
"""(plan, blocks, steps of each that are wanted, share of the seconds that are left for timed ones,
steps that it trains to in all) -> a reading of that plan alone."""


def visit_steps(step_s: float, blocks: int, size: Size, room_s: float, limit: Limit) -> int:
    """Steps in a block of a visit: what is wanted, or what there is room for."""
    step_s = max(step_s, SHORTEST_S)
    if size.worth is not None:  # of three visits, which take a look together
        look_s = (1 + LOOK_STEPS * blocks) * step_s
        room_s = min(room_s, max(look_s, TIMED * limit.seconds * blocks / 8))
    return max(1, int(min(size.longer(size.steps, step_s), (room_s / step_s - 1) / blocks)))


def take_visits(
    visit: Visit, first: Plan, second: Plan, size: Size, left_s: Callable[[], float],
    known: Sequence[Reading] = (),
) -> tuple[Reading, list[Reading]]:  # fmt: skip
    """Visits A B A of two plans that do not fit together; the pair's reading.

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
    ones = [*known] or [visit(first, blocks, steps, 0.25, 0)]
    late = ones[0].is_late
    two = ones[0] if late else visit(second, 2 * blocks, steps, 0.5, 0)
    found = _pair(ones, two)
    if two.refused or ones[0].refused:
        return found, []
    if size.worth is not None and not size.worth(found):
        found.screened = True
        return found, []
    if left_s() < ones[0].ready_s:  # no time to build it again
        return found, []
    train, most_s = _visits_train(found, size)
    if most_s > left_s():
        train, found.untrained_s = 0, most_s
    again = visit(first, blocks, steps, 0.25 if train else 1.0, train)
    if again.is_late:
        return found, []
    if train and not again.refused:
        own = visit(second, 1, LEAST_STEPS, 0.1, train)
        if not own.refused:
            two = replace(two, losses=own.losses, norms=own.norms)
    late_s, found = found.untrained_s, _pair([*ones, again], two)
    found.untrained_s = late_s or (0.0 if train else _visits_train(found, size)[1])
    return found, [again] if not again.refused else []


def _visits_train(found: Reading, size: Size) -> tuple[int, float]:
    """Steps that both must train to in visits of their own, and the seconds of these; 0 of none."""
    other = found.beside
    steps = size.worth.train_to(found) if size.worth and other else 0
    if not steps or other is None:
        return 0, 0.0
    both_s = median(other.seconds) + median(found.seconds)
    return steps, found.ready_s + steps * both_s


def _pair(ones: Sequence[Reading], two: Reading) -> Reading:
    """Visits of the first beside that of the second; what both have."""
    seconds = [s for one in ones for s in one.seconds]
    n = min(len(seconds), len(two.seconds))
    whole = max(ones, key=lambda one: len(one.losses))
    bad = next((one for one in ones if one.refused), None)
    other = replace(
        whole, seconds=seconds if two.refused or bad else seconds[:n],
        refused=bad.refused if bad else "", refusal=bad.refusal if bad else None,
        steps=sum(one.steps for one in ones), ready_s=sum(one.ready_s for one in ones),
    )  # fmt: skip
    for name in ("peak_bytes", "reserved_bytes"):
        held = [v for one in ones if (v := getattr(one, name)) is not None]
        setattr(other, name, max(held, default=None))
    share = n / len(two.seconds) if two.seconds and not bad else 1
    return replace(
        two, seconds=two.seconds if bad else two.seconds[:n], beside=other,
        steps=min(other.steps or two.steps, int(share * two.steps)),
        ready_s=other.ready_s + two.ready_s,
    )  # fmt: skip
