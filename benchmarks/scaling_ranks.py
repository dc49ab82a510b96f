"""Start a process for each GPU, as torchrun does, and have them take one reading together.

A team serves one side of scaling.py and ends with it, so that no side inherits memory, graphs or
communicators of another. Its processes import everything while the side before it is measured, and
touch no GPU until they are asked. A rank that fails, or hangs, ends its team alone. NVLink
multicast stays off in all of them.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from headrace.assemble.build import make_build
from headrace.assemble.context import choose_device
from headrace.assemble.filled import PATIENT_STEPS, evidence_after, newest
from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.costs.links import Link
from headrace.data.loader import Micro
from headrace.data.prepared import Prepared
from headrace.parallel.world import World, open_world
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage
from headrace.probes.together import measure_links
from headrace.train import state, train
from headrace.train.checkpoint import Checkpoints
from headrace.tuner.readings import (
    NOT_DONE,
    Reading,
    StepClock,
    device_weights,
    flags_of,
    peak,
    refusal_of,
    why,
)
from headrace.tuner.readings import (
    wait as wait_for_device,
)

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Variables that keep NVLink multicast off: it may put a host's GPUs out of service."""
BRIEF_BYTES = (4096, 65536)
"""Bytes of the tensors that a dry run measures links with."""
GRACE_S = 4.0
"""Seconds for which other ranks may still say why they failed, after the first one that did."""


# --- what a rank does --------------------------------------------------------------------------


def own_device(plan_device: torch.device) -> torch.device:
    """Return this rank's own device."""
    if plan_device.type != "cuda":
        return plan_device
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


@contextmanager
def opened(plan: Plan) -> Iterator[tuple[Build, list[Micro]]]:
    """Yield this rank's build with its flags in force, and its micro-batches of random tokens."""
    device = own_device(choose_device(plan))
    nothing: Any = None
    tokenizer: Any = SimpleNamespace(vocab=plan.model.vocab)
    prepared = Prepared(Path(), tokenizer, train=(), validation=nothing, fingerprint={})
    with ExitStack() as stack:
        world = stack.enter_context(open_world(plan.mesh, device))
        if device.type == "cuda":
            stack.enter_context(device_weights(device))
        build = make_build(plan, prepared, world, device, until=Stage.SCHEDULE)
        stack.enter_context(flags_of(build))
        yield build, list(own_micros(plan, world))


