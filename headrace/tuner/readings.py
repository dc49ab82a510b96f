"""Take readings of a plan's steps.

The tuner and the programs under benchmarks/ share this: a build whose weights are drawn on its
device, timed steps with the peak of their memory, and losses on real text.
"""

import gc
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import headrace.assemble.build
from headrace.assemble.build import make_build
from headrace.assemble.context import choose_device
from headrace.assemble.filled import PATIENT_STEPS, evidence_after, newest
from headrace.assemble.sockets import Build
from headrace.core.errors import HeadraceError, RefusalKind, is_out_of_memory
from headrace.data.ingest import prepare
from headrace.data.loader import Micro
from headrace.data.prepared import Prepared
from headrace.model.init import Source, random_source
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage
from headrace.train import train
from headrace.train.guard import First

LARGE = 1 << 20
"""Fewest numbers of a parameter that is drawn on the device."""
OUT_OF_MEMORY, NOT_DONE = "out of memory", "not done within"
"""How the words of two of them begin."""
LEFT_BYTES = 1 << 30
"""Bytes that a reading may leave behind on a device before its process is given up."""
BEHIND = 0.05
"""Largest share of a step that a device which waits for launches is behind its host."""


@dataclass
class Reading:
    """Hold what was read, or why nothing was. It is plain data: it comes from another process."""

    seconds: list[float] = field(default_factory=list)
    """seconds of a step: the median of each block of timed steps, or every step"""
    peak_bytes: float | None = None
    """bytes allocated in timed steps, beyond those before; None on a CPU and with CUDA graphs"""
    reserved_bytes: float | None = None
    """bytes reserved since the build began, beyond those before; None on a CPU"""
    losses: list[float] = field(default_factory=list)
    """nats per token, one a step"""
    shares_state: bool = False
    """whether it can take over the state of the plan beside it, so that stretches show what it
    learns"""
    lags: list[float] = field(default_factory=list)
    """nats by which the plan beside it has a higher loss with this one's weights, after each
    stretch of steps that both began with the same state"""
    norms: list[float] = field(default_factory=list)
    """norms of the whole gradient, one a step, where two plans are timed in alternation"""
    firsts: list[First] = field(default_factory=list)
    """loss and norms of the first batches, each at the first weights, where two plans are timed"""
    freed: list[str] = field(default_factory=list)
    """parameters whose gradients an optimizer has used and freed by then"""
    limits: dict[str, float] = field(default_factory=dict)
    """largest relative differences that the guard allows this plan's first step"""
    evidence: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    """why nothing was read, in words"""
    refusal: RefusalKind | None = None
    """of which kind that is"""
    poisoned: bool = False
    """the process should not read on"""
    beside: "Reading | None" = None
    """the reading of the plan that was timed in alternation with this one"""
    steps: int = 0
    ready_s: float = 0.0
    screened: bool = False
    """whether a first look at a pair showed no gain, and was all"""
    compile_s: float = 0.0
    """seconds that a plan's first steps took longer than as many steady ones, where two are
    timed"""
    untrained_s: float = 0.0
    """seconds that both plans would have had to train on for to show that they learn the same"""
    tokens_per_s: float | None = None
    """steady tokens per second of a run"""
    by_host: bool = False
    """whether the device was done when the host was after every block: it had waited for
    launches"""

    def refuse(self, kind: RefusalKind, why: str) -> None:
        """Note why nothing was read, and of which kind the reason is."""
        self.refused, self.refusal = why, kind

    @property
    def timed_out(self) -> bool:
        """Return whether the time was up before it was done."""
        return self.refusal is RefusalKind.TIME


# --- builds ----------------------------------------------------------------------------------


