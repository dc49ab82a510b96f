"""Share whole matrices of one shape among the ranks that hold parts or copies of them.

An optimizer that needs whole matrices would otherwise do all of its work on every rank. Here a
batch of k matrices goes to the ranks of `axis` and of "tensor" in turn: ceil(k / ranks) to
each, the first ranks first, the same on every run. Where FSDP cuts the matrices, each rank sends
its rows of the others' matrices to them and takes theirs of its own (all-to-all; where ranks have
unequal rows, torch pads them). Where tensor parallelism cuts them, its ranks gather the few that
are left. Where ranks hold copies, nothing is sent before the work, and the results are gathered
after it. What FSDP's ranks exchange is begun before it is waited for, so that a batch travels while
another one is worked on (`stagger`).
Groups that each hold all slices (`mesh.replicate`) each do all of the work: then no matrix crosses
the links between them, which are the slow ones.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.parallel.layout import Layout, gather, is_dtensor
from headrace.parallel.world import World

Arriving = Callable[[], Tensor]
"""What waits for a batch that was sent, and returns it."""


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

    @property
    def travels(self) -> bool:
        """Return whether batches are sent while others are worked on.

        They are where several ranks have as many rows of each matrix.
        """
        if not self.sharded:
            return False
        ranks = self.like.device_mesh.size(-1)  # type: ignore[attr-defined]
        even = self.like.shape[self._cut_dim] % ranks == 0
        return even and ranks == self.world.size(self.axis) > 1

    def whole(self, parts: Tensor) -> Arriving:
        """Begin to send; return what waits for this rank's whole matrices of a batch.

        All ranks of both axes call this together, and then what it returns. Where batches do not
        travel, all is sent by then.

        Args:
            parts: this rank's part of every matrix, [matrices, *local].
        """
        if not self.sharded:
            own = parts[slice(*_range(len(parts), self.world, self.axis))]
            return lambda: self._my_share(own)
        arriving = self._to_whole(parts)
        return lambda: self._my_share(arriving())

    def _my_share(self, mine: Tensor) -> Tensor:
        """Return this rank's matrices, whole, of those that the ranks along "tensor" share."""
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

    def parts(self, mine: Tensor, count: int) -> Arriving:
        """Begin to send; return what waits for this rank's part of every matrix.

        It is the inverse of `whole`.

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
            return self._to_parts(mine, count)
        return partial(_gathered, mine, count, self.world, self.axis)

    def _of_tensor(self, mine: Tensor, count: int) -> Tensor:
        """Return the whole matrices of all ranks along "tensor"."""
        return _gathered(mine, count, self.world, "tensor")

    def _to_whole(self, parts: Tensor) -> Arriving:
        """Begin to send FSDP's rows of all matrices; return what waits for some whole ones."""
        if not self.travels:
            return partial(self._shards, parts, len(parts), to_whole=True)
        counts, dim = self._counts(len(parts)), self._cut_dim + 1
        own = counts[self.world.place(self.axis)]
        arriving = self._sent(parts, counts, [own] * len(counts))
        shape = (len(counts), own, *parts.shape[1:])
        return lambda: arriving().view(shape).movedim(0, dim).flatten(dim, dim + 1)

    def _to_parts(self, mine: Tensor, count: int) -> Arriving:
        """Begin to send some whole matrices; return what waits for FSDP's rows of all."""
        if not self.travels:
            return partial(self._shards, mine, count, to_whole=False)
        counts, dim = self._counts(count), self._cut_dim + 1
        apart = mine.unflatten(dim, (len(counts), -1)).movedim(dim, 0).flatten(0, 1)
        return self._sent(apart, [len(mine)] * len(counts), counts)

    def _counts(self, count: int) -> list[int]:
        """Return how many of `count` matrices each rank along the axis has."""
        ranks = range(self.world.size(self.axis))
        ends = [_range(count, self.world, self.axis, rank) for rank in ranks]
        return [end - begin for begin, end in ends]

    def _sent(self, batch: Tensor, give: list[int], take: list[int]) -> Arriving:
        """Begin to send so many of a batch to each rank, and to take so many of each."""
        batch = batch.contiguous()
        arrived = batch.new_empty((sum(take), *batch.shape[1:]))
        group = self.world.group(self.axis)
        work = dist.all_to_all_single(arrived, batch, take, give, group=group, async_op=True)
        assert work is not None  # this rank is in the group

        def wait() -> Tensor:
            work.wait()
            return arrived

        return wait

    @property
    def _cut_dim(self) -> int:
        """Return which dimension of a matrix FSDP cuts."""
        *_, placement = self.like.placements  # type: ignore[attr-defined]
        return placement.dim

    def _shards(self, batch: Tensor, count: int, *, to_whole: bool) -> Tensor:
        """Return FSDP's unequal rows of all matrices as some whole ones, or the other way."""
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


def _range(count: int, world: World, axis: str, rank: int | None = None) -> tuple[int, int]:
    """Return (first, end) of a rank's share of a batch along an axis, as `Shard(0)` cuts it.

    Args:
        count: matrices of the batch.
        world: this process's place.
        axis: the axis.
        rank: along it; None is this one.
    """
    each = -(-count // world.size(axis))
    begin = min(count, (world.place(axis) if rank is None else rank) * each)
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


def stagger(updates: Iterable[Iterator[None]]) -> None:
    """Run updates to their ends, each one stage behind the one that began before it.

    So what a stage sends travels while the stage of another is computed, and no more updates are
    under way than there are stages.
    """
    running = deque[Iterator[None]]()
    for update in updates:
        running.appendleft(update)
        _advance(running)
    while running:
        _advance(running)


def _advance(running: deque[Iterator[None]]) -> None:
    """Run a stage of each, those that began last first, and leave out those that have ended."""
    for update in list(running):
        try:
            next(update)
        except StopIteration:
            running.remove(update)
