"""Time two plans in alternation, in processes of their own: a pair costs one reading.

Both are built, compiled and warmed once, in one child process where both fit on the device, each
with its own weights, optimizer and loader. Then their blocks alternate (paired_blocks.py), and the
process itself sees whether the second is worth all the steps. Where they do not fit, a process is
built for each visit. Where the next pair begins with the plan that the last one ended with, that
visit serves both.

Both begin with the same weights and read the same rows. Their first steps have a learning rate of
0: each is another batch at the same weights, after some of them through whatever was compiled or
recorded meanwhile. They are compared as the guard of a run compares its first step. Then both
learn. `judge.py` gives the verdict on a pair.

Flags of the process are set around each plan's blocks. Left out: reserved memory of two plans in
one process, which nothing can tell apart.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from headrace.assemble.filled import PATIENT_STEPS, evidence_after, newest
from headrace.assemble.kept_states import exchange, keep_alike, take_over
from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.data.loader import Micro
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage
from headrace.train import train
from headrace.train.guard import freed_by, inspects, limits_of
from headrace.tuner.paired_blocks import (
    ACCEPT,
    MARGIN,
    STEADY,
    TIMED,
    TRAINED,
    Limit,
    SampleSize,
    take_blocks,
    take_visits,
    train_on,
    visit_steps,
)
from headrace.tuner.readings import (
    Reading,
    StepClock,
    counted,
    flags_of,
    opened,
    peak,
    read,
    refusal_of,
    wait,
    why,
)
from headrace.tuner.worker import Worker

SAME = 6
"""Steps at the first weights: more than are needed until all is compiled and graphs are
recorded."""
HEAT_S = 3.0
"""Seconds of a GPU's steps before the timed ones: its clock falls by 1 to 2% in the first seconds
of work."""


# --- in the child process --------------------------------------------------------------------


def time_pair(
    first: Plan,
    second: Plan,
    *,
    size: SampleSize = ACCEPT,
    limit: Limit | None = None,
    text: bool = True,
) -> Reading:
    """Return the second's reading, with the first's beside it, from one process for both."""
    limit = limit or Limit()

    def go(reading: Reading) -> None:
        other = reading.beside = Reading()
        with ExitStack() as stack:
            before_bytes = _allocated()
            one = _BuiltPlan(stack, first, other, text)
            between = _allocated()
            two = _BuiltPlan(stack, second, reading, text)
            if two.build.device.type == "cuda" and _compiled_otherwise(first, second):
                two.more_threads = 1
            two.warm(size.warm)  # before the first's: what is compiled now is proof of it alone
            own = _allocated() - between
            one.warm(size.warm)
            one.beside_bytes, two.beside_bytes = (
                own + before_bytes,
                _allocated() - before_bytes - own,
            )
            _heat(one, two)
            reading.ready_s = limit.spent_s
            reading.shares_state = size.worth is not None and keep_alike(two.build, one.build)
            margin = MARGIN.get(two.build.device.type, MARGIN["cpu"])
            take_blocks(one, two, size, limit.left_s, TIMED * limit.seconds, margin)
            steady_left_s = partial(limit.left_s, STEADY)
            train_on(one, two, size, steady_left_s, TRAINED * limit.seconds)
            one.end()
            two.end()

    return read(go)


def _compiled_otherwise(one: Plan, two: Plan) -> bool:
    """Return whether one's compiled code may differ where the traced code does not.

    What is set while code compiles (graphs that are recorded, a budget of memory) is no guard of
    torch's, and two builds of a process share what was compiled first. The number of the host's
    threads is one, and it does nothing to a GPU's steps.
    """
    compiling = [
        {name: t for name, t in plan.techniques.items() if t.stage >= Stage.COMPILE}
        for plan in (one, two)
    ]
    return compiling[0] != compiling[1]


def _heat(one: "_BuiltPlan", two: "_BuiltPlan") -> None:
    """Take untimed steps of both in alternation until the device is as warm as it stays.

    Steps that warmed the first plan count, for nothing compiled since: slow ones are enough.
    """
    if one.build.device.type == "cuda":
        while time.monotonic() - one.steady_s < HEAT_S:
            one.once()
            two.once()


def visit(
    plan: Plan,
    *,
    blocks: int,
    size: SampleSize,
    share: float,
    limit: Limit | None = None,
    text: bool = True,
    train: int = 0,
) -> Reading:
    """Time blocks of one plan, from a process that holds nothing else.

    Args:
        plan: what to time.
        blocks: how many.
        size: what is wanted of the pair; `steps` in a block.
        share: of the seconds that are left, for timed steps.
        limit: of the pair.
        text: see `opened`.
        train: steps that it trains on to, after them.
    """
    limit, began_s = limit or Limit(), time.time()

    def go(reading: Reading) -> None:
        with ExitStack() as stack:
            side = _BuiltPlan(stack, plan, reading, text)
            side.warm(size.warm)
            reading.ready_s = time.time() - began_s
            reading.steps = visit_steps(side.step_s, blocks, size, share * limit.left_s(), limit)
            side.run(blocks, reading.steps)
            side.train_to(train)
            reading.steps *= blocks
            if side.build.device.type == "cuda":
                reading.reserved_bytes = float(torch.cuda.max_memory_reserved())
            side.end()

    return read(go)


class _BuiltPlan:
    """Hold a build in a process that may hold two."""

    def __init__(self, stack: ExitStack, plan: Plan, reading: Reading, text: bool) -> None:
        self.plan, self.reading, self.index = plan, reading, 0
        self.numbers: list[Tensor] = []
        self.beside_bytes = 0
        self.step_s = self.steady_s = 0.0
        self.more_threads = 0
        with _blamed(reading):
            self.build, self.micros = stack.enter_context(opened(plan, text=text, in_force=False))
        reading.limits, reading.freed = limits_of(self.build), sorted(freed_by(self.build))
        rate = self.build.values["lr"]
        self.build.values["lr"] = lambda index: 0.0 if index < SAME else rate(index - SAME)

    def warm(self, steps: int) -> None:
        """Take untimed steps; the first that learns is asked for techniques' evidence.

        A build whose weights half precision cannot hold shows nothing before weights have moved.
        """
        evidence, began_s = None, time.monotonic()
        while evidence is None or self.index < max(steps, SAME):
            self.once()
            if evidence is None and self.index > SAME:
                with self._own():
                    last = self.index >= PATIENT_STEPS
                    evidence = evidence_after(self.build, self.numbers[-1], last=last)
            if evidence is None:
                self.steady_s = time.monotonic()
        self.reading.evidence = evidence
        warming_s = time.monotonic() - began_s - self.index * self.step_s
        self.reading.compile_s = max(0.0, warming_s)

    def once(self) -> None:
        """Take a step that is timed only to plan with."""
        began_s = time.monotonic()
        with self._own():
            self.step()
            wait(self.build)
        self.step_s = time.monotonic() - began_s

    def run(self, blocks: int, steps: int) -> None:
        """Take timed blocks, after a step that fills the queue of the device."""
        clock = StepClock(self.build.device)
        with self._own():
            if self.build.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.step()
            clock.mark()
            for _ in range(blocks * steps):
                self.step()
                clock.mark()
            seconds = clock.seconds()
            self.step_s = median(seconds)
            for i in range(0, len(seconds), steps):
                self.reading.seconds.append(median(seconds[i : i + steps]))
            self._record()

    def train_to(self, steps: int) -> None:
        """Take untimed steps until there were so many."""
        with self._own():
            while self.index < steps:
                self.step()
            self._record()

    def take_over(self, other: "_BuiltPlan") -> None:
        """Go on from the other's state."""
        take_over(self.build, other.build)

    def loss_with(self, other: "_BuiltPlan") -> float:
        """Return the next batch's loss with the other's weights, by a step that is taken back."""
        with self._own():
            return loss_with(self.build, other.build, self.micros(self.index), self.index)

    def step(self) -> None:
        """Take one more step."""
        inspect = inspects(self.reading.firsts.append) if self.index < SAME else None
        self.numbers.append(train.step(self.build, self.micros(self.index), self.index, inspect))
        self.index += 1

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Put its flags in force, note its errors, and take nobody else's compiled code."""
        with _blamed(self.reading), flags_of(self.build):
            own = torch.get_num_threads()  # which a technique may have set
            torch.set_num_threads(own + self.more_threads)
            try:
                yield
            finally:
                torch.set_num_threads(own)

    def _record(self) -> None:
        """Record what the steps computed, and the peak without what else the process holds."""
        self.reading.losses, self.reading.norms, *_ = torch.stack(self.numbers).T.tolist()
        if counted(self.plan) and (most := peak(self.build)) is not None:
            own = most - self.beside_bytes
            self.reading.peak_bytes = max(self.reading.peak_bytes or own, own)

    def end(self) -> None:
        """Record what its techniques counted until now, and whether all steps were finite."""
        with self._own():
            self.reading.evidence |= newest(self.build)
        finite = torch.stack(self.numbers)[:, 2].tolist()
        if not all(finite):
            self.reading.refuse(RefusalKind.OTHER, f"step {finite.index(0.0)} was not finite")