@contextmanager
def device_weights(device: torch.device) -> Iterator[None]:
    """Draw large parameters of builds on the device: with the same spread, and repeatable.

    The host, which draws a run's own, would take longer than the timed steps. All sides get these.
    """

    def make(config: Any, seed: int) -> Source:
        plain = random_source(config, seed)

        def source(name: str, shape: torch.Size) -> Tensor:
            if shape.numel() < LARGE:
                return plain(name, shape)
            few = plain(name, torch.Size((64, 64)))
            value = torch.empty(shape, device=device)
            if not few.std():  # zeros or ones
                return value.fill_(few.flatten()[0].item())
            draw = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            return value.normal_(0.0, float(few.std()), generator=draw)

        return source

    before, headrace.assemble.build.random_source = headrace.assemble.build.random_source, make
    try:
        yield
    finally:
        headrace.assemble.build.random_source = before


def open_build(plan: Plan) -> tuple[Build, list[Micro]]:
    """Return a build without data, and one batch of random tokens."""
    tokenizer: Any = SimpleNamespace(vocab=plan.model.vocab)
    nothing: Any = None
    prepared = Prepared(Path(), tokenizer, train=(), validation=nothing, fingerprint={})
    build = make_build(plan, prepared, World(), choose_device(plan), until=Stage.SCHEDULE)
    shape = (plan.rows_per_step, plan.data.sequence_length + 1)
    x = torch.randint(0, plan.model.vocab, shape, generator=torch.Generator().manual_seed(0))
    return build, [Micro(x[:, :-1].contiguous(), x[:, 1:].contiguous())]


@contextmanager
def opened(
    plan: Plan, *, text: bool = False, in_force: bool = True
) -> Iterator[tuple[Build, Callable[[int], list[Micro]]]]:
    """Yield a build with its flags in force, and what gives a step its micro-batches.

    Args:
        plan: the run.
        text: real text from the plan's loader; else random tokens, unless a technique acts on data
            or on the step as a whole, which only a whole build has.
        in_force: False leaves the flags to `flags_of`, for two builds in one process.
    """
    device = choose_device(plan)
    text = text or any(t.stage > Stage.SCHEDULE for t in plan.techniques.values())
    with ExitStack() as stack:
        if device.type != "cpu":
            stack.enter_context(device_weights(device))
        if text:
            build = make_build(plan, prepare(plan), World(), device)
            stack.callback(build.loader.close)
            micros: Any = lambda index: build.loader.step(index).micros  # noqa: E731
        else:
            build, (whole,) = open_build(plan)
            cut = plan.micro_rows
            pieces = [
                Micro(whole.ids_BT[i : i + cut], whole.targets_BT[i : i + cut])
                for i in range(0, plan.rows_per_step, cut)
            ]
            micros = lambda index: pieces  # noqa: E731
        if in_force:
            stack.enter_context(flags_of(build))
        yield build, micros


@contextmanager
def flags_of(build: Build) -> Iterator[None]:
    """Put a build's flags of the process in force."""
    with ExitStack() as stack:
        for flags in build.runtime:
            stack.enter_context(flags())
        yield


class StepClock:
    """Record the moments between steps: events on a GPU, the wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.moments: list[Any] = []
        self.behind_s = 0.0
        """seconds that the device went on after the last of them"""

    def mark(self) -> None:
        """Mark the end of a step."""
        if not self.cuda:
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds of each step."""
        if self.cuda:
            issued_s = time.perf_counter()
            torch.cuda.synchronize()
            self.behind_s = time.perf_counter() - issued_s
        pairs = pairwise(self.moments)
        return [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]


# --- readings --------------------------------------------------------------------------------


def why(error: Exception) -> str:
    """Render an error in a line or two; a user's mistake with its remedy."""
    if isinstance(error, HeadraceError):
        return str(error)
    if is_out_of_memory(error):
        return f"{OUT_OF_MEMORY}: {str(error).splitlines()[0][:300]}"
    return f"{type(error).__name__}: {str(error)[:300]}"


def refusal_of(error: Exception) -> RefusalKind:
    """Return the kind of an error that ended a reading."""
    full = not isinstance(error, HeadraceError) and is_out_of_memory(error)
    return RefusalKind.MEMORY if full else RefusalKind.OTHER


