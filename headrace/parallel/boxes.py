"""Which part of a global tensor a rank holds: a box, the same words for every layout.

A checkpoint that speaks of boxes can be written by one set of ranks and read by another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Box:
    """The part of a global tensor that one rank holds."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """The box that both hold, or None."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(h - lo for lo, h in zip(low, high, strict=True)))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Slices of this box inside of `outer`."""
        return tuple(
            slice(a - b, a - b + n)
            for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def local_part(tensor: Tensor) -> tuple[Tensor, Box, bool]:
    """This rank's local tensor, its box, and whether this rank is the one that writes it."""
    if hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        assert isinstance(tensor, DTensor)
        mesh, placements = tensor.device_mesh, tensor.placements
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        place = mesh.get_coordinate() or []
        first = all(c == 0 for c, p in zip(place, placements, strict=True) if p == Replicate())
        local = tensor.to_local()
        return local, Box(tuple(offset), tuple(shape)), first and local.numel() > 0
    writes = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return tensor, Box((0,) * tensor.ndim, tuple(tensor.shape)), writes