def loss_with(build: Build, other: Build, micros: Sequence[Micro], index: int) -> float:
    """Return a batch's loss with another build's weights, and give both this one's state.

    It is that of a step which is taken back.
    """
    exchange(build, other)
    numbers = train.step(build, micros, index)
    take_over(build, other)
    return float(numbers[0])


@contextmanager
def _blamed(reading: Reading) -> Iterator[None]:
    """Note an error at the plan that raised it."""
    try:
        yield
    except Exception as error:
        reading.refuse(refusal_of(error), why(error))
        raise


def _allocated() -> int:
    """Return the bytes on the device; 0 on a CPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


# --- who asks it -----------------------------------------------------------------------------


class Measure(Protocol):
    """Takes a pair's reading: the second plan's, with the first's beside it."""

    def __call__(
        self, first: Plan, second: Plan, *, size: SampleSize, together: bool, limit_s: float
    ) -> Reading:
        """Return the reading; one that is not done after `limit_s` is refused with that reason."""
        ...


def awake() -> None:
    """Import what a new process needs, and find the device."""
    if torch.cuda.is_available():
        torch.cuda.init()


def measure_with(worker: Worker, *, text: bool = True) -> Measure:
    """Return what measures pairs: in one process where both fit, else in several."""
    last: list[tuple[Plan, SampleSize, Reading]] = []
    worker.begin(awake)  # while who asks looks for plans

    def measure(
        first: Plan, second: Plan, *, size: SampleSize, together: bool, limit_s: float
    ) -> Reading:
        limit, before = Limit(limit_s), [*last]
        last.clear()
        if together:
            reading = worker.ask(
                time_pair, first, second, size=size, limit=limit, text=text, limit_s=limit_s
            )
            if not _crowded(reading):
                return reading
            before = []

        def alone(plan: Plan, blocks: int, steps: int, share: float, train: int) -> Reading:
            return worker.ask(
                visit,
                plan,
                blocks=blocks,
                size=replace(size, steps=steps),
                share=share,
                limit=limit,
                text=text,
                train=train,
                limit_s=max(0.0, limit_s - limit.spent_s),
            )

        known = [
            r for plan, asked, r in before if (plan, asked.to_dict()) == (first, size.to_dict())
        ]
        reading, ended = take_visits(alone, first, second, size, limit.left_s, known)
        last.extend((first, size, one) for one in ended)
        return reading

    return measure


def _crowded(reading: Reading) -> bool:
    """Return whether it may have failed because two plans were in one process, or the first did."""
    if reading.beside is not None and reading.beside.refused:
        return True
    broken = reading.poisoned and bool(reading.refused) and not reading.timed_out
    return broken or reading.refusal is RefusalKind.MEMORY