def read(what: Callable[[Reading], None]) -> Reading:
    """Take a reading, or note why not; a device's memory is given back either way."""
    reading, cuda = Reading(), torch.cuda.is_available()
    before_bytes = torch.cuda.memory_allocated() if cuda else 0
    reserved = torch.cuda.memory_reserved() if cuda else 0
    torch._dynamo.reset()
    try:
        what(reading)
    except Exception as error:
        reading.refuse(refusal_of(error), why(error))
        reading.poisoned = not isinstance(error, HeadraceError | torch.OutOfMemoryError)
    if reading.peak_bytes is not None:
        reading.peak_bytes -= before_bytes
    if reading.reserved_bytes is not None:
        reading.reserved_bytes -= reserved
    try:
        torch._dynamo.reset()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            reading.poisoned |= torch.cuda.memory_allocated() > LEFT_BYTES
    except RuntimeError:
        reading.poisoned = True
    return reading


def time_steps(
    plan: Plan, *, text: bool, warm: int, timed: int, blocks: int = 1, name: str = ""
) -> Reading:
    """Time blocks of steps by their medians; the host never waits inside of one.

    Args:
        plan: what to time.
        text: see `opened`.
        warm: steps before; more where none of them has a target.
        timed: steps of a block.
        blocks: how many.
        name: the technique whose evidence is wanted; all, without it.
    """
    return read(partial(_time_steps, plan, text, warm, timed, blocks, name))


def _time_steps(
    plan: Plan, text: bool, warm: int, timed: int, blocks: int, name: str, reading: Reading
) -> None:
    with opened(plan, text=text) as (build, micros):
        evidence, first = None if warm else {}, 0
        while evidence is None or first < warm:
            numbers, first = train.step(build, micros(first), first), first + 1
            if evidence is None:
                reading.losses = reading.losses or [float(numbers[0])]
                evidence = evidence_after(build, numbers, last=first >= PATIENT_STEPS)
        wait(build)
        if build.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        by_host = build.device.type == "cuda"
        for block in range(blocks):
            clock = StepClock(build.device)
            clock.mark()
            for index in range(timed):
                at = first + block * timed + index
                train.step(build, micros(at), at)
                clock.mark()
            reading.seconds.append(median(clock.seconds()))
            by_host &= clock.behind_s < BEHIND * reading.seconds[-1]
        reading.by_host = by_host
        reading.peak_bytes = peak(build) if counted(plan) else None
        if build.device.type == "cuda":
            reading.reserved_bytes = float(torch.cuda.max_memory_reserved())
        evidence |= newest(build) if first else {}
        reading.evidence = {n: words for n, words in evidence.items() if name in ("", n)}


def time_long_row(plan: Plan, *, brief_tokens: int, steps: int) -> Reading:
    """Time each full step with one long row, after one of `brief_tokens` tokens.

    The short step compiles kernels and makes the optimizer's state, so that every long one holds
    all that a step of a run holds. The peak and the evidence are those of the long ones.
    """

    def go(reading: Reading) -> None:
        with opened(plan) as (build, micros):
            (row,) = micros(0)
            train.step(
                build, [Micro(row.ids_BT[:, :brief_tokens], row.targets_BT[:, :brief_tokens])], 0
            )
            wait(build)
            if build.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for index in range(1, steps + 1):
                began_s = time.perf_counter()
                numbers = train.step(build, micros(index), index).tolist()
                reading.seconds.append(time.perf_counter() - began_s)
                reading.losses.append(numbers[0])
                if numbers[2] != 1:
                    raise RuntimeError(f"step {index} was not finite: {numbers}")
            reading.peak_bytes = peak(build)
            reading.evidence = evidence_after(build, numbers) or {}

    return read(go)


def wait(build: Build) -> None:
    """Wait until the device has done all that was launched."""
    if build.device.type == "cuda":
        torch.cuda.synchronize()


def counted(plan: Plan) -> bool:
    """Return whether the memory of its steps counts as allocated; that of graphs does not."""
    return "cuda_graphs" not in plan.techniques


def peak(build: Build) -> float | None:
    """Return the allocator's peak in bytes since its last reset; None on a CPU."""
    return float(torch.cuda.max_memory_allocated()) if build.device.type == "cuda" else None
