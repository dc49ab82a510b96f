"""What natural.py measures: changes of a plan, each timed in turn with the plan, in one process.

Both are built and warm before the process takes its turn (natural_gate.py), blocks of steps go
A B B A, and a change that is clearly behind the best one so far is left after a look at it.
"""

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from natural_gate import Gate

from headrace import train
from headrace.changes import changed
from headrace.cli import catalogue
from headrace.core.errors import HeadraceError
from headrace.core.plan import Plan
from headrace.core.statistics import order_abba, paired_ratio
from headrace.planner.candidates import Words
from headrace.trials.kinds import kind_of
from headrace.trials.readings import (
    LEFT_BYTES,
    Clock,
    Reading,
    flags_of,
    opened,
    read,
    wait,
    why,
)


@dataclass(frozen=True)
class Pace:
    """How much is timed.

    Args:
        block_s: that a block of steps lasts at least; a step that takes longer is a block.
        look: rounds of A B B A before a change may be left.
        more: rounds for those that are not.
        slow_s: a step from which on both are one round.
        heat_s: of untimed steps before.
    """

    block_s: float
    look: int
    more: int
    slow_s: float
    heat_s: float


PACES = {"cuda": Pace(0.06, 2, 2, 0.05, 0.15), "cpu": Pace(0.4, 2, 2, 1.0, 0.0)}
FREE, HOPELESS = 3, 2.5
"""Steps of a plan before its turn, of which the first compile; and how many times as long as the
run's own the last of them takes where a change is left at once."""
BEHIND = 0.97
"""Of the best speed so far, below which a change is left after a look."""
STAYS = ("+kept_memory",)
"""Words of what sets a process otherwise for good: glibc's limits are no longer its own choice when
they are put back. They are measured last."""
MOST_STEPS = 200
"""Of a block."""
STAGE, BEGUN, READY = "stage", "begun", "ready"
"""The key of how far a process came, in a reading's evidence, where it did not die; and what it
holds before the run's own plan is warm and after."""
ENTRIES = 256
"""Compiled versions of a function that torch keeps in a process: every change brings its own."""


def awake() -> None:
    """What a process does first: all is imported by then, and the device is found."""
    if torch.cuda.is_available():
        torch.cuda.init()


class Timed:
    """A plan that is built, and the seconds of its blocks."""

    def __init__(self, stack: ExitStack, plan: Plan, threads: int) -> None:
        self.build, self.micros = stack.enter_context(opened(plan, text=True, in_force=False))
        self.threads, self.index, self.step_s = threads, 0, math.inf
        self.seconds: list[float] = []

    def once(self) -> None:
        """A step that is not timed, but for what is planned with."""
        began_s = time.perf_counter()
        with self._own():
            self._step()
            wait(self.build)
        self.step_s = time.perf_counter() - began_s

    def run(self, blocks: int, steps: int) -> None:
        """Timed blocks, after a step that fills the queue of the device."""
        clock = Clock(self.build.device)
        with self._own():
            self._step()
            clock.mark()
            for _ in range(blocks * steps):
                self._step()
                clock.mark()
            seconds = clock.seconds()
        self.step_s = median(seconds)
        self.seconds += [median(seconds[i : i + steps]) for i in range(0, len(seconds), steps)]

    def _step(self) -> None:
        train.step(self.build, self.micros(self.index), self.index)
        self.index += 1

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Its flags are in force, and it takes no code that another plan compiled (pairs.py)."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with flags_of(self.build):
                yield
        finally:
            torch.set_num_threads(before)


def measure(
    plan: Plan, changes: Sequence[Words], gate: Gate, parts: Path, about: Mapping[str, Any],
    ends_s: float,
) -> Reading:  # fmt: skip
    """Time changes beside a plan; each that is done is a line of `parts` at once.

    Args:
        plan: the run's, with its folders.
        changes: what is still to be measured.
        gate: to the device.
        parts: the file.
        about: what each line begins with.
        ends_s: on the clock of all processes; no change begins later.
    """
    return read(lambda found: _measure(plan, changes, gate, parts, about, ends_s, found))