def own_micros(plan: Plan, world: World) -> Iterator[Micro]:
    """Yield the micro-batches of this rank's rows, as the loader would cut them."""
    shape = (plan.rows_per_step, plan.data.sequence_length + 1)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, plan.model.vocab, shape, generator=draw)
    each, size = plan.rows_per_step // world.size("data"), plan.micro_rows
    first = world.place("data") * each
    for at in range(first, first + each, size):
        rows = x[at : at + size]
        yield Micro(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def read_steps(plan: Plan, *, warm: int, timed: int, blocks: int) -> Reading:
    """Time blocks of steps by their medians on the slowest rank; all ranks call this together."""
    reading = Reading()
    with opened(plan) as (build, micros):
        began_s = time.perf_counter()
        evidence, first = None, 0
        while evidence is None or first < warm:
            numbers, first = train.step(build, micros, first), first + 1
            if evidence is None:
                reading.losses = [float(numbers[0])]
                evidence = evidence_after(build, numbers, last=first >= PATIENT_STEPS)
        settle(build)
        reading.ready_s = time.perf_counter() - began_s
        for block in range(blocks):
            build.world.any(False)
            clock = StepClock(build.device)
            clock.mark()
            for index in range(timed):
                train.step(build, micros, first + block * timed + index)
                clock.mark()
            reading.seconds.append(max(build.world.gather(median(clock.seconds()))))
        note_peaks(build, reading)
        reading.steps = first + blocks * timed
        reading.evidence = {**evidence, **newest(build)}
    return reading


def read_long_row(plan: Plan, *, brief: int, steps: int) -> Reading:
    """Time full steps of one long row after a step of `brief` tokens; all ranks call this."""
    reading = Reading()
    with opened(plan) as (build, (row,)):
        start = Micro(row.ids_BT[:, :brief].contiguous(), row.targets_BT[:, :brief].contiguous())
        train.step(build, [start], 0)
        settle(build)
        numbers = torch.zeros(0)
        for index in range(1, steps + 1):
            build.world.any(False)
            began_s = time.perf_counter()
            numbers = train.step(build, [row], index)
            loss, _, good = numbers.tolist()[:3]
            spent_s = time.perf_counter() - began_s
            reading.seconds.append(max(build.world.gather(spent_s)))
            reading.losses.append(loss)
            if good != 1:
                raise RuntimeError(f"step {index} was not finite: {numbers.tolist()}")
        note_peaks(build, reading)
        reading.steps = steps + 1
        reading.evidence = evidence_after(build, numbers) or {}
    return reading


@dataclass
class SaveReading(Reading):
    """Hold what saves of a run's state took, in seconds, on the slowest rank."""

    stalled_s: list[float] = field(default_factory=list)
    """of each save, how much longer the steps beside it took than as many without one"""
    called_s: list[float] = field(default_factory=list)
    """of each save, how long the call held the host"""
    written_s: list[float] = field(default_factory=list)
    """of each save, until it was whole on the disk"""


def read_saves(plan: Plan, folder: Path, *, warm: int, timed: int, saves: int) -> SaveReading:
    """Time steps without a save, and then beside each of some saves; all ranks call this."""
    reading = SaveReading()
    with opened(plan) as (build, micros):
        world = build.world
        evidence, first = None, 0
        while evidence is None or first < warm:
            numbers, first = train.step(build, micros, first), first + 1
            evidence = evidence or evidence_after(build, numbers, last=first >= PATIENT_STEPS)
        settle(build)
        saved = Checkpoints(folder, rank=world.rank, ranks=world.ranks, keep_last=1)
        plain_s = 0.0
        for number in range(saves + 1):
            world.any(False)
            began_s = time.perf_counter()
            if number:
                saved.save(first, state.tensors(build), {}, build.change_hooks)
                reading.called_s.append(max(world.gather(time.perf_counter() - began_s)))
            for _ in range(timed):
                train.step(build, micros, first)
                first += 1
            wait_for_device(build)
            spent_s = max(world.gather(time.perf_counter() - began_s))
            if not number:
                plain_s = spent_s
                reading.seconds = [spent_s / timed]
                continue
            reading.stalled_s.append(spent_s - plain_s)
            saved.wait()
            reading.written_s.append(max(world.gather(time.perf_counter() - began_s)))
        note_peaks(build, reading)
        reading.steps, reading.evidence = first, evidence
    return reading


def settle(build: Build) -> None:
    """Wait until the warm steps are done, and count the allocator's peak from here on."""
    wait_for_device(build)
    if build.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def note_peaks(build: Build, reading: Reading) -> None:
    """Note the peaks of the rank that needs most, and in `norms` those of every rank."""
    peaks = build.world.gather(peak(build) or 0.0)
    if build.device.type == "cuda":
        reading.norms, reading.peak_bytes = peaks, max(peaks)
        reserved = float(torch.cuda.max_memory_reserved())
        reading.reserved_bytes = max(build.world.gather(reserved))


def read_links(ranks: int, device_name: str) -> tuple[Link, ...]:
    """Measure every kind of collective over all ranks; all ranks call this together.

    On a CPU, where this is a dry run, tensors are small.
    """
    device = own_device(torch.device(device_name))
    with open_world(MeshConfig(data=ranks), device) as world:
        return measure_links(device, world, BRIEF_BYTES if device.type == "cpu" else ())


# --- a rank's process, and all of them ----------------------------------------------------------


def serve(rank: int, ranks: int, port: int, pipe: Connection, log: Path) -> None:
    """Wait for a task as one rank, do it together with the others, answer, and end."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {
        **NO_MULTICAST,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks // 2))
    try:
        what, given, how = pipe.recv()
    except EOFError:  # nobody wants this team any more
        os._exit(0)
    try:
        answer = what(*given, **how)
    except Exception as error:
        answer = Reading(refused=why(error), refusal=refusal_of(error))
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # a communicator whose other ranks are gone would not end by itself


def end_with_parent() -> None:
    """End this rank with the program, so that it keeps no GPU."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


class Team:
    """Hold the processes of all ranks, which wait for one task.

    Args:
        ranks: how many.
        logs: the folder of what they print.
    """

    def __init__(self, ranks: int, logs: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = get_context("spawn")
        self.logs = [logs / f"{port}.{rank}.log" for rank in range(ranks)]
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank, log in enumerate(self.logs):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, ranks, port, theirs, log), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, what: Callable[..., Any], *given: Any, limit_s: float, **how: Any) -> Any:
        """Return the first rank's answer, or the reading of the first rank that failed.

        The team ends with this, also where a rank hangs for longer than `limit_s`.
        """
        ends_s = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        failed: Any = None
        try:
            for rank, pipe in enumerate(self.pipes):
                try:
                    pipe.send((what, given, how))
                except OSError:
                    answers[rank] = failed = self._dead(rank)
            while len(answers) < len(self.pipes) and (left_s := ends_s - time.monotonic()) > 0:
                waiting = [p for rank, p in enumerate(self.pipes) if rank not in answers]
                for pipe in wait(waiting, left_s):
                    rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                    answers[rank] = self._answer(rank)
                    if getattr(answers[rank], "refused", "") and failed is None:
                        failed = answers[rank]
                        ends_s = min(ends_s, time.monotonic() + GRACE_S)
        finally:
            self.close()
        if failed is None and len(answers) < len(self.pipes):
            failed = Reading(refused=f"{NOT_DONE} {limit_s:.0f} s", refusal=RefusalKind.TIME)
        reasons = [a for a in answers.values() if getattr(a, "refused", "")]
        plain = [a for a in reasons if a.refusal is not RefusalKind.PROCESS]
        return (plain or [failed])[0] if failed is not None else answers[0]

    def _answer(self, rank: int) -> Any:
        try:
            return self.pipes[rank].recv()
        except (EOFError, OSError):
            return self._dead(rank)

    def _dead(self, rank: int) -> Reading:
        log = self.logs[rank]
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        words = f"the process of rank {rank} died: {last[:300]}"
        return Reading(refused=words, refusal=RefusalKind.PROCESS)

    def close(self) -> None:
        """End every process, busy or not."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
