"""Time changes of a plan for natural.py, in alternation with the plan, in one process.

As many changes as the device has memory for are built and warm before the process enters the gate
(natural_gate.py). So they are compared at one moment, and no drift of the host separates the first
remedy and the best change. Blocks of steps go A B C C B A. After a look, what is clearly behind the
best so far is left; the first remedy is timed to the end. A gain is the median of the ratios of
neighbouring blocks, which a block that is off as a whole does not move.
"""

import gc
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from natural_gate import Gate

from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.predict.candidates import Words
from headrace.train import train
from headrace.tuner.effects import effect_of
from headrace.tuner.readings import BEHIND as WAITED
from headrace.tuner.readings import (
    LEFT_BYTES,
    Reading,
    StepClock,
    flags_of,
    opened,
    read,
    wait,
    why,
)


@dataclass(frozen=True)
class Pace:
    """Set how much is timed.

    Args:
        block_s: least seconds of a block of steps; a step that takes longer is a block.
        look: rounds of two pairs before a change may be left.
        rounds: rounds of a change that is not left. Slow steps that no host holds up have half as
            many, after a look of one.
        slow_s: seconds above which a step is slow.
        heat_s: seconds of untimed steps before.
    """

    block_s: float
    look: int
    rounds: int
    slow_s: float
    heat_s: float


PACES = {"cuda": Pace(0.15, 2, 4, 0.05, 0.15), "cpu": Pace(0.4, 2, 4, 1.0, 0.0)}
FREE, HOPELESS = 3, 2.5
"""Steps of a plan before it is timed, of which the first compile; and the ratio to a step of the
run's own plan above which a change is left at once."""
BEHIND = 0.97
"""Share of the best speed below which a change is left after a look."""
STAYS = ("+kept_memory",)
"""Words of changes that alter a process for good, and so are measured last: glibc no longer chooses
its limits by itself once they were set and put back."""
EDGE_PAIRS = 8
"""Pairs from which on the outermost at both ends are left out of the interval; 8 pairs hold their
median within it 93 times of 100, 4 pairs within all of them 87 times."""
TOGETHER_BYTES = 10 << 30
"""Most bytes of changes that are built side by side; a larger one is built alone."""
MOST_STEPS = 200
"""The most steps of a block."""
LAST_S = 30.0
"""Seconds before the end in which no change is built beside others that are ready.

Building one may take as long.
"""
STAGE, BEGUN, READY = "stage", "begun", "ready"
"""The key in a reading's evidence that holds how far a process came, and its two values: before the
run's own plan is warm, and after."""
ENTRIES = 256
"""Most compiled versions of a function in a process; every change brings its own."""


def awake() -> None:
    """Import everything and find the device, before anything is measured."""
    if torch.cuda.is_available():
        torch.cuda.init()


class Timed:
    """Hold a plan that is built, and the seconds of its blocks."""

    def __init__(self, stack: ExitStack, plan: Plan, threads: int) -> None:
        self.build, self.micros = stack.enter_context(opened(plan, text=True, in_force=False))
        self.plan, self.threads, self.index, self.step_s = plan, threads, 0, math.inf
        self.words: Words = ()
        self.seconds: list[float] = []
        self.beside: list[float] = []
        """Seconds of the neighbouring blocks of the run's own plan."""
        self.ready_s, self.by_host = 0.0, False

    def once(self) -> None:
        """Run a step, and time it only to plan the blocks."""
        began_s = time.perf_counter()
        with self._own():
            self._step()
            wait(self.build)
        self.step_s = time.perf_counter() - began_s

    def run(self, blocks: int, steps: int) -> None:
        """Time blocks, after a step that fills the queue of the device."""
        clock = StepClock(self.build.device)
        with self._own():
            self._step()
            clock.mark()
            for _ in range(blocks * steps):
                self._step()
                clock.mark()
            seconds = clock.seconds()
        self.step_s = median(seconds)
        self.by_host = clock.cuda and clock.behind_s < WAITED * self.step_s
        self.seconds += [median(seconds[i : i + steps]) for i in range(0, len(seconds), steps)]

    def _step(self) -> None:
        train.step(self.build, self.micros(self.index), self.index)
        self.index += 1

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Put a plan's flags and thread count in force; by the count it uses its own code alone."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with flags_of(self.build):
                yield
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True)
class Wanted:
    """Hold what is to be measured of a run.

    Args:
        changes: the changes of its plan.
        peaks: the bytes that each change takes.
        first: the first remedy.
        alone: whether one change is built at a time, to find the one that ends the process.
    """

    changes: list[Words]
    peaks: list[float]
    first: Words
    alone: bool = False

    def groups(self, plan: Plan) -> list[list[Words]]:
        """Return the changes that are built side by side: they fit, and one of them records graphs.

        A build that records graphs drops what was recorded before, and on a CPU one plan could take
        code that another compiled.
        """
        side_by_side, taken = list[list[Words]](), list[float]()
        graphs = list[bool]()
        for words, peak in zip(self.changes, self.peaks, strict=True):
            records = "+cuda_graphs" in words or "cuda_graphs" in plan.techniques
            single = self.alone or plan.device == "cpu" or any(word in STAYS for word in words)
            room = (
                n
                for n, b in enumerate(taken)
                if b + peak <= TOGETHER_BYTES and not (records and graphs[n])
            )
            if single or (at := next(room, None)) is None:
                side_by_side.append([words])
                taken.append(math.inf if single else peak)
                graphs.append(records)
            else:
                side_by_side[at].append(words)
                taken[at] += peak
                graphs[at] |= records
        return side_by_side


