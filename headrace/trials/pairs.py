"""Two plans, timed in turn, in processes of their own.

Blocks of steady steps go A B B A, again and again. Where both plans fit on the device they live in
one child process, each with its own weights, optimizer and loader, and only the blocks alternate;
where they do not, a process is built for each block. What heats up or throttles steadily costs both
the same, and `drifted` tells when it did not.

Both begin with the same weights and read the same rows, so that their losses can be compared step
by step; `judge.py` does, and says what came of a pair.

Flags of the process are set around each plan's blocks. Left out: reserved memory of two plans in
one process, which nothing can tell apart.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from headrace import train
from headrace.core.plan import Plan
from headrace.core.statistics import order_abba
from headrace.filled import check_active
from headrace.trials.readings import (
    NOT_DONE,
    OUT_OF_MEMORY,
    Clock,
    Reading,
    Worker,
    counted,
    flags_of,
    opened,
    peak,
    read,
    wait,
    why,
)


@dataclass(frozen=True)
class Size:
    """How much is measured of each plan.

    Args:
        warm: steps before, which compile and are not timed.
        steps: timed in a block, after one that is not.
        rounds: of A B B A.
    """

    warm: int = 3
    steps: int = 3
    rounds: int = 2

    @property
    def timed(self) -> int:
        """Steps of each plan that are timed."""
        return 2 * self.rounds * self.steps


HEAT_S = 3.0
"""A GPU's steps before the timed ones: its clock falls by 1 to 2% in the first seconds of work."""
SCREEN = Size()
"""12 steady steps: enough to see what is worth more (Megatron-Bridge's skills take 6 to 12)."""
ACCEPT = Size(steps=9, rounds=3)
"""54 steady steps: a change is kept on 50 or more."""


# --- in the child process --------------------------------------------------------------------


def time_pair(first: Plan, second: Plan, *, size: Size, text: bool = True) -> Reading:
    """The second's reading, with the first's `beside` it, from one process that holds both."""

    def go(found: Reading) -> None:
        other = found.beside = Reading()
        with ExitStack() as stack:
            held = _allocated()
            one = _Side(stack, first, other, text)
            between = _allocated()
            two = _Side(stack, second, found, text)
            two.warm(size.warm)  # before the first's: what is compiled now is proof of it alone
            own = _allocated() - between
            one.warm(size.warm)
            others = _allocated() - held - own
            _heat(one, two)
            for name in order_abba(size.rounds):
                (one if name == "A" else two).block(size.steps)
            one.end(beside_bytes=own + held)
            two.end(beside_bytes=others)

    return read(go)


def _heat(one: "_Side", two: "_Side") -> None:
    """Untimed steps in turn, as many of each, until the device is as warm as it stays."""
    ends_s = time.monotonic() + (HEAT_S if one.build.device.type == "cuda" else 0.0)
    while time.monotonic() < ends_s:
        one.block(1, timed=False)
        two.block(1, timed=False)


def time_alone(plan: Plan, *, size: Size, text: bool = True) -> Reading:
    """One block of a plan, from a process that holds nothing else."""

    def go(found: Reading) -> None:
        with ExitStack() as stack:
            side = _Side(stack, plan, found, text)
            side.warm(size.warm)
            side.block(size.steps)
            side.end(beside_bytes=0)
            if side.build.device.type == "cuda":
                found.reserved_bytes = float(torch.cuda.max_memory_reserved())

    return read(go)


