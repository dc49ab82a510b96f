"""Turns on a clock that is made up: what is wanted, what fits, what is taken again."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.errors import RefusalKind
from headrace.core.statistics import order_abba
from headrace.tuner.judge import Rules, WorthMoreSteps
from headrace.tuner.paired_blocks import (
    ACCEPT,
    LOOK,
    MARGIN,
    PAIR_STEPS,
    Limit,
    SampleSize,
    take_blocks,
    take_visits,
    train_on,
    visit_steps,
)
from headrace.tuner.pairs import _compiled_otherwise
from headrace.tuner.readings import NOT_DONE, Reading

LIMIT = MARGIN["cuda"]


class Clocked:
    """A plan whose steps take so long; its runs are noted."""

    def __init__(self, step_s: float, now: list[float], noise: float = 0.0) -> None:
        self.step_s, self.now, self.noise = step_s, now, noise
        self.reading, self.runs = Reading(), list[tuple[int, int]]()
        self.taken = list[tuple[int, int]]()

    def train_to(self, steps: int) -> None:
        """Train until `steps` losses exist, and advance the clock by their time."""
        self.now[0] += max(0, steps - len(self.reading.losses)) * self.step_s
        self.reading.losses += [6.0] * (steps - len(self.reading.losses))

    def take_over(self, other: "Clocked") -> None:
        """Note which losses both had then."""
        self.taken.append((len(other.reading.losses), len(self.reading.losses)))

    def loss_with(self, other: "Clocked") -> float:
        """Note which losses both had then; a step's time."""
        self.now[0] += self.step_s
        self.taken.append((len(self.reading.losses), len(other.reading.losses)))
        return 6.25

    def run(self, blocks: int, steps: int) -> None:
        """On the clock; every other block is slower by `noise`."""
        self.runs.append((blocks, steps))
        self.now[0] += (1 + blocks * steps) * self.step_s
        for _ in range(blocks):
            self.reading.seconds.append(
                self.step_s * (1 + self.noise * (len(self.reading.seconds) % 2))
            )


def turns(a_s: float, b_s: float, left_s: float, worth: bool = True, **how: Any) -> Any:
    """Take blocks of two plans in turn, with `left_s` seconds on the clock, and return both."""
    now = [0.0]
    one, two = Clocked(a_s, now, how.get("noise", 0.0)), Clocked(b_s, now)
    two.reading.beside = one.reading
    size = (
        SampleSize(worth=WorthMoreSteps("exact", Rules(device="cuda")))
        if worth
        else how.get("size", ACCEPT)
    )
    take_blocks(one, two, size, lambda: left_s - now[0], how.get("share_s", left_s), LIMIT)
    return SimpleNamespace(one=one, two=two, reading=two.reading, spent_s=now[0])


def test_a_gain_goes_on_where_it_stands_and_what_shows_none_is_left() -> None:
    took = turns(0.2, 0.1, 600.0)
    assert took.reading.steps == 56 and not took.reading.screened
    assert took.one.runs == [(1, 3), (2, 3), (1, 3), (1, 11), (2, 11), (1, 11)]
    assert took.two.runs == [(2, 3), (2, 3), (2, 11), (2, 11)]
    assert len(took.reading.seconds) == len(took.one.reading.seconds) == 8
    took = turns(0.1, 0.2, 600.0)
    assert took.reading.steps == 12 and took.reading.screened
    took = turns(0.1, 0.2, 600.0, worth=False)  # asked for by name, all is measured
    assert took.reading.steps == 54 and len(took.reading.seconds) == len(order_abba(3)) // 2