def measure(
    plan: Plan, wanted: Wanted, gate: Gate, parts: Path, about: Mapping[str, Any], ends_s: float
) -> Reading:
    """Time changes beside a plan; each that is done is a line of `parts` at once.

    Args:
        plan: the run's, with its folders.
        wanted: what is still to be measured.
        gate: the gate to the device.
        parts: the file of the lines.
        about: the facts that each line begins with.
        ends_s: the end in seconds since the epoch; no change begins later.
    """
    return read(lambda reading: _Measuring(plan, wanted, gate, parts, about, ends_s).go(reading))


@dataclass
class _Measuring:
    """Measure the changes of one run in this process."""

    plan: Plan
    wanted: Wanted
    gate: Gate
    parts: Path
    about: Mapping[str, Any]
    ends_s: float
    begun: int = 0
    best: float = 1.0
    """The best speed so far, over that of the run's own plan."""

    def go(self, reading: Reading) -> None:
        """Measure all groups, until the end."""
        reading.evidence[STAGE] = BEGUN
        torch._dynamo.config.recompile_limit = ENTRIES
        torch._dynamo.config.accumulated_recompile_limit = 8 * ENTRIES
        with ExitStack() as stack:
            base = Timed(stack, self.plan, torch.get_num_threads())
            warm(base)
            reading.evidence[STAGE] = READY
            on_gpu, waiting = base.build.device.type == "cuda", deque(self.wanted.groups(self.plan))
            built = torch.cuda.memory_allocated() if on_gpu else 0
            while waiting and time.time() < self.ends_s:
                waiting.extendleft([words] for words in self.group(base, waiting.popleft())[::-1])
                _forget(base, built, on_gpu)

    def group(self, base: Timed, group: list[Words]) -> list[Words]:
        """Build, time and write some changes; return those that need all memory for themselves."""
        sides, later = list[Timed](), list[Words]()
        with ExitStack() as stack:
            for words in group:
                if sides and time.time() >= self.ends_s - LAST_S:  # what is ready is timed
                    break
                try:
                    sides.append(self.ready(stack, base, words))
                except Exception as error:
                    if sides and isinstance(error, torch.OutOfMemoryError):
                        later.append(words)
                    else:
                        self.refuse(words, error)
            if not sides:
                return later
            try:
                calm = time_alone(base, sides, self.wanted.first, self.best, self.gate)
            except torch.OutOfMemoryError as error:
                if len(sides) > 1:
                    return [*(side.words for side in sides), *later]
                self.refuse(sides[0].words, error)
                return later
            except Exception as error:
                if len(sides) > 1:  # they are built one by one in another process
                    raise
                self.refuse(sides[0].words, error)
                return later
            for side in sides:
                gain = gain_of(side.beside, side.seconds)
                self.best = max(self.best, 1 + gain["value"])
                self.write(
                    side.words,
                    equality=effect_of(self.plan, side.plan),
                    gain=gain,
                    before_s=median(side.beside),
                    after_s=median(side.seconds),
                    **calm,
                    ready_s=side.ready_s,
                    together=len(sides),
                )
        return later

    def ready(self, stack: ExitStack, base: Timed, words: Words) -> Timed:
        """Return a change that is built and warm."""
        began_s, on_gpu = time.time(), base.build.device.type == "cuda"
        self.begun += on_gpu
        with ExitStack() as own:
            with kept_code() if on_gpu else nullcontext():
                side = Timed(own, changed(self.plan, words, catalogue()), base.threads + self.begun)
            warm(side, base.step_s)
            stack.enter_context(own.pop_all())
        side.words, side.ready_s = words, time.time() - began_s
        return side

    def refuse(self, words: Words, error: Exception) -> None:
        """Write why a change cannot be measured; raise what may have harmed the process."""
        self.write(words, refused=why(error))
        if not isinstance(error, HeadraceError | torch.OutOfMemoryError):
            raise error

    def write(self, words: Words, **facts: Any) -> None:
        """Write a line of a change."""
        with self.parts.open("a") as out:
            out.write(json.dumps({**self.about, "change": list(words), **facts}) + "\n")