class _Side:
    """A build in a process that may hold two."""

    def __init__(self, stack: ExitStack, plan: Plan, found: Reading, text: bool) -> None:
        self.plan, self.found, self.index = plan, found, 0
        self.numbers: list[Tensor] = []
        self.peak_bytes: float | None = None
        with _blamed(found):
            self.build, self.micros = stack.enter_context(opened(plan, text=text, in_force=False))

    def warm(self, steps: int) -> None:
        """Steps before the timed ones; techniques are asked for their proof after the first."""
        with _blamed(self.found), flags_of(self.build):
            self.step()
            active = check_active(self.build)
            self.found.evidence = {name: e.detail for name, e in active.items()}
            for _ in range(steps - 1):
                self.step()
            wait(self.build)

    def block(self, steps: int, *, timed: bool = True) -> None:
        """Timed steps, after one that fills the queue of the device."""
        clock = Clock(self.build.device)
        with _blamed(self.found), flags_of(self.build):
            if self.build.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.step()
            clock.mark()
            for _ in range(steps):
                self.step()
                clock.mark()
            seconds = clock.seconds()
            self.found.seconds += [median(seconds)] * timed
            if (most := peak(self.build)) is not None:
                self.peak_bytes = max(self.peak_bytes or 0.0, most)

    def step(self) -> None:
        """One more."""
        self.numbers.append(train.step(self.build, self.micros(self.index), self.index))
        self.index += 1

    def end(self, *, beside_bytes: int) -> None:
        """What the steps computed, and the peak without what else the process holds."""
        self.found.losses, self.found.norms, finite, _ = torch.stack(self.numbers).T.tolist()
        if not all(finite):
            self.found.refused = f"step {finite.index(0.0)} was not finite"
        if self.peak_bytes is not None and counted(self.plan):
            self.found.peak_bytes = self.peak_bytes - beside_bytes


@contextmanager
def _blamed(found: Reading) -> Iterator[None]:
    """An error is noted at the plan whose it is."""
    try:
        yield
    except Exception as error:
        found.refused = why(error)
        raise


def _allocated() -> int:
    """Bytes on the device; 0 on a CPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


# --- who asks it -----------------------------------------------------------------------------


class Measure(Protocol):
    """Takes a pair's reading: the second plan's, with the first's beside it."""

    def __call__(
        self, first: Plan, second: Plan, *, size: Size, together: bool, limit_s: float
    ) -> Reading:
        """Readings that are not done after `limit_s` are refused with that reason."""
        ...


def measure_with(worker: Worker, *, text: bool = True) -> Measure:
    """Pairs in one process of `worker` where both fit, else in one after the other."""

    def measure(
        first: Plan, second: Plan, *, size: Size, together: bool, limit_s: float
    ) -> Reading:
        ends_s = time.monotonic() + limit_s
        if together:
            found = worker.ask(time_pair, first, second, size=size, text=text, limit_s=limit_s)
            if not _crowded(found):
                return found
        whole, found = _apart(size), Reading(beside=Reading())
        for name in order_abba(whole.rounds):
            plan, into = (first, found.beside) if name == "A" else (second, found)
            assert into is not None
            if found.refused:
                break
            if into.refused:
                continue
            left_s = max(0.0, ends_s - time.monotonic())
            _add(into, worker.ask(time_alone, plan, size=whole, text=text, limit_s=left_s))
        return found

    return measure


def _crowded(found: Reading) -> bool:
    """Whether it may have failed because two plans were in one process, or the first did."""
    if found.beside is not None and found.beside.refused:
        return True
    broken = found.poisoned and bool(found.refused) and not found.refused.startswith(NOT_DONE)
    return broken or found.refused.startswith(OUT_OF_MEMORY)


def _apart(size: Size) -> Size:
    """As many steps in fewer processes, for each must build its plan."""
    rounds = (size.rounds + 1) // 2
    return Size(size.warm, -(-size.timed // (2 * rounds)), rounds)


def _add(into: Reading, more: Reading) -> None:
    """A block's reading joins those of its plan."""
    into.seconds += more.seconds
    into.losses, into.norms = into.losses or more.losses, into.norms or more.norms
    into.evidence, into.refused = more.evidence or into.evidence, more.refused
    for name in ("peak_bytes", "reserved_bytes"):
        held = [v for v in (getattr(into, name), getattr(more, name)) if v is not None]
        setattr(into, name, max(held, default=None))
