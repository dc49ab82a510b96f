"""Let the CUDA allocator grow its segments, so that free memory is not lost in gaps.

torch's allocator asks the driver for segments of fixed size and cuts them into blocks. When sizes
change (other row lengths, other micro-batches, a validation between steps) free blocks lie between
used ones, none large enough, and a run ends out of memory with gigabytes free. An expandable
segment is a large range of addresses into which pages are mapped as they are needed: it grows at
its end instead of beginning another segment, so free memory stays in one piece.

It is set for the run's loop and put back after it. What the build has allocated before (weights)
lies where it lies; gradients, optimizer state and activations, which are what changes, come after.
Free blocks of older segments are still used first. So evidence is a tensor that no older segment
has room for, allocated as the run begins: the allocator's snapshot says where it lies; and beside
it, where the run's own tensors lie. It costs nothing once pages are mapped; mapping is slower than
reusing a block. Left out: other settings of the allocator.
Source: docs.pytorch.org/docs/stable/notes/cuda.html (expandable_segments).
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.parallel.layout import local_of
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

SETTING = "expandable_segments"
LARGE_BYTES = 20 * 2**20
"""The allocator rounds segments of its own choice up to this, so more begins a new one."""


class ExpandableSegments(Technique[Build]):
    """Let the CUDA allocator grow its segments, so that free memory is not lost in gaps."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.STEP
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    symptoms: ClassVar[tuple[str, ...]] = ("fragmentation",)
    card: ClassVar[Card] = Card(
        buys=(
            "memory that is free and in too small pieces: reserved less allocated bytes",
            "five rows of a 7B model, which ended out of memory beside 7.8 GiB of such "
            "pieces, trained at 63.3% of an H200's peak (results/limits.jsonl)",
            "it cured an out-of-memory of 32 H100s (Megatron Bridge)",
        ),
        costs="slower first steps, while pages are mapped",
        helps="lengths or micro-batches that change, and runs near the device's memory",
        hurts="nothing known; it gains nothing where shapes are fixed and memory is left",
        source="docs.pytorch.org/docs/stable/notes/cuda.html; Megatron Bridge, performance guide",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require the native allocator of an NVIDIA GPU on Linux."""
        if context.device != "cuda":
            return Unsupported(
                f"memory of {context.device} is not the CUDA allocator's",
                mend("device=cuda"),
                RefusalKind.DEVICE,
            )
        if sys.platform == "win32":
            return Unsupported(
                "the driver maps no pages by need on Windows",
                "Linux, or leave it",
                RefusalKind.SYSTEM,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Set the size that the allocator's replay reads; tensors stay, and gaps are no line."""
        return replace(ledger, sizes={**ledger.sizes, SETTING: 1.0})

    def apply(self, build: Build) -> None:
        """Switch it on for the run."""
        seen = build.notes[self.name()] = {"grows": False}
        build.runtime.append(partial(_expandable, build.device, seen))

    def active(self, build: Build) -> Evidence:
        """Report where new memory came from at first, and where gradients and states lie."""
        if build.device.type != "cuda":
            return Evidence(False, f"{build.device.type} has no segments")
        segments = torch.cuda.memory_snapshot()
        growing = [s for s in segments if s["is_expandable"]]
        inside = _bytes_inside(growing, _own_tensors(build))
        mapped = sum(s["total_size"] for s in growing)
        grows = build.notes[self.name()]["grows"]
        return Evidence(
            active=grows,
            detail=f"new memory {'grows a segment' if grows else 'begins another segment'}; "
            f"{len(growing)} of {len(segments)} segments are expandable and hold {inside} "
            f"bytes of this run's gradients and optimizer state, of {mapped} that are mapped",
            numbers={"segments": len(growing), "own_bytes": inside, "mapped_bytes": mapped},
        )


@contextmanager
def _expandable(device: torch.device, seen: dict[str, bool]) -> Iterator[None]:
    """Make new segments expandable inside; restore the setting afterwards."""
    before = _settings()
    others = [s for s in before.split(",") if s and not s.startswith(SETTING)]
    _set_settings(",".join([*others, f"{SETTING}:True"]))
    try:
        seen["grows"] = device.type == "cuda" and _new_memory_grows(device)
        yield
    finally:
        was = before if SETTING in before else ",".join([*others, f"{SETTING}:False"])
        _set_settings(was)


def _new_memory_grows(device: torch.device) -> bool:
    """Return whether a tensor that no fixed segment has room for lies in an expandable one."""
    torch.cuda.empty_cache()
    room = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if not segment["is_expandable"] and block["state"] == "inactive"
    ]
    probe = torch.empty(max(room, default=0) + LARGE_BYTES, dtype=torch.uint8, device=device)
    growing = [s for s in torch.cuda.memory_snapshot() if s["is_expandable"]]
    return _bytes_inside(growing, [probe]) > 0


def _settings() -> str:
    """Return the allocator's settings as they were last set; "" where they are unavailable."""
    read: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return (read() if read else "") or ""


def _set_settings(settings: str) -> None:
    """Change the allocator of a running process; older torch has another name for it."""
    write: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (write or torch.cuda.memory._set_allocator_settings)(settings)


def _own_tensors(build: Build) -> list[Tensor]:
    """Return gradients and optimizer state on the device, each rank's part."""
    tensors = [p.grad for p in build.model.parameters() if p.grad is not None]
    for optimizer in build.optimizers.values():
        for state in getattr(optimizer, "state", {}).values():
            tensors += [v for v in state.values() if isinstance(v, Tensor)]
    return [t for t in map(local_of, tensors) if t.device.type == "cuda"]


def _bytes_inside(segments: list[dict[str, Any]], tensors: list[Tensor]) -> int:
    """Return the bytes of the tensors that begin inside of a segment."""
    ranges = sorted((s["address"], s["address"] + s["total_size"]) for s in segments)
    starts = [start for start, _ in ranges]
    inside = 0
    for tensor in tensors:
        place = bisect_right(starts, tensor.data_ptr()) - 1
        if place >= 0 and tensor.data_ptr() < ranges[place][1]:
            inside += tensor.nbytes
    return inside
