"""What each rank of the test of overlapped matmuls does: train with them and without."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import house
import pytest
import torch
import torch.distributed as dist
from composition import Composition, Outcome, run
from torch.distributed import _symmetric_memory as memory

from headrace.assemble.filled import check_active
from headrace.kernels.launches import COUNTS
from headrace.parallel import micro_pipeline
from headrace.parallel.world import World, join
from headrace.plan.mesh_config import MeshConfig
from headrace.techniques.parallel import tensor_parallel

RANKS = 2
SCALE = 8
"""Times that sizes are larger on GPUs: 256 features, rows of 128 tokens."""
BANDS = {"cpu": 1e-4, "cuda": 0.02}
"""Relative difference by L2 of what is added up in another order, in fp32 and in bf16."""
FORWARDS = 2 * 2 * 2 * 4
"""Attention and MLP of two blocks, in two steps of four micro-batches."""
FALLBACKS = {
    "fused_all_gather_matmul": micro_pipeline.GATHERS,
    "fused_matmul_reduce_scatter": micro_pipeline.SCATTERS,
}
"""Torch's operations -> the names of their launches."""


def check(kind: str, corpus: str, prepared: str) -> None:
    """Compare losses, gradients and weights of two steps, and read the evidence."""
    house.put_data_in(corpus, prepared)
    dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl")
    world = join(MeshConfig(tensor=RANKS), torch.device(kind))
    plain, _ = trained(world, kind, asynchronous=False)
    if kind == "cpu":
        with as_on_gpus():
            found, numbers = trained(world, kind, asynchronous=True)
    else:
        found, numbers = trained(world, kind, asynchronous=True)
    fused = [numbers[micro_pipeline.GATHERS], numbers[micro_pipeline.SCATTERS]]
    assert min(fused) >= FORWARDS, fused  # and the backward pass has as many where it can
    off = differences(found, plain)
    assert max(off.values()) < BANDS[kind], off
    dist.destroy_process_group()


def trained(world: World, kind: str, *, asynchronous: bool) -> tuple[Outcome, dict[str, Any]]:
    """Return what two steps gave, and the evidence of tensor parallelism."""
    knobs = {
        "tensor_parallel": {"asynchronous": asynchronous},
        "torch_compile": {"scope": "block", "backend": "inductor"},
    }
    composition = Composition("overlapped", {"tensor": RANKS}, knobs, shape="even", length=16)
    build, outcome = run(composition, world, device=kind, scale=SCALE if kind == "cuda" else 1)
    return outcome, dict(check_active(build)["tensor_parallel"].numbers)


def differences(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """Return the relative difference of each loss, and by L2 of each gradient and weight."""
    pairs = zip(found.losses, wanted.losses, strict=True)
    off = {f"loss {i}": abs(a - b) / abs(b) for i, (a, b) in enumerate(pairs)}
    for part in ("gradients", "weights"):
        ours, theirs = getattr(found, part), getattr(wanted, part)
        off |= {f"{part} {n}": float((ours[n] - t).norm() / t.norm()) for n, t in theirs.items()}
    return off


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Compile for a host as for GPUs: torch's own fallbacks stand for its fused operations."""

    def counted(name: str, plain: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            COUNTS[name] += 1
            return plain(*given, **named)

        return call

    library = torch.library.Library("symm_mem", "IMPL")
    for operation, name in FALLBACKS.items():
        library.impl(operation, counted(name, getattr(memory, f"_{operation}_fallback")), "CPU")
    with pytest.MonkeyPatch.context() as patch, memory._test_mode():
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(tensor_parallel, "share_memory", lambda group: None)
        patch.setattr(tensor_parallel.TensorParallel, "_waits", lambda self, context: None)
        yield
