"""A loader that becomes as many threads as it takes, tells its waits by stage, and copies to a GPU.

Where several of a window's steps wait longer than their share, it takes as many threads as the
seconds that were read in those steps ask for, at least twice as many. A window is 8 steps, or as
many as are read ahead: threads that began together deliver together, and fewer steps fit between
two deliveries. Steps whose rows were read before a change are not judged: what was read ahead
during the first step hides that one thread is too slow. Where more threads did not help, they are
taken back: threads that fight for the interpreter read less (2 read 26% fewer tokens than 1 on 2
cores, results/data_path.jsonl), and so do those that fight for a disk.

A reader that has a device also sends what it has made, from page-locked memory on a stream of its
own: the copy runs beside the steps before, and no longer stands in the computing stream.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.data.loader import Loader, Micro, StepBatch
from headrace.data.rows import Packer, Row

STAGES = ("read", "collate", "copy")
WINDOW_STEPS = 8
HELPED = 0.9  # more threads helped if a window's mean wait fell to this share
REST_WINDOWS = 16  # how long the tuner leaves it at that where they did not
KEPT_STEPS = 4096
"""Waits of the newest steps are remembered."""


class Tuner:
    """How many threads read: more while steps wait, and back where that did not help.

    Args:
        workers: to begin with.
        most: threads at most.
        share: of a step, which a step may wait.
    """

    def __init__(self, workers: int, most: int, share: float) -> None:
        self.workers, self.most, self.share = workers, most, share
        self._tried: tuple[int, float] | None = None
        self._rests, self._leaps, self._waited_once = 0, True, False

    def judge(self, window: "WaitWindow") -> int:
        """Return how many threads to go on with.

        A single step that waited, as for a file system's hiccup, counts if the next window has one.
        A leap that did not help is taken back, and none is made again: doubling finds what lies
        between.
        """
        mean_s, tried, self._tried = fmean(window.waits_s), self._tried, None
        waited = sum(wait_s > self.share * window.step_s for wait_s in window.waits_s)
        once, self._waited_once = self._waited_once, waited == 1
        if tried is not None and mean_s > HELPED * tried[1]:
            leapt = self.workers > 2 * tried[0]
            self._leaps, self._rests = self._leaps and not leapt, 0 if leapt else REST_WINDOWS
            self.workers = tried[0]
        elif self._rests:
            self._rests -= 1
        elif (waited > 1 or (waited and once)) and self.workers < self.most:
            self._tried = self.workers, mean_s
            asked_for = window.asked_for if self._leaps else 0
            self.workers = min(self.most, max(2 * self.workers, asked_for))
        return self.workers


class WaitWindow(NamedTuple):
    """A window holds what neighbouring steps waited for and how long they took."""

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
        """Return row `unit` of a source, and add the time that reading it took."""
        begin_s = time.perf_counter()
        row = self.inner.row(source, unit)
        self._local.spent_s = getattr(self._local, "spent_s", 0.0) + time.perf_counter() - begin_s
        return row

    def take_s(self) -> float:
        """Return the seconds that this thread has read since the last call."""
        spent_s, self._local.spent_s = getattr(self._local, "spent_s", 0.0), 0.0
        return spent_s


class Made(NamedTuple):
    """How a micro-batch was made."""

    thread: int
    stages_s: tuple[float, ...]
    copied: Any  # the event at the end of its copy, or None


@dataclass(frozen=True)
class Read(Micro):
    """A micro-batch, and how it was made."""

    made: Made | None = None


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
        """Note a step: its seconds until the next one, its wait of them, and how it was made."""
        spent_s = [sum(stages) for stages in zip(*(m.stages_s for m in made), strict=True)]
        whole_s = sum(spent_s) or 1.0
        self._steps_s.append(step_s)
        self._made_s.append(sum(spent_s))
        for name, part_s in zip(STAGES, spent_s, strict=True):
            self._by_stage[name].append(wait_s * part_s / whole_s)

    def newest(self, count: int) -> WaitWindow:
        """Return the window of the last `count` steps."""
        waits_s = [sum(stages, 0.0) for stages in zip(*self._by_stage.values(), strict=True)]
        waits_s, steps_s = waits_s[-count:], list(self._steps_s)[-count:]
        trains_s = (step_s - wait_s for step_s, wait_s in zip(steps_s, waits_s, strict=True))
        train_s, made_s = max(median(trains_s), 1e-6), fmean(list(self._made_s)[-count:])
        return WaitWindow(waits_s, median(steps_s), math.ceil(made_s / train_s))

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
        numbers = {
            name: float(getattr(self, name))
            for name in ("workers", "prefetch", "read_ahead", "copied_bytes", "late_copies")
        }
        numbers |= {"wait_p50_s": _percentile(waits_s, 50), "wait_p99_s": _percentile(waits_s, 99)}
        stalled = [n for n, wait_s in enumerate(waits_s) if wait_s > limit_s]
        slowest = [max(STAGES, key=lambda name, n=n: stages[name][n]) for n in stalled]
        numbers["stalled_steps"] = len(stalled)
        for name, parts_s in stages.items():
            numbers[f"{name}_p50_s"] = _percentile(parts_s, 50)
            numbers[f"{name}_p99_s"] = _percentile(parts_s, 99)
            numbers[f"{name}_stalled_steps"] = slowest.count(name)
        return numbers


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return sum(values)
    return quantiles(values, n=100, method="inclusive")[percent - 1]


class TunedLoader(Loader):
    """The baseline's loader with a clock, more readers when needed, and copies to the device.

    Args:
        packer: where rows come from.
        device: where micro-batches go; None leaves them on the host.
        workers: threads that read; 0 begins with one and tunes.
        most: threads at most.
        wait_share: of a step, which a step may wait.
        prefetch: micro-batches that are read ahead; when tuning at least two for each thread, and
            those of a step.
        options: see Loader.
    """

    def __init__(
        self,
        packer: Packer,
        *,
        device: torch.device | None,
        workers: int,
        most: int,
        wait_share: float,
        prefetch: int,
        **options: Any,
    ) -> None:
        self._clock, self.device = Clocked(packer), device
        super().__init__(self._clock, workers=workers or 1, prefetch=prefetch, **options)
        if not workers:
            self._prefetch = max(prefetch, self._micros_per_step)
        self._least_ahead = self._prefetch
        self.waits = Waits(wait_share)
        self.waits.workers, self.waits.prefetch = workers or 1, self._prefetch
        self._tuner = None if workers else Tuner(1, most, wait_share)
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._trains = threading.get_ident()
        self._retired: list[ThreadPoolExecutor] = []
        self._begin(self._prefetch)

    def _begin(self, ahead: int) -> None:
        """Judge no step whose rows were read, or begun, before now; nor the next one."""
        self._open: tuple[float, float, list[Made]] | None = None
        self._first = True
        self._judged = -math.ceil(ahead / self._micros_per_step)  # steps of a window

    def step(self, step: int | None = None) -> StepBatch:
        """Return the batch of a step, see Loader; on the device if the loader has one."""
        begin_s = time.perf_counter()
        if self._open is not None:
            began_s, wait_s, made = self._open
            self.waits.add(begin_s - began_s, wait_s, made)
            self._judge()
        batch = super().step(step)
        made = [self._take_over(micro) for micro in batch.micros]
        self._open = None if self._first else (begin_s, batch.wait_s, made)
        self._first = False
        return batch

    def try_one(self) -> None:
        """Make a micro-batch as a reader does, where none has been asked for yet."""
        assert self._pool is not None
        self._take_over(self._pool.submit(self._make, 0).result()[0])

    def close(self) -> None:
        """End the threads, those before a change too; see Loader."""
        super().close()
        while self._retired:
            self._retired.pop().shutdown(wait=True)

    def _judge(self) -> None:
        self._judged += 1
        steps = max(WINDOW_STEPS, math.ceil(self._prefetch / self._micros_per_step))
        if self._tuner is not None and self._judged >= steps:
            self._judged = 0
            workers = self._tuner.judge(self.waits.newest(steps))
            if workers != self.waits.workers:
                self._go_on_with(workers)

    def _go_on_with(self, workers: int) -> None:
        """Let other threads read what no thread has begun, in its order.

        Where the system starts no more of them, those that there are go on, untuned.
        """
        assert self._pool is not None
        pool = ThreadPoolExecutor(workers, "headrace-data")
        first = self._submitted - len(self._ahead)
        try:
            for place, future in enumerate(self._ahead):
                if future.cancel():
                    self._ahead[place] = pool.submit(self._make, first + place)
        except RuntimeError:
            pool.shutdown(wait=False, cancel_futures=True)
            for place, future in enumerate(self._ahead):
                if future.cancelled():
                    self._ahead[place] = self._pool.submit(self._make, first + place)
            self._retired.append(pool)
            self._tuner = None
            return
        self._pool.shutdown(wait=False)
        self._retired.append(self._pool)
        self._pool, self.waits.workers = pool, workers
        self._prefetch = self.waits.prefetch = max(self._least_ahead, 2 * workers)
        self._judged = -math.ceil(len(self._ahead) / self._micros_per_step)

    def _make(self, index: int) -> tuple[Micro, int]:
        self._clock.take_s()
        begin_s = time.perf_counter()
        micro, digest = super()._make(index)
        made_s, read_s = time.perf_counter(), self._clock.take_s()
        copied = None
        if self._stream is not None:
            micro, copied = self._send(micro, self._stream)
        stages_s = (read_s, made_s - begin_s - read_s, time.perf_counter() - made_s)
        made = Made(threading.get_ident(), stages_s, copied)
        return Read(**vars(micro), made=made), digest

    def _send(self, micro: Micro, stream: torch.cuda.Stream) -> tuple[Micro, Any]:
        with torch.cuda.stream(stream):
            there = on_device(micro, lambda t: t.to(stream.device, non_blocking=True))
            return there, stream.record_event()

    def _take_over(self, micro: Micro) -> Made:
        """Make what is computed from now on wait for the copy, and keep the memory of the copy."""
        assert isinstance(micro, Read) and micro.made is not None
        how = micro.made
        here = how.thread == self._trains
        self.waits.read_here += here
        self.waits.read_ahead += not here
        if how.copied is not None:
            computing = torch.cuda.current_stream(self.device)
            self.waits.late_copies += not how.copied.query()
            computing.wait_event(how.copied)
            for tensor in tensors_of(micro).values():
                tensor.record_stream(computing)
                self.waits.copied_bytes += tensor.nbytes
        return how

    def _drop(self) -> None:
        super()._drop()
        self._begin(self._prefetch)


def tensors_of(micro: Micro) -> dict[str, Tensor]:
    """Return the tensors of a micro-batch by field."""
    return {name: value for name, value in vars(micro).items() if isinstance(value, Tensor)}


def on_device(micro: Micro, move: Callable[[Tensor], Tensor]) -> Micro:
    """Return the micro-batch with every tensor moved."""
    return replace(micro, **{name: move(tensor) for name, tensor in tensors_of(micro).items()})