@pytest.mark.parametrize(
    ("left_s", "least", "most"), [(600.0, 56, 56), (150.0, 20, 30), (60.0, 6, 11), (-20.0, 2, 2)]
)
def test_slow_steps_fit_the_time(left_s: float, least: int, most: int) -> None:
    """Check how many steps of 2.4 s and 2 s fit; a plan that is late has its fewest blocks."""
    took = turns(2.4, 2.0, left_s)
    assert least <= took.reading.steps <= most
    assert took.spent_s <= max(left_s, 18.0)
    if left_s == 600.0:
        assert turns(2.4, 2.0, left_s, share_s=100.0).spent_s <= 100.0
        look = turns(2.4, 2.0, left_s, share_s=10.0)  # whose 12 steps nothing is kept without
        assert look.reading.steps == LOOK and look.spent_s == pytest.approx(PAIR_STEPS * 2.2 + 0.2)
        assert turns(3.0, 2.0, left_s).reading.steps == LOOK, "so large a gain is clear"
        assert turns(0.3, 0.2, left_s).reading.steps >= 54, "brief steps cost nothing"


def test_what_a_gain_is_left_undecided_by_is_taken_once_more_without_a_new_build() -> None:
    whole = [(1, 3), (2, 3), (1, 3), (1, 11), (2, 11), (1, 11)]
    took = turns(1.0, 1.0, 600.0, noise=0.02)  # 1.010, and perhaps 1.004 or 1.016
    assert took.one.runs == [*whole, (1, 9), (2, 9), (2, 9), (1, 9)]
    assert took.reading.steps == 56 + 54 and len(took.reading.seconds) == 14
    assert turns(1.0, 1.0, 180.0, noise=0.02).one.runs == whole  # no time
    assert turns(1.0, 0.9, 600.0, noise=0.02).one.runs == whole  # it is sure
    assert turns(1.0, 1.05, 600.0, noise=0.02).one.runs == whole[:3]  # nor worth it
    assert turns(1.0, 1.0, 600.0, worth=False, noise=0.02).reading.steps == 54


@pytest.mark.parametrize(
    ("left_s", "most_s", "steps", "untrained_s"),
    [
        (600.0, 600.0, 320, 0.0),
        (240.0, 600.0, 160, 240.0),
        (600.0, 240.0, 160, 240.0),
        (200.0, 600.0, 0, 480.0),
        (600.0, 200.0, 0, 480.0),
        (-5.0, 600.0, 0, 480.0),
    ],
)
def test_a_training_goes_on_where_half_of_it_fits(
    left_s: float, most_s: float, steps: int, untrained_s: float
) -> None:
    """Check how many of 320 steps of 1 s and 0.5 s are trained, and what time was missing."""
    now = [0.0]
    one, two = Clocked(1.0, now), Clocked(0.5, now)
    two.reading.beside = one.reading
    wants: Any = SimpleNamespace(
        train_to=lambda found: 320 if len(found.losses) < 320 else 0, by_stretches=lambda _: False
    )
    train_on(one, two, SampleSize(worth=wants), lambda: left_s - now[0], most_s)
    assert len(one.reading.losses) == len(two.reading.losses) == steps
    assert two.reading.untrained_s == pytest.approx(untrained_s)
    assert now[0] <= max(0.0, left_s)


@pytest.mark.parametrize(
    ("left_s", "stretches", "untrained_s"), [(600.0, 10, 0.0), (120.0, 7, 14.4), (60.0, 0, 132.0)]
)
def test_stretches_begin_with_the_state_of_the_other(
    left_s: float, stretches: int, untrained_s: float
) -> None:
    """Check how many of 16.5 s fit; the plan that is behind catches up first.

    The judge here asks for 8 stretches, and then for two more.
    """
    now = [0.0]
    one, two = Clocked(0.5, now), Clocked(0.5, now)
    two.reading.beside = one.reading
    one.train_to(12)
    two.train_to(10)
    now[0] = 0.0

    def wanted(found: Reading) -> int:
        return 10 + 16 * 8 if len(found.lags) < 8 else 12 + 16 * 10 if len(found.lags) < 10 else 0

    wants: Any = SimpleNamespace(by_stretches=lambda found: found is two.reading, train_to=wanted)
    train_on(one, two, SampleSize(worth=wants), lambda: left_s - now[0], 600.0)
    ends = [12 + 16 * i + (i > 8) for i in range(1, stretches + 1)]
    assert one.taken == [(end, end) for end in ends], "losses with the weights of the other"
    again = [(141, 141)] if stretches > 8 else []
    assert two.taken == ([(12, 12), *again] if stretches else [])
    assert two.reading.lags == [0.25] * stretches and not one.reading.lags
    assert two.reading.untrained_s == pytest.approx(untrained_s, abs=0.1)
    assert now[0] <= left_s + 1


