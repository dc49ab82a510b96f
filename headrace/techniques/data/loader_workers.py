"""Read ahead with as many threads as it takes, and copy to the GPU beside its work.

A step waits for its rows if they are read more slowly than they are trained. How many threads are
enough depends on the disk, the tokens of a row and the GPU, so with `workers=0` the run finds out:
it begins with one thread, and where the longest wait of 8 steps is more than `wait_share` of a step
it takes as many as the seconds that were read in those steps ask for, at least twice as many, up to
the cores that are there. Steps whose rows were read before such a change are not judged: what was
read ahead during the first step hides that one thread is too slow. Where more threads did not help,
they are taken back: threads that fight for the interpreter read less (2 read 26% fewer tokens than
1 on 2 cores, results/data_path.jsonl). Every micro-batch remains a pure function of its number, so
threads, depth and tuning change who reads when, and never the stream or a resume.

On a GPU a reader also sends what it has made, from page-locked memory on a stream of its own: the
copy runs beside the steps before and no longer stands in the computing stream.

Waits are told by stage: a step's wait is divided by the time that its readers spent on `read` (the
packer and the disk), `collate` (order, hash, tensors, page-locked memory) and `copy` (its issue).
A step that waits longer than `wait_share` is stalled, by the stage with the largest part. These
numbers grow until the report is written; the first step is left out, since nothing can have been
read before it.

Cost: host memory of `prefetch` micro-batches, on a GPU as many of its tokens; on a CPU readers take
cores from the training. Left out: processes in place of threads, which would have to send what they
read to this one. Source: torch.utils.data's workers; tf.data's AUTOTUNE (arXiv 2101.12127).
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median, quantiles
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from headrace.core.ledger import Ledger
from headrace.core.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.data.loader import Loader, Micro, StepBatch
from headrace.data.rows import Packer, Row
from headrace.sockets import Build

STAGES = ("read", "collate", "copy")
WINDOW_STEPS = 8
HELPED = 0.9  # more threads helped if a window's waits fell to this share
REST_WINDOWS = 16  # how long the tuner leaves it at that where they did not
KEPT_STEPS = 4096
"""Waits of the newest steps are remembered."""


class Tuner:
    """How many threads read: more while steps wait, and back where that did not help.

    Args:
        workers: to begin with.
        most: threads at most.
        share: of a step, which the longest wait of a window may be.
    """

    def __init__(self, workers: int, most: int, share: float) -> None:
        self.workers, self.most, self.share = workers, most, share
        self._tried: tuple[int, float] | None = None
        self._rests = 0

    def judge(self, window: "Window") -> int:
        """Threads to go on with."""
        whole_s, tried, self._tried = sum(window.waits_s), self._tried, None
        if tried is not None and whole_s > HELPED * tried[1]:
            self.workers, self._rests = tried[0], REST_WINDOWS
        elif self._rests:
            self._rests -= 1
        elif max(window.waits_s) > self.share * window.step_s and self.workers < self.most:
            self._tried = self.workers, whole_s
            self.workers = min(self.most, max(2 * self.workers, window.asked_for))
        return self.workers


class Window(NamedTuple):
    """What neighbouring steps waited for and took."""

    waits_s: Sequence[float]
    step_s: float  # of the median step
    asked_for: int = 0
    """Threads that can read what a step needs while a step trains."""


class Clocked:
    """A packer that counts, for each thread, the seconds that it reads."""

    def __init__(self, inner: Packer) -> None:
        self.inner, self._local = inner, threading.local()
        self.sequence_length, self.units = inner.sequence_length, inner.units

    def row(self, source: int, unit: int) -> Row:
        """Row `unit` of a source."""
        begin_s = time.perf_counter()
        row = self.inner.row(source, unit)
        self._local.spent_s = getattr(self._local, "spent_s", 0.0) + time.perf_counter() - begin_s
        return row

    def take_s(self) -> float:
        """Seconds that this thread has read since it was asked last."""
        spent_s, self._local.spent_s = getattr(self._local, "spent_s", 0.0), 0.0
        return spent_s


class Made(NamedTuple):
    """How a micro-batch was made."""

    thread: int
    stages_s: tuple[float, ...]
    copied: Any  # the event at the end of its copy, or None


class Waits(Mapping[str, float]):
    """What the newest steps waited for, as numbers that are read when they are asked for."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.workers = self.prefetch = self.read_ahead = self.read_here = self.copied_bytes = 0
        self.late_copies = 0  # not complete when their step was handed out
        self._by_stage: dict[str, deque[float]] = {n: deque(maxlen=KEPT_STEPS) for n in STAGES}
        self._steps_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self._made_s: deque[float] = deque(maxlen=KEPT_STEPS)

    def add(self, step_s: float, wait_s: float, made: Sequence[Made]) -> None:
        """Note a step: the seconds since the one before it, its wait, and how it was made."""
        spent_s = [sum(stages) for stages in zip(*(m.stages_s for m in made), strict=True)]
        whole_s = sum(spent_s) or 1.0
        self._steps_s.append(step_s)
        self._made_s.append(sum(spent_s))
        for name, part_s in zip(STAGES, spent_s, strict=True):
            self._by_stage[name].append(wait_s * part_s / whole_s)

    def newest(self, count: int) -> Window:
        """The last `count` steps."""
        waits_s = [sum(stages, 0.0) for stages in zip(*self._by_stage.values(), strict=True)]
        waits_s, step_s = waits_s[-count:], median(list(self._steps_s)[-count:])
        train_s = max(step_s - median(waits_s), 1e-6)
        return Window(waits_s, step_s, math.ceil(median(list(self._made_s)[-count:]) / train_s))

    def __len__(self) -> int:
        return len(self._numbers())

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers())

    def __getitem__(self, name: str) -> float:
        return self._numbers()[name]

    def _numbers(self) -> dict[str, float]:
        steps_s = list(self._steps_s)
        stages = {name: list(waits_s) for name, waits_s in self._by_stage.items()}
        waits_s = [sum(parts) for parts in zip(*stages.values(), strict=True)]
        limit_s = self.share * median(steps_s) if steps_s else 0.0
        found = {
            name: float(getattr(self, name))
            for name in ("workers", "prefetch", "read_ahead", "copied_bytes", "late_copies")
        }
        found |= {"wait_p50_s": _percentile(waits_s, 50), "wait_p99_s": _percentile(waits_s, 99)}
        stalled = [n for n, wait_s in enumerate(waits_s) if wait_s > limit_s]
        slowest = [max(STAGES, key=lambda name, n=n: stages[name][n]) for n in stalled]
        found["stalled_steps"] = len(stalled)
        for name, parts_s in stages.items():
            found[f"{name}_p50_s"] = _percentile(parts_s, 50)
            found[f"{name}_p99_s"] = _percentile(parts_s, 99)
            found[f"{name}_stalled_steps"] = slowest.count(name)
        return found


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return sum(values)
    return quantiles(values, n=100, method="inclusive")[percent - 1]


