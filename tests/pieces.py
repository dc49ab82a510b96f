"""What several files of tests begin with: tensors of attention, a first step, a ring of one."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace

import torch
from torch import Tensor

from headrace.data.loader import Micro
from headrace.parallel.ring import Ring
from headrace.sockets import Build
from headrace.train import step


def qkv(length: int, width: int = 8, device: str = "cpu", *, rows: int = 2) -> list[Tensor]:
    """Queries of four heads, keys and values of two; the same numbers on every device."""
    torch.manual_seed(0)
    return [torch.randn(rows, length, heads, width).to(device) for heads in (4, 2, 2)]


def gradients(build: Build, micros: Sequence[Micro]) -> dict[str, Tensor]:
    """Of a first step under the run's flags, by name."""
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        step(build, micros, 0)
    return {n: p.grad for n, p in build.model.named_parameters() if p.grad is not None}


def ring_of(rank: int, ranks: int) -> Ring:
    """A ring whose group answers who we are and no more."""
    return Ring(SimpleNamespace(rank=lambda: rank, size=lambda: ranks))  # type: ignore[arg-type]