def test_a_visit_fits_its_share() -> None:
    def steps(step_s: float, room_s: float, size: SampleSize = ACCEPT) -> int:
        return visit_steps(step_s, 2, size, room_s, Limit(100.0))

    assert steps(0.1, 100.0) == 9 and steps(0.001, 100.0, SampleSize(block_s=0.1)) == 100
    assert steps(3.0, 22.0) == 3 and steps(3.0, -5.0) == 1
    worth = SampleSize(worth=WorthMoreSteps("exact", Rules()))
    assert steps(0.5, 22.0, worth) == 7 and steps(1.0, 22.0, worth) == 3  # others wait
    assert steps(3.0, 40.0, worth) == 3  # a look


def test_blocks_are_as_long_as_the_faster_plan_needs() -> None:
    size = SampleSize(block_s=0.1)
    took = turns(0.1, 0.002, 600.0, worth=False, size=size)
    assert took.two.runs[0] == (2, 50) and took.reading.steps == 6 * 50


def visits(left_s: float, *last: str, size: SampleSize = ACCEPT) -> tuple[Reading, list[Reading]]:
    """Two plans in visits; what the last one of the first is refused for."""
    asked: list[str] = []

    def visit(plan: Any, blocks: int, steps: int, share: float, train: int) -> Reading:
        asked.append(plan)
        first = plan == "first"
        if asked.count("first") == 2 and last:
            cut = last[0].startswith(NOT_DONE)
            return Reading(refused=last[0], refusal=RefusalKind.TIME if cut else "other")
        return Reading(
            seconds=[2.0 if first else 1.0] * blocks,
            steps=blocks * steps,
            ready_s=5.0,
            peak_bytes=10.0 * len(asked) if first else 7.0,
            losses=[1.0],
        )

    plans: Any = ("first", "second")
    return take_visits(visit, plans[0], plans[1], size, lambda: left_s)


def test_the_first_plan_is_visited_again_where_there_is_time_to_build_it() -> None:
    found, known = visits(60.0)
    assert found.beside is not None and len(known) == 1
    assert found.beside.seconds == [2.0] * 4 and found.seconds == [1.0] * 4
    assert (found.steps, found.beside.peak_bytes, found.ready_s) == (56, 30.0, 15.0)
    found, known = visits(4.0)
    assert found.beside is not None and not known
    assert (len(found.seconds), found.steps, found.beside.peak_bytes) == (2, 28, 10.0)
    found, known = visits(60.0, f"{NOT_DONE} 9 s")
    assert found.beside is not None and not found.beside.refused and not known
    assert len(found.beside.seconds) == 2 and found.steps == 28
    clear = SampleSize(worth=WorthMoreSteps("exact", Rules(device="cuda")))
    found, known = visits(60.0, size=clear)  # 26 steps of 2 s and 1 s would take longer than 30 s
    assert len(found.seconds) == 2 and found.steps == 28 and not known
    found, known = visits(60.0, "no room")
    assert found.beside is not None and found.beside.refused == "no room" and not known


def test_what_is_compiled_otherwise_is_told(plan: Any, change: Any) -> None:
    base = change(plan, "+torch_compile")
    for words, otherwise in (("+memory_budget", True), ("+chunked_mlp", False)):
        assert _compiled_otherwise(base, change(base, words)) == otherwise
