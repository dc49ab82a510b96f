"""What each rank of the resharding test does: write tensors under one layout, read under others."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from headrace.train.checkpoint import Checkpoints, Saved

SHAPES = {"odd": (7, 5), "thin": (1, 3), "line": (13,), "cube": (4, 3, 5), "long": (5, 9)}
LAYOUTS: dict[int, list[tuple[tuple[int, ...], list[Placement]]]] = {
    1: [((1,), [Shard(0)])],
    2: [((2,), [Shard(0)]), ((2,), [Shard(-1)]), ((2,), [Replicate()])],
    4: [
        ((4,), [Shard(0)]),
        ((4,), [Shard(-1)]),
        ((2, 2), [Shard(0), Replicate()]),
        ((2, 2), [Replicate(), Shard(-1)]),
        ((2, 2), [Shard(0), Shard(-1)]),
        ((2, 2), [Shard(0), Shard(0)]),
    ],
}


def full(name: str) -> torch.Tensor:
    """Return the whole tensor of a name, filled with 1, 2, 3 and so on."""
    shape = SHAPES[name]
    return torch.arange(1.0, math.prod(shape) + 1).reshape(shape)


def laid_out(layout: tuple[tuple[int, ...], list[Placement]]) -> dict[str, torch.Tensor]:
    """Every tensor under a layout, and two that are no DTensors."""
    mesh = init_device_mesh("cpu", layout[0])
    found = {}
    for name in SHAPES:
        rank = full(name).ndim
        places = [Shard(p.dim % rank) if isinstance(p, Shard) else p for p in layout[1]]
        found[name] = distribute_tensor(full(name), mesh, places)
    return {**found, "plain": torch.full((3,), 7.0), "scalar": torch.tensor(9.0)}


def write(folder: str) -> None:
    """Save `ranks-N-layout-I` under every layout of this world."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number, layout in enumerate(LAYOUTS[ranks]):
        root = Path(folder) / f"ranks-{ranks}-layout-{number}"
        store = Checkpoints(root, rank=rank, ranks=ranks, keep_last=1)
        dist.barrier()
        store.save(1, laid_out(layout), {"rank": {"who": rank}})
        store.wait()
        dist.barrier()
    dist.destroy_process_group()


def read(folder: str) -> None:
    """Read everything that any world wrote under every layout of this world."""
    dist.init_process_group("gloo")
    roots = sorted(Path(folder).glob("ranks-*"))
    assert len(roots) == sum(len(layouts) for layouts in LAYOUTS.values())
    for root in roots:
        saved = Saved(root / "latest")
        assert [p["rank_values"]["who"] for p in saved.parts] == list(range(len(saved.parts)))
        for layout in LAYOUTS[dist.get_world_size()]:
            for name, expected in laid_out(layout).items():
                tensor = torch.zeros_like(expected)
                saved.fill_(name, tensor)
                local = tensor.to_local() if name in SHAPES else tensor  # type: ignore[attr-defined]
                right = expected.to_local() if name in SHAPES else expected  # type: ignore[attr-defined]
                assert torch.equal(local, right), (root.name, layout, name)
    dist.destroy_process_group()