class TunedLoader(Loader):
    """The trunk's loader with a clock, readers that become more, and copies to the device.

    Args:
        packer: where rows come from.
        device: where micro-batches go; None leaves them on the host.
        workers: threads that read; 0 begins with one and tunes.
        most: threads at most.
        wait_share: of a step, which the longest wait of a window may be.
        prefetch: micro-batches that are read ahead; at least two for each thread when tuning.
        options: see Loader.
    """

    def __init__(
        self, packer: Packer, *, device: torch.device | None, workers: int, most: int,
        wait_share: float, prefetch: int, **options: Any,
    ) -> None:  # fmt: skip
        self._clock, self._device = Clocked(packer), device
        super().__init__(self._clock, workers=workers or 1, prefetch=prefetch, **options)
        self.waits = Waits(wait_share)
        self.waits.workers, self.waits.prefetch = workers or 1, prefetch
        self._tuner = None if workers else Tuner(1, most, wait_share)
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._made: dict[int, Made] = {}
        self._trains = threading.get_ident()
        self._began_s: float | None = None
        self._settle()

    def step(self, step: int | None = None) -> StepBatch:
        """The batch of a step, see Loader; on the device if the loader has one."""
        begin_s = time.perf_counter()
        batch = super().step(step)
        first = (self._position - 1) * self._micros_per_step
        made = [self._made.pop(first + m) for m in range(self._micros_per_step)]
        for how, micro in zip(made, batch.micros, strict=True):
            self._take_over(how, micro)
        if self._began_s is not None:
            self.waits.add(begin_s - self._began_s, batch.wait_s, made)
            self._judged += 1
            if self._tuner is not None and self._judged == WINDOW_STEPS:
                self._judged = 0
                workers = self._tuner.judge(self.waits.newest(WINDOW_STEPS))
                if workers != self.waits.workers:
                    self._go_on_with(workers)
        self._began_s = begin_s
        return batch

    def try_one(self) -> None:
        """Make a micro-batch as a reader does, where none has been asked for yet."""
        assert self._pool is not None
        self._pool.submit(self._make, 0).result()
        self._count(self._made.pop(0))

    def _go_on_with(self, workers: int) -> None:
        """Other threads read what no thread has begun, in its order."""
        assert self._pool is not None
        before, self._pool = self._pool, ThreadPoolExecutor(workers, "headrace-data")
        first = self._submitted - len(self._ahead)
        for place, future in enumerate(self._ahead):
            if future.cancel():
                self._ahead[place] = self._pool.submit(self._make, first + place)
        before.shutdown(wait=False)
        self.waits.workers = workers
        self._prefetch = self.waits.prefetch = max(self.waits.prefetch, 2 * workers)
        self._settle()

    def _settle(self) -> None:
        """Judge no step whose rows were read, or begun, before now."""
        self._judged = -math.ceil(self._prefetch / self._micros_per_step)  # steps of a window

    def _make(self, index: int) -> tuple[Micro, int]:
        self._clock.take_s()
        begin_s = time.perf_counter()
        micro, digest = super()._make(index)
        made_s, read_s = time.perf_counter(), self._clock.take_s()
        copied = None
        if self._stream is not None:
            micro, copied = self._send(micro, self._stream)
        stages_s = (read_s, made_s - begin_s - read_s, time.perf_counter() - made_s)
        self._made[index] = Made(threading.get_ident(), stages_s, copied)
        return micro, digest

    def _send(self, micro: Micro, stream: torch.cuda.Stream) -> tuple[Micro, Any]:
        with torch.cuda.stream(stream):
            there = on_device(micro, lambda t: t.to(stream.device, non_blocking=True))
            return there, stream.record_event()

    def _take_over(self, how: Made, micro: Micro) -> None:
        """What is computed from now on comes after the copy, and keeps its memory."""
        self._count(how)
        if how.copied is None:
            return
        computing = torch.cuda.current_stream(self._device)
        self.waits.late_copies += not how.copied.query()
        computing.wait_event(how.copied)
        for tensor in tensors_of(micro).values():
            tensor.record_stream(computing)
            self.waits.copied_bytes += tensor.nbytes

    def _count(self, how: Made) -> None:
        here = how.thread == self._trains
        self.waits.read_here += here
        self.waits.read_ahead += not here

    def _drop(self) -> None:
        super()._drop()
        self._made.clear()


