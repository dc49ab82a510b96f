"""What each of two GPUs does to compare weights gathered in fp8 with those gathered in bf16."""

from typing import Any

import house
import torch
import torch.distributed as dist
from composition import Composition, Outcome, run

from headrace.assemble.filled import check_active
from headrace.kernels.float8_cast import KERNEL
from headrace.kernels.launches import COUNTS
from headrace.parallel.world import World, join
from headrace.plan.mesh_config import MeshConfig

RANKS = 2
SCALE = 8
"""Times that sizes are larger than on a host: 256 features, rows of 128 tokens."""
BAND = 0.1
"""Relative difference by L2 of gradients: weights that go by bf16 are rounded a second time."""


def check(corpus: str, prepared: str) -> None:
    """Compare losses and gradients of compiled blocks; read what was gathered, and by what cast."""
    house.put_data_in(corpus, prepared)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    world = join(MeshConfig(data=RANKS), torch.device("cuda"))
    wanted, _ = trained(world, "bf16")
    before = COUNTS[KERNEL]
    found, numbers = trained(world, "fp8")
    assert numbers["fp8_weights"] == 8 and COUNTS[KERNEL] > before, numbers
    off = [abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    assert max(off) < BAND / 10, off
    far = {
        name: float((found.gradients[name] - right).norm() / right.norm())
        for name, right in wanted.gradients.items()
    }
    assert max(far.values()) < BAND, far
    dist.destroy_process_group()


def trained(world: World, gather: str) -> tuple[Outcome, dict[str, Any]]:
    """Return what two steps gave, and the evidence of slices."""
    knobs = {
        "fsdp": {"gather": gather},
        "float8_linear": {"min_size": 1},
        "torch_compile": {"scope": "block", "backend": "inductor"},
    }
    composition = Composition("gathered", {"data": RANKS}, knobs, shape="even", length=16)
    build, outcome = run(composition, world, device="cuda", scale=SCALE)
    return outcome, dict(check_active(build)["fsdp"].numbers)
