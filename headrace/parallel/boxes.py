"""Which part of a global tensor a rank holds: a box, the same words for every layout.

A checkpoint that speaks of boxes can be written by one set of ranks and read by another.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from headrace.parallel.layout import Layout, is_dtensor, is_first, local_box, local_of
from headrace.parallel.world import World


@dataclass(frozen=True)
class Box:
    """The part of a global tensor that one rank holds."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """Return the box that both hold, or None."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(h - lo for lo, h in zip(low, high, strict=True)))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices of this box inside of `outer`."""
        return tuple(
            slice(a - b, a - b + n)
            for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True)
        )


class TensorPart(NamedTuple):
    """A piece is a rank's part of a global tensor."""

    local: Tensor
    shape: tuple[int, ...]
    """of the whole"""
    box: Box
    writes: bool
    """whether this rank is the one that saves it"""


def piece_of(
    tensor: Tensor, world: World | None = None, layout: Layout | None = None
) -> TensorPart:
    """Return what this rank holds of a tensor.

    Args:
        tensor: a plain tensor or a DTensor.
        world: this process's place; without one a DTensor speaks for itself and rank 0 for the
            rest.
        layout: of the parameter that it belongs to; a tensor of another shape than the parameter,
            such as a counter, is held whole.
    """
    shape, offset, size = tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape)
    sharded = is_dtensor(tensor) and any(p.is_shard() for p in tensor.placements)
    if is_dtensor(tensor):
        size, offset = local_box(tensor)
    if world is not None and layout is not None and layout.offsets(world)[1] == shape:
        begins = layout.offsets(world)[0]
        offset = tuple(a + b for a, b in zip(offset, begins, strict=True))
        shape = tuple(layout.shape)
    else:
        layout = None
    first = is_first(world, layout, sharded) if world is not None else _first_alone(tensor)
    local = local_of(tensor)
    return TensorPart(local, shape, Box(tuple(offset), tuple(size)), first and local.numel() > 0)


def _first_alone(tensor: Tensor) -> bool:
    """Return whether this rank writes a tensor of which only torch knows who holds it."""
    if is_dtensor(tensor):
        place = tensor.device_mesh.get_coordinate() or []
        replicas = [c for c, p in zip(place, tensor.placements, strict=True) if p.is_replicate()]
        return not any(replicas)
    return not dist.is_initialized() or dist.get_rank() == 0
