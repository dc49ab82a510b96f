"""Make what several test files need: tensors of attention, a first step, objects by hand."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.data.loader import Micro
from headrace.parallel.ring import Ring
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.train.train import step


def qkv(length: int, width: int = 8, device: str = "cpu", *, rows: int = 2) -> list[Tensor]:
    """Return queries of four heads, and keys and values of two, equal on every device."""
    torch.manual_seed(0)
    return [torch.randn(rows, length, heads, width).to(device) for heads in (4, 2, 2)]


def h200(plan: Any = None, **changes: Any) -> Context:
    """Return the place where a plan would run: one H200 in bf16, with `changes`."""
    here: dict[str, Any] = {
        "plan": plan or Plan.model_validate({"goal": {"steps": 1}}),
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "capability": (9, 0),
        "torch": (2, 13),
        "has_triton": True,
        "has_compiler": True,
        "ranks": 1,
        "precision": "bf16",
    }
    return Context(**{**here, **changes})


def gradients(build: Build, micros: Sequence[Micro]) -> dict[str, Tensor]:
    """Return the gradients of a first step under the run's flags, by parameter name."""
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        step(build, micros, 0)
    return {n: p.grad for n, p in build.model.named_parameters() if p.grad is not None}


def ring_of(rank: int, ranks: int) -> Ring:
    """A ring whose group answers who we are and no more."""
    return Ring(SimpleNamespace(rank=lambda: rank, size=lambda: ranks))  # type: ignore[arg-type]


def left(**what: Any) -> Any:
    """What a run would have left, of which evidence reads no more than this."""
    return SimpleNamespace(**what)


def bare(kind: type[Any], **has: Any) -> Any:
    """Return an instance of a class with these attributes, without calling `__init__`."""
    found: Any = object.__new__(kind)
    found.__dict__.update(has)
    return found
