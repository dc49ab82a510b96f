"""How the ranks hold a parameter: which axis cuts it where, and what its gradient lacks.

Tensor parallelism keeps plain local tensors: a `Layout` says which slice of the whole this rank
holds. FSDP makes DTensors of those. Checkpoints, clipping and optimizers that need whole matrices
read layouts and work under any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.parallel.world import AXES, World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def share(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (offset, count) of a rank's contiguous share; the first ranks have one more."""
    each, over = divmod(size, ranks)
    return rank * each + min(rank, over), each + (rank < over)


def is_dtensor(tensor: object) -> "TypeGuard[DTensor]":
    """Return whether the tensor is a DTensor. Most verbs never import that class (0.5 s)."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def shallow_copy(module: nn.Module) -> Any:
    """Return a copy of a module that shares its parts, also of one that FSDP2 gathers.

    FSDP2 gives such a module a class that `copy.copy` cannot make.
    """
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied


def local_of(tensor: Tensor) -> Tensor:
    """Return the part that this rank holds: a DTensor's local tensor, or the tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_box(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of a DTensor's part that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


@dataclass
class Layout:
    """A layout says how ranks hold one parameter.

    Args:
        shape: of the whole.
        split: axis -> the dimension of the whole that it cuts into shares. FSDP's cut along
            "slices" is the DTensor's own and not named here.
        partial: axes along which its gradient is a partial sum after the backward pass.
    """

    shape: Sequence[int]
    split: dict[str, int] = field(default_factory=dict)
    partial: set[str] = field(default_factory=lambda: {"shard"})

    def offsets(self, world: World) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (offset, shape) of this rank's slice of the whole, before a cut along "slices"."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for axis, dim in self.split.items():
            offset[dim], shape[dim] = share(shape[dim], world.size(axis), world.place(axis))
        return tuple(offset), tuple(shape)

    def cut(self, world: World, whole: Tensor) -> Tensor:
        """Return this rank's slice of the whole, before any cut along "slices"."""
        offset, shape = self.offsets(world)
        for dim, (start, count) in enumerate(zip(offset, shape, strict=True)):
            whole = whole.narrow(dim, start, count)
        return whole

    def copies(self, world: World, tensor: Tensor) -> int:
        """Return how many ranks hold the same numbers as this one, itself included."""
        cut = {*self.split, *(("shard",) if is_dtensor(tensor) else ())}
        free = [axis for axis in ("shard", "tensor") if axis not in cut]
        free += ["ends"] if "ends" in self.partial else []
        free += ["replicate"] if "shard" in cut else []
        if "expert" in cut and "shard" in free:
            free[free.index("shard")] = "expert_copies"
        count = 1
        for axis in free:
            count *= world.size(axis)
        return count

    def whole(self, world: World, like: Tensor, local: Tensor) -> Tensor:
        """Return the whole tensor of every rank's `local` part, which lies as parameter `like`.

        All ranks of the axes that cut it call this together.
        """
        if is_dtensor(like):
            local = as_parameter(like, local).full_tensor()  # type: ignore[attr-defined]
        for axis, dim in self.split.items():
            local = gather(local, dim, self.shape[dim], world, axis)
        return local

    def part(self, world: World, like: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's local part of a whole tensor: the inverse of `whole`."""
        mine = self.cut(world, whole)
        if not is_dtensor(like):
            return mine
        shape, offset = local_box(like)
        for dim, (start, count) in enumerate(zip(offset, shape, strict=True)):
            mine = mine.narrow(dim, min(start, mine.size(dim)), count)
        return mine


def as_parameter(like: Tensor, local: Tensor) -> Tensor:
    """Return this rank's part of a tensor as one that lies as parameter `like`."""
    if not is_dtensor(like):
        return local
    return like.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def gather(local: Tensor, dim: int, size: int, world: World, axis: str) -> Tensor:
    """Return the whole of `size` along `dim` from an axis's shares, which may differ by one."""
    ranks = world.size(axis)
    if ranks == 1:
        return local
    counts = [share(size, ranks, r)[1] for r in range(ranks)]
    local = local.movedim(dim, 0)
    if local.size(0) < counts[0]:
        local = torch.cat([local, local.new_zeros(1, *local.shape[1:])])
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in counts]
    dist.all_gather(parts, local.contiguous(), group=world.group(axis))
    whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return whole.movedim(0, dim)


def is_first(world: World, layout: Layout | None, sharded: bool) -> bool:
    """Return whether this rank is the first of those that hold the same numbers of a tensor.

    Stages of a pipeline hold different parameters, but for one that the ends share.
    """
    cut = {*(layout.split if layout else ()), *(("data", "context") if sharded else ())}
    shared = layout is not None and "ends" in layout.partial
    axes = [a for a in AXES if a not in cut and (a != "pipeline" or shared)]
    axes += ["replicate"] if sharded else []
    if "expert" in cut and not sharded:  # ranks of `data` hold other experts
        axes = [a for a in axes if a not in ("data", "context")] + ["expert_copies"]
    return all(world.place(axis) == 0 for axis in axes)