def _measure(
    plan: Plan, changes: Sequence[Words], gate: Gate, parts: Path, about: Mapping[str, Any],
    ends_s: float, found: Reading,
) -> None:  # fmt: skip
    found.evidence[STAGE] = BEGUN
    torch._dynamo.config.recompile_limit = ENTRIES
    torch._dynamo.config.accumulated_recompile_limit = 8 * ENTRIES
    with ExitStack() as stack:
        base = Timed(stack, plan, torch.get_num_threads())
        warm(base)
        found.evidence[STAGE] = READY
        on_gpu, best = base.build.device.type == "cuda", 1.0
        held = torch.cuda.memory_allocated() if on_gpu else 0
        for number, words in enumerate(changes, 1):
            if time.time() >= ends_s:
                return
            line: dict[str, Any] = {**about, "change": list(words)}
            try:
                after = changed(plan, words, catalogue())
                line["equality"] = kind_of(plan, after)
                with ExitStack() as own:
                    two = Timed(own, after, base.threads + number * on_gpu)
                    line |= beside(base, two, best, gate)
                best = max(best, 1 + line["gain"]["value"])
            except Exception as error:  # whatever it is, the row tells it
                line["refused"] = why(error)
                if not isinstance(error, HeadraceError | torch.OutOfMemoryError):
                    _append(parts, line)
                    raise
            two = after = None
            _append(parts, line)
            _forget(base, held, on_gpu)


def _forget(base: Timed, held: int, on_gpu: bool) -> None:
    """Give back what a change took, and compiled code where the base has none or it holds much."""
    gc.collect()
    large = on_gpu and torch.cuda.memory_allocated() > held + LEFT_BYTES
    if large or not base.build.compiled:
        torch._dynamo.reset()
        gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    if large and base.build.compiled:
        warm(base)


def _append(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def warm(one: Timed, than_s: float = math.inf) -> None:
    """Compile, and take two more steps; one that takes hopelessly long ends it."""
    for number in range(FREE):
        one.once()
        if number and one.step_s > HOPELESS * than_s:
            return


def beside(base: Timed, two: Timed, best: float, gate: Gate) -> dict[str, Any]:
    """What a change gains, by blocks in turn."""
    began_s = time.time()
    warm(two, base.step_s)
    pace, ready_s = PACES[two.build.device.type], time.time() - began_s
    base.seconds, two.seconds = [], []
    with gate.alone() as quiet:
        if seconds := hopeless(base, two):
            base.seconds, two.seconds = [seconds[0]], [seconds[1]]
        else:
            heat(base, two, pace.heat_s)
            in_turn(base, two, best, pace)
    ratio = paired_ratio(base.seconds, two.seconds)
    low, high = (ratio.value, ratio.value) if ratio.n < 2 else (ratio.low, ratio.high)
    return {
        "gain": {"low": low - 1, "value": ratio.value - 1, "high": high - 1, "n": ratio.n},
        "before_s": median(base.seconds), "after_s": median(two.seconds), "quiet": quiet,
        "ready_s": ready_s,
    }  # fmt: skip


def hopeless(base: Timed, two: Timed) -> tuple[float, float] | None:
    """Seconds of a step of both, where the change's takes so long that no block is worth it."""
    ones, others = list[float](), list[float]()
    two.once()  # what it may still compile or record is not of a step
    for _ in range(2):
        base.once()
        two.once()
        ones.append(base.step_s)
        others.append(two.step_s)
        if min(others) <= HOPELESS * max(ones):
            return None
    return max(ones), min(others)


def heat(base: Timed, two: Timed, heat_s: float) -> None:
    """Steps in turn until the device's clock is that of work."""
    ends_s = time.monotonic() + heat_s
    while time.monotonic() < ends_s:
        base.once()
        two.once()


def in_turn(base: Timed, two: Timed, best: float, pace: Pace) -> None:
    """Blocks A B B A: a look, and more where the change is not clearly behind the best."""
    slow = max(base.step_s, two.step_s) > pace.slow_s
    for rounds in (1, 1) if slow else (pace.look, pace.more):
        for name, run in groupby(order_abba(rounds)):
            one = base if name == "A" else two
            one.run(len(list(run)), max(1, min(MOST_STEPS, ceil(pace.block_s / one.step_s))))
        if paired_ratio(base.seconds, two.seconds).value < BEHIND * best:
            return