def tensors_of(micro: Micro) -> dict[str, Tensor]:
    """A micro-batch's tensors by field."""
    return {name: value for name, value in vars(micro).items() if isinstance(value, Tensor)}


def on_device(micro: Micro, move: Callable[[Tensor], Tensor]) -> Micro:
    """The micro-batch with every tensor moved."""
    return replace(micro, **{name: move(tensor) for name, tensor in tensors_of(micro).items()})


class LoaderWorkers(Technique[Build]):
    """Read ahead with as many threads as it takes, and copy to the GPU beside its work."""

    workers: int = Field(default=0, ge=0)
    """Threads that read; 0 begins with one and takes more while steps wait; range 0 to 32."""
    prefetch: int = Field(default=4, ge=1)
    """Micro-batches that are read ahead; two per thread at least when tuned; range 2 to 64."""
    wait_share: float = Field(default=0.01, gt=0, lt=1)
    """Share of a step that it may wait for its rows; range 0.001 to 0.05."""
    side_copy: bool = True
    """On a GPU, readers copy on a stream of their own; without, the step copies on its own."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "data"
    stage: ClassVar[Stage] = Stage.DATA
    claims: ClassVar[tuple[str, ...]] = ("transport",)
    symptoms: ClassVar[tuple[str, ...]] = ("input",)
    card: ClassVar[Card] = Card(
        buys="the wait for rows, where one thread reads more slowly than the GPU trains, and the "
        "copy's place in the computing stream (derived)",
        costs="H200, compiled recipe with it: 1.00x the speed (1b), 1.00x (160m) and 1.00x the "
        "memory (1b), 1.00x (160m), where one thread reads faster than a step trains; cores, and "
        "memory of the host for the micro-batches that are read ahead (derived)",
        helps="small models on fast GPUs, slow disks, costly packers",
        hurts="training on a CPU, where readers take its cores; runs that never wait",
        source="arXiv 2101.12127; torch.utils.data.DataLoader",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """The plan tells what the run begins with."""
        return {"data.workers": self.workers or 1, "data.prefetch": self.prefetch}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Readers cannot copy what another technique cuts on the host first."""
        on = context.plan.techniques.items() if context.plan is not None else ()
        cuts = [name for name, other in on if "recut" in other.composes]
        if cuts and self.side_copy and context.device == "cuda":
            return Unsupported(
                f"{cuts[0]} cuts rows on the host, after the readers have sent them to the GPU",
                f"techniques.{self.name()}.side_copy=false",
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Tokens that wait on the device are no line: few bytes beside their activations."""
        return ledger

    def apply(self, build: Build) -> None:
        """Put the tuned loader in the trunk's place."""
        build.transport = self._transport

    def _transport(self, build: Build, packer: Packer) -> Loader:
        plan, cuda = build.plan, build.device.type == "cuda"
        beside = min(build.world.ranks, torch.cuda.device_count()) if cuda else build.world.ranks
        return TunedLoader(
            packer,
            device=build.device if cuda and self.side_copy else None,
            workers=self.workers,
            most=max(1, (_cores() - 1) // beside),
            wait_share=self.wait_share,
            prefetch=self.prefetch,
            rows_per_step=plan.rows_per_step,
            micro_rows=plan.micro_rows,
            rank=build.world.place("data"),
            ranks=build.world.size("data"),
            order=build.order(build, packer),
            segments=build.mask.document,
            pin=cuda,
        )

    def active(self, build: Build) -> Evidence:
        """Micro-batches by who made them; one is made where the run has not asked for any."""
        loader = build.loader
        if not isinstance(loader, TunedLoader):
            return Evidence(False, "another loader reads the rows")
        waits = loader.waits
        if not waits.read_ahead + waits.read_here:
            loader.try_one()
        return Evidence(
            active=waits.read_ahead > 0 and waits.read_here == 0,
            detail=f"{waits.workers} threads made {waits.read_ahead} micro-batches, the training "
            f"thread {waits.read_here}; copied {waits.copied_bytes} bytes beside the computation",
            numbers=waits,
        )


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
