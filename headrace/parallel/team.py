"""Share whole matrices of one shape among the ranks that hold parts or copies of them.

An optimizer that needs whole matrices would otherwise do all of its work on every rank. Here a
batch of k matrices goes to the ranks of `axis` and of "tensor" in turn: ceil(k / ranks) to
each, the first ranks first, the same on every run. Where FSDP cuts the matrices, each rank sends
its rows of the others' matrices to them and takes theirs of its own (all-to-all; gloo has none, and
torch gathers there). Where tensor parallelism cuts them, its ranks gather the few that are left.
Where ranks hold copies, nothing is sent before the work, and the results are gathered after it.
Groups that each hold all slices (`mesh.replicate`) each do all of the work: then no matrix crosses
the links between them, which are the slow ones.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.parallel.layout import Layout, gather, is_dtensor
from headrace.parallel.world import World


class Team:
    """Take whole matrices to their ranks, and what became of them back to where parts lie.

    Args:
        world: this process's place.
        layout: how ranks hold each of the matrices, before FSDP's cut.
        like: one of the parameters.
    """

    def __init__(self, world: World, layout: Layout, like: Tensor) -> None:
        self.world, self.layout, self.like = world, layout, like
        self.sharded, self.split = is_dtensor(like), layout.split.get("tensor")
        self.axis = "slices" if self.sharded else "shard"

    @property
    def ranks(self) -> int:
        """Return how many ranks share the work."""
        return self.world.size(self.axis) * self.world.size("tensor")

    def whole(self, parts: Tensor) -> Tensor:
        """Return this rank's whole matrices of a batch.

        All ranks of both axes call this together.

        Args:
            parts: this rank's part of every matrix, [matrices, *local].
        """
        mine = self._shards(parts, len(parts), to_whole=True) if self.sharded else None
        if mine is None:
            mine = parts[slice(*_range(len(parts), self.world, self.axis))]
        if self.split is not None:
            size = self.layout.shape[self.split]
            mine = gather(mine, self.split + 1, size, self.world, "tensor")
        return mine[slice(*_range(len(mine), self.world, "tensor"))]

    def mine(self, count: int) -> slice:
        """Return which of `count` matrices `whole` gives to this rank."""
        begin, end = _range(count, self.world, self.axis)
        first, last = _range(end - begin, self.world, "tensor")
        return slice(begin + first, begin + last)

    def everyones(self, mine: Tensor, count: int) -> Tensor:
        """Return what every rank has for its matrices, as one batch on all ranks.

        Args:
            mine: [this rank's matrices, ...].
            count: matrices of the batch.
        """
        begin, end = _range(count, self.world, self.axis)
        return _gathered(self._of_tensor(mine, end - begin), count, self.world, self.axis)

    def parts(self, mine: Tensor, count: int) -> Tensor:
        """Return this rank's part of every matrix; the inverse of `whole`.

        Args:
            mine: this rank's whole matrices, [this rank's, rows, columns].
            count: matrices of the batch.
        """
        begin, end = _range(count, self.world, self.axis)
        mine = self._of_tensor(mine, end - begin)
        if self.split is not None:
            offset, shape = self.layout.offsets(self.world)
            mine = mine.narrow(self.split + 1, offset[self.split], shape[self.split])
        if self.sharded:
            return self._shards(mine, count, to_whole=False)
        return _gathered(mine, count, self.world, self.axis)

    def _of_tensor(self, mine: Tensor, count: int) -> Tensor:
        """Return the whole matrices of all ranks along "tensor"."""
        return _gathered(mine, count, self.world, "tensor")

    def _shards(self, batch: Tensor, count: int, *, to_whole: bool) -> Tensor:
        """Return FSDP's rows of all matrices as some whole matrices, or the other way."""
        from torch.distributed.tensor import DTensor, Shard

        assert isinstance(self.like, DTensor)
        *copies, placement = self.like.placements
        rows = [*copies, Shard(placement.dim + 1)]  # type: ignore[attr-defined]
        matrices = [*copies, Shard(0)]
        before, after = (rows, matrices) if to_whole else (matrices, rows)
        shape = torch.Size((count, *self.like.shape))
        stride = (shape[1] * shape[2], shape[2], 1)
        mesh = self.like.device_mesh
        laid = DTensor.from_local(
            batch.contiguous(), mesh, before, run_check=False, shape=shape, stride=stride
        )
        return laid.redistribute(placements=after).to_local()


def _range(count: int, world: World, axis: str) -> tuple[int, int]:
    """Return (first, end) of this rank's share of a batch along an axis, as `Shard(0)` cuts it."""
    each = -(-count // world.size(axis))
    begin = min(count, world.place(axis) * each)
    return begin, min(count, begin + each)


def _gathered(mine: Tensor, count: int, world: World, axis: str) -> Tensor:
    """Return the batch of `count` of which every rank along an axis holds its share."""
    ranks = world.size(axis)
    if ranks == 1:
        return mine
    each = -(-count // ranks)
    full = mine.new_empty((ranks * each, *mine.shape[1:]))
    padded = mine.new_zeros((each, *mine.shape[1:])) if len(mine) < each else mine.contiguous()
    if len(mine) < each:
        padded[: len(mine)] = mine
    dist.all_gather_into_tensor(full, padded, group=world.group(axis))
    return full[:count]