def _forget(base: Timed, built: int, on_gpu: bool) -> None:
    """Free what a change took; drop compiled code, too, if it holds much or the base has none."""
    gc.collect()
    large = on_gpu and torch.cuda.memory_allocated() > built + LEFT_BYTES
    if large or not base.build.compiled:
        torch._dynamo.reset()
        gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    if large and base.build.compiled:
        warm(base)


def warm(one: Timed, than_s: float = math.inf) -> None:
    """Compile and run the first steps of a plan; stop after one that is hopelessly slow."""
    for number in range(FREE):
        one.once()
        if number and one.step_s > HOPELESS * than_s:
            return


def time_alone(
    base: Timed, sides: Sequence[Timed], first: Words, best: float, gate: Gate
) -> dict[str, Any]:
    """Time plans beside the base while alone on the device; return how calm it was."""
    pace, running = PACES[base.build.device.type], list[Timed]()
    gc.collect()
    gc.freeze()  # what compilers left is not looked through in a timed step
    try:
        with gate.alone() as calm:
            began_s = time.monotonic()
            base.seconds = []
            for side in sides:
                side.seconds = []
                if slow := hopeless(base, side):
                    side.beside, side.seconds = [slow[0]], [slow[1]]
                else:
                    running.append(side)
            if running:
                heat([base, *running], pace.heat_s)
                time_blocks(base, running, first, best, pace)
            spent_s = time.monotonic() - began_s
    finally:
        gc.unfreeze()
    return {"quiet": calm.quiet, "others_s": calm.others_s, "turn_s": spent_s}


@contextmanager
def kept_code() -> Iterator[None]:
    """Keep the code that other plans compiled while a build inside runs.

    Otherwise the run's own plan would be compiled again beside every change, while all others wait.
    Each plan uses its own code, since each has its own thread count.
    """
    before = torch.compiler.reset
    torch.compiler.reset = lambda: None
    try:
        yield
    finally:
        torch.compiler.reset = before


def gain_of(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Return the median of the pairs' ratios less 1, and the ratios that it lies between."""
    gains = sorted(a / b - 1 for a, b in zip(before, after, strict=True))
    edge = len(gains) >= EDGE_PAIRS
    return {
        "low": gains[edge],
        "value": median(gains),
        "high": gains[-1 - edge],
        "n": len(gains),
    }


def hopeless(base: Timed, two: Timed) -> tuple[float, float] | None:
    """Return the seconds of a step of both, where the change is hopelessly slow; else None."""
    steps, others = list[float](), list[float]()
    two.once()  # what it may still compile or record is not of a step
    for _ in range(2):
        base.once()
        two.once()
        steps.append(base.step_s)
        others.append(two.step_s)
        if min(others) <= HOPELESS * max(steps):
            return None
    return max(steps), min(others)


def heat(sides: Sequence[Timed], heat_s: float) -> None:
    """Run steps of all sides for `heat_s`, so that the device reaches its clock under load."""
    ends_s = time.monotonic() + heat_s
    while time.monotonic() < ends_s:
        for side in sides:
            side.once()


def time_blocks(base: Timed, sides: Sequence[Timed], first: Words, best: float, pace: Pace) -> None:
    """Time blocks A B C C B A: a look, then more of the first remedy and of the best."""
    running, done = list(sides), 0
    while running:
        for one, blocks in groupby([base, *running, *running[::-1], base]):
            one.run(len(list(blocks)), max(1, min(MOST_STEPS, ceil(pace.block_s / one.step_s))))
        done += 1
        for side in running:
            side.beside = base.seconds[: len(side.seconds)]
        all_of = (base, *running)
        slow = max(o.step_s for o in all_of) > pace.slow_s and not any(o.by_host for o in all_of)
        if done >= (max(1, pace.rounds // 2) if slow else pace.rounds):
            return
        if done >= (1 if slow else pace.look):
            speeds = {id(one): median_ratio(one) for one in running}
            best = max(best, *speeds.values())
            running = [o for o in running if o.words == first or speeds[id(o)] >= BEHIND * best]


def median_ratio(side: Timed) -> float:
    """Return the median speed so far, over that of the base."""
    return 1 + gain_of(side.beside, side.seconds)["value"]
