"""Compute with as many threads as pay on this processor, and keep them on cores of their own.

torch takes a thread for each logical processor that it may use. Two of them may share one core,
whose units of arithmetic a matmul fills alone; and a small decoder's operations are too short to be
cut into many parts, since all threads wait for the slowest at each one's end. So there is one
thread a core where nothing else is asked for, and a search tries a `share` of the cores. With
`bind` no thread of the process leaves the first so many cores: none moves away from what its core
has in its cache.

A run beside other busy processes needs as few threads as there are idle cores: a thread that waits
for a core makes all others wait, and these spin meanwhile. How long they spin, libgomp reads once,
as it is loaded: OMP_WAIT_POLICY=passive before the command makes waiting threads sleep.

Both hold while the run lasts and are put back after it. Evidence is what torch's thread pool and
the system said as a step ended. Left out: threads between operations (`inter_op`), for a step has
no two that could run at once.
Source: docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html (CPU).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core import cores
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.host import THREADS
from headrace.costs.ledger import Ledger
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

PARTS = {"whole": 1, "half": 2, "quarter": 4}
"""Name of a share -> number of parts that the cores are cut into; the share is one of them."""


class CpuThreads(Technique[Build]):
    """Compute with as many threads as pay on this processor, and keep them on their cores."""

    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of each operation; 0 is as many as `share` says."""
    share: Literal["whole", "half", "quarter"] = "whole"
    """How many of the cores that the process may use have a thread, where `threads` is 0."""
    bind: bool = False
    """Keep the process on its first cores, as many as threads."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "parallel"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    images: ClassVar[bool] = True
    composes: ClassVar[tuple[str, ...]] = ("runtime", "after_update")
    symptoms: ClassVar[tuple[str, ...]] = ("computation", "launch")
    settled: ClassVar[tuple[str, ...]] = ("threads",)
    card: ClassVar[Card] = Card(
        buys="what threads of one core take from each other, and what many threads lose at the "
        "ends of short operations: `headrace probe --device cpu` times a step at several counts",
        costs=(
            "nothing",
            "`bind` leaves the other cores to nobody of this process (derived)",
        ),
        helps="small models on many cores, two hardware threads a core, a machine that other "
        "processes use too",
        hurts="data workers, which `bind` keeps on the same cores",
        source="docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a CPU with so many cores, and for `bind` a system that lets one choose them."""
        if context.device != "cpu":
            return Unsupported(
                f"on {context.device} threads of the host compute nothing",
                mend("device=cpu"),
                RefusalKind.DEVICE,
            )
        here = len(cores.cores())
        if self.threads > here:
            return Unsupported(
                f"{self.threads} threads were asked for, and this process may use {here} cores",
                mend(f"techniques.{self.name()}.threads={here}"),
                RefusalKind.SYSTEM,
            )
        if self.bind and not cores.CAN_BIND:
            return Unsupported(
                "this system does not let a process choose its cores",
                mend(f"techniques.{self.name()}.bind=false"),
                RefusalKind.SYSTEM,
            )
        return Supported()

    @property
    def count(self) -> int:
        """Return the number of threads, with 0 resolved."""
        return self.threads or max(1, len(cores.cores()) // PARTS[self.share])

    def predict(self, ledger: Ledger) -> Ledger:
        """Set the count of threads; a probe at that count knows how much longer the work takes."""
        return replace(ledger, sizes={**ledger.sizes, THREADS: float(self.count)})

    def apply(self, build: Build) -> None:
        """Set both for the run, and read them in each step."""
        seen = build.notes[self.name()] = {"threads": 0, "cores": 0}

        def look(build: Build, finite: Tensor) -> None:
            seen["threads"] = torch.get_num_threads()
            seen["cores"] = len(os.sched_getaffinity(0)) if cores.CAN_BIND else 0

        build.runtime.append(self._in_force)
        build.after_update.append(look)

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.count)
        try:
            if self.bind:
                with cores.bound(cores.cores()[: self.count]):
                    yield
            else:
                yield
        finally:
            torch.set_num_threads(before)

    def active(self, build: Build) -> Evidence:
        """Report threads of torch's pool and cores of the process, as the last step ended."""
        seen: dict[str, Any] = build.notes[self.name()]
        right = seen["threads"] == self.count and (not self.bind or seen["cores"] == self.count)
        return Evidence(
            active=right,
            detail=f"{seen['threads']} threads on {seen['cores'] or 'any'} logical processors",
            numbers={"threads": seen["threads"], "processors": seen["cores"]},
        )
