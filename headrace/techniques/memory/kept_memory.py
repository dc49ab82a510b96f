"""Keep the memory that a step frees, so that the next one has not to ask the system for it again.

On a CPU torch takes its tensors from the C library. glibc gives blocks of more than 32 MiB back to
the system when they are freed, and the top of its heap when enough of that is free. So each step
asks for the same activations and logits again: the system hands memory out in pages of 4 KiB, which
it empties first, at each one's first touch. Two settings of glibc's allocator keep what was freed
(`core/kept_memory.py`); they hold while the run lasts and are put back after it.

Evidence is a block larger than any that glibc keeps by itself: taken, filled and freed as the run
begins. A smaller one then finds its pages there already, as the system's own count of faults tells.
Beside it, the pages that steps touched first. Left out: other allocators, which are loaded before a
program starts, as jemalloc is.
Source: man 3 mallopt (M_TRIM_THRESHOLD, M_MMAP_MAX).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core import kept_memory
from headrace.core.errors import RefusalKind
from headrace.core.kept_memory import pages_touched
from headrace.core.remedy import mend
from headrace.costs.host import KEEPS
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

PAGE_BYTES = 4096
"""Bytes of a page, the unit in which the system hands out memory; some systems have larger ones."""
BLOCK_BYTES = 33 << 20
"""Bytes of the probe's block: more than 32 MiB, the largest block that glibc keeps by itself."""
ROOM = 2
"""How many times as large the block is that is taken first: an aligned one of the same size need
not fit into what was freed, since a small number may have been put beside it meanwhile."""


TAKES = 3
"""How often the block is taken: the C library may first find an older place that fits it better,
whose pages were given back; what it then frees there it finds first."""


class KeptMemory(Technique[Build]):
    """Keep the memory that a step frees, so that the next one has not to ask for it again."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    composes: ClassVar[tuple[str, ...]] = ("runtime", "after_update")
    symptoms: ClassVar[tuple[str, ...]] = ("memory bandwidth", "computation")
    card: ClassVar[Card] = Card(
        buys="the time in which the system hands out memory page by page, a first touch for each 4 "
        "KiB (derived)",
        costs="memory that is free stays the process's until the run ends (derived)",
        helps="training on a CPU, above all with large logits or activations",
        hurts="a machine whose memory other processes need between steps",
        source="man7.org/linux/man-pages/man3/mallopt.3.html",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a CPU, and the C library that has these settings."""
        if context.device != "cpu":
            return Unsupported(
                f"tensors on {context.device} are not the C library's, and torch keeps their "
                "memory by itself",
                mend("device=cpu"),
                RefusalKind.DEVICE,
            )
        if not kept_memory.CAN_KEEP:
            return Unsupported(
                "this system's C library is not glibc", "Linux with glibc", RefusalKind.SYSTEM
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Price no time in which memory is handed out; tensors stay as they are."""
        return replace(ledger, sizes={**ledger.sizes, KEEPS: 1.0})

    def apply(self, build: Build) -> None:
        """Set it for the run, and count the pages that each step touches first."""
        seen: dict[str, Any] = {"again": None, "steps": []}
        build.notes[self.name()] = seen
        last = [0]

        def count(build: Build, finite: Tensor) -> None:
            now = pages_touched()
            seen["steps"].append(now - last[0])
            last[0] = now

        build.runtime.append(partial(_kept, seen))
        build.after_update.append(count)

    def active(self, build: Build) -> Evidence:
        """Report whether a block's pages were there when it was retaken, and the last step's."""
        seen = build.notes[self.name()]
        new_pages, steps = seen["again"], seen["steps"]
        pages = BLOCK_BYTES // PAGE_BYTES
        active = new_pages is not None and new_pages < pages / 2
        detail = "the settings were not in force"
        if new_pages is not None:
            detail = f"a freed block of {pages} pages was taken again with {new_pages} new ones"
        last = steps[-1] if steps else 0
        return Evidence(
            active=active,
            detail=f"{detail}; the last of {len(steps)} steps touched {last}",
            numbers={"new_pages": last, "steps": len(steps)},
        )


@contextmanager
def _kept(seen: dict[str, Any]) -> Iterator[None]:
    """Hold the settings inside; a block is taken out of the place that a larger one left."""
    with kept_memory.kept():
        _touch(ROOM * BLOCK_BYTES)
        seen["again"] = min(_touch(BLOCK_BYTES) for _ in range(TAKES))
        yield


def _touch(size_bytes: int) -> int:
    """Take a block, fill and free it; return how many pages the process touched first meanwhile."""
    before = pages_touched()
    torch.empty(size_bytes, dtype=torch.uint8).fill_(1)
    return pages_touched() - before
