"""Read ahead with as many threads as it takes, and copy to the GPU beside its work.

A step waits for its rows if they are read more slowly than they are trained. How many threads are
enough depends on the disk, the tokens of a row and the GPU, so with `workers=0` the run finds out:
it begins with one thread, takes more while steps wait longer than `wait_share`, up to the cores
that are there, and takes back what did not help (`data/tuned_loader.py`). Every micro-batch remains
a pure function of its number, so threads, depth and tuning change who reads when, and never the
stream or a resume.

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

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.data.loader import Loader
from headrace.data.rows import Packer
from headrace.data.tuned_loader import TunedLoader
from headrace.plan.symptoms import LoopChange
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

MOST_THREADS = 32
"""Most threads that a run takes by itself, however many cores there are."""


class LoaderWorkers(Technique[Build]):
    """Read ahead with as many threads as it takes, and copy to the GPU beside its work."""

    workers: int = Field(default=0, ge=0, le=1024)
    """Threads that read; 0 begins with one and takes more while steps wait; range 0 to 32."""
    prefetch: int = Field(default=4, ge=1, le=1 << 16)
    """Micro-batches that are read ahead; when tuned at least two per thread, and those of a step;
    range 2 to 64."""
    wait_share: float = Field(default=0.01, gt=0, lt=1)
    """Share of a step that it may wait for its rows; range 0.001 to 0.05."""
    side_copy: bool = True
    """On a GPU, readers copy on a stream of their own; without, the step copies on its own."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "data"
    stage: ClassVar[Stage] = Stage.DATA
    images: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = ("transport",)
    symptoms: ClassVar[tuple[str, ...]] = ("input",)
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("pinned copies",)
    card: ClassVar[Card] = Card(
        buys=(
            "the wait for rows, where one thread reads more slowly than the GPU trains: "
            "H200, 160m, a thread that needs four steps for the rows of one has 0.24 of the "
            "speed, with it 1.00 (results/loading.jsonl)",
            "and the copy's place in the computing stream (derived)",
        ),
        costs=("cores, and memory of the host for the micro-batches that are read ahead (derived)"),
        helps="small models on fast GPUs, slow disks, costly packers",
        hurts="training on a CPU, where readers take its cores; runs that never wait",
        source="arXiv 2101.12127; torch.utils.data.DataLoader",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return what the run begins with."""
        return {"data.workers": self.workers or 1, "data.prefetch": self.prefetch}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Refuse to copy what another technique cuts on the host first."""
        on = context.plan.techniques.items() if context.plan is not None else ()
        cuts = [name for name, other in on if "recut" in other.composes]
        if cuts and self.side_copy and context.device == "cuda":
            return Unsupported(
                f"{cuts[0]} cuts rows on the host, after the readers have sent them to the GPU",
                mend(f"techniques.{self.name()}.side_copy=false"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Change nothing: tokens that wait on the device are few bytes beside their activations."""
        return ledger

    def apply(self, build: Build) -> None:
        """Put the tuned loader in the baseline's place."""
        build.transport = self._transport

    def _transport(self, build: Build, packer: Packer) -> Loader:
        plan, cuda = build.plan, build.device.type == "cuda"
        beside = min(build.world.ranks, torch.cuda.device_count()) if cuda else build.world.ranks
        return TunedLoader(
            packer,
            device=build.device if cuda and self.side_copy else None,
            workers=self.workers,
            most=max(1, min(MOST_THREADS, (_cores() - 1) // beside)),
            wait_share=self.wait_share,
            prefetch=self.prefetch,
            rows_per_step=plan.batches.each(lambda tokens: tokens // plan.data.sequence_length),
            micro_rows=plan.micro_rows,
            rank=build.world.place("data"),
            ranks=build.world.size("data"),
            order=build.order(build, packer),
            segments=build.mask.document,
            pin=cuda,
        )

    def active(self, build: Build) -> Evidence:
        """Report micro-batches by who made them; make one where the run has not asked for any."""
        loader = build.loader
        if not isinstance(loader, TunedLoader):
            return Evidence(False, "another loader reads the rows")
        waits = loader.waits
        if not waits.read_ahead + waits.read_here:
            loader.try_one()
        sent = loader.device is None or waits.copied_bytes > 0
        return Evidence(
            active=waits.read_ahead > 0 and waits.read_here == 0 and sent,
            detail=f"{waits.workers} threads made {waits.read_ahead} micro-batches, the training "
            f"thread {waits.read_here}; copied {waits.copied_bytes} bytes beside the computation",
            numbers=waits,
        )


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
