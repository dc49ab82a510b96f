"""Set threads, cores and kept memory of a CPU run, read them from the process, put them back."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from headrace.assemble.sockets import Build
from headrace.core import cores, kept_memory
from headrace.plan.technique import Context, Supported, Unsupported
from headrace.techniques.memory.kept_memory import KeptMemory
from headrace.techniques.parallel.cpu_threads import CpuThreads
from headrace.train.train import step

Make = Callable[..., Build]
needs_affinity = pytest.mark.skipif(not cores.CAN_BIND, reason="no cores to choose here")
needs_glibc = pytest.mark.skipif(not kept_memory.CAN_KEEP, reason="needs glibc")


def take_steps(build: Build, count: int = 1) -> None:
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        for index in range(count):
            step(build, build.loader.step(index).micros, index)


def on(device: str) -> Context:
    return Context(
        plan=None,
        device=device,
        device_name=device,
        capability=None,
        torch=(2, 11),
        has_triton=False,
        has_compiler=True,
        ranks=1,
        precision="fp32",
    )


@contextmanager
def changed_threads() -> Iterator[int]:
    """A count of threads that is not torch's now, while it lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield 1
    finally:
        torch.set_num_threads(before)


@needs_affinity
def test_threads_and_cores_are_the_runs_alone(make_tiny: Make) -> None:
    build = make_tiny()
    technique = CpuThreads(threads=1, bind=True)
    technique.apply(build)
    allowed = os.sched_getaffinity(0)
    with changed_threads() as count:
        take_steps(build)
        assert torch.get_num_threads() == 2
    assert os.sched_getaffinity(0) == allowed
    found = technique.active(build)
    assert found.active and found.numbers == {"threads": count, "processors": 1}


def test_a_flag_that_is_not_entered_is_no_evidence(make_tiny: Make) -> None:
    build = make_tiny()
    threads, kept = CpuThreads(threads=1), KeptMemory()
    threads.apply(build)
    kept.apply(build)
    build.runtime.clear()
    with changed_threads():
        take_steps(build)
    assert not threads.active(build).active and not kept.active(build).active


def test_more_threads_than_cores_are_refused_with_the_count_that_runs() -> None:
    most = len(cores.cores())
    assert isinstance(CpuThreads(threads=most).supports(on("cpu")), Supported)
    refused = CpuThreads(threads=most + 1).supports(on("cpu"))
    assert isinstance(refused, Unsupported)
    assert f"{most + 1} threads were asked for" in refused.reason
    assert refused.remedy.text == f"techniques.cpu_threads.threads={most}"
    assert CpuThreads().count == most and CpuThreads(share="half").count == max(1, most // 2)
    for technique in (CpuThreads(), KeptMemory()):
        assert isinstance(technique.supports(on("cuda")), Unsupported)


def test_hardware_threads_of_one_core_are_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_siblings", lambda one: f"{one % 2},{one % 2 + 2}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(cores, "CAN_BIND", True)
    assert cores.cores() == [0, 1]


@needs_glibc
def test_freed_memory_is_kept_while_the_run_lasts(make_tiny: Make) -> None:
    build = make_tiny()
    technique = KeptMemory()
    technique.apply(build)
    take_steps(build, 2)
    found = technique.active(build)
    assert found.active and found.numbers["steps"] == 2, found.detail
    assert "was taken again with" in found.detail

    size = 160 << 20  # fits into no place that the run's own probe left, of 66 MiB

    def pages() -> list[int]:
        """New pages of a block that is taken and freed again and again."""
        made: list[int] = []
        for _ in range(4):
            before = kept_memory.pages_touched()
            torch.empty(size, dtype=torch.uint8).fill_(1)
            made.append(kept_memory.pages_touched() - before)
        return made

    whole = size // 4096
    assert min(pages()) > 0.9 * whole
    with kept_memory.kept() as took:
        assert took and pages()[-1] < 0.1 * whole
    assert pages()[0] > 0.9 * whole  # what was kept was given back


AFTERWARDS = """
import torch
from headrace.core import kept_memory

with kept_memory.kept():
    pass
for _ in range(20):  # the first few are put beside what stays
    before = kept_memory.pages_touched()
    torch.empty(8 << 20, dtype=torch.uint8).fill_(1)
print(kept_memory.pages_touched() - before)
"""


@needs_glibc
def test_a_process_that_kept_its_memory_is_no_slower_afterwards() -> None:
    """A setting that was made ends glibc's own growth: each larger block would be new for ever."""
    ended = subprocess.run(
        [sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, check=True
    )
    assert int(ended.stdout) < 200  # of the block's 2,048 pages
