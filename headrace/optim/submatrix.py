"""Take the longest rows or columns out of matrices, for an update that touches no others.

Of each matrix the shorter side is thinned, so that what is left has fewer rows on that side and its
square is smaller. All counts are known before the first number is: nothing waits for the device.
"""

from dataclasses import dataclass
from math import ceil, inf

import torch
from torch import Tensor

IDLE = inf
"""What an update is where nothing is updated. An update itself is finite, or NaN where it fails, so
that this mark goes with it from rank to rank."""


def count_taken(fraction: float, size: int) -> int:
    """Return how many of `size` rows are taken: this fraction of them, rounded up."""
    return min(size, max(1, ceil(fraction * size - 1e-9)))  # 0.07 x 100 is above 7 in floats


def shape_taken(fraction: float, rows: int, columns: int) -> tuple[int, int]:
    """Return (rows, columns) of what is taken of a matrix."""
    if rows <= columns:
        return count_taken(fraction, rows), columns
    return rows, count_taken(fraction, columns)


@dataclass(frozen=True)
class Submatrix:
    """Hold which rows, or which columns, are taken of each matrix of a batch.

    What is taken is put back by a gather, which a compiler fuses with what reads the result: a
    scatter is a pass of its own, which was 3.7 of an update's 82 ms at 1b (LOG.md).

    Args:
        shape: of the batch, [matrices, rows, columns].
        dim: 1 where rows are taken, 2 where columns are.
        index: [matrices, taken]; None where all are.
        place: [matrices, rows or columns], where each stands in `index`; -1 where it is not taken.
    """

    shape: torch.Size
    dim: int
    index: Tensor | None = None
    place: Tensor | None = None

    def of(self, batch: Tensor) -> Tensor:
        """Return the taken rows or columns of a batch."""
        if self.index is None:
            return batch
        sizes = [*self.shape]
        sizes[self.dim] = self.index.size(1)
        return batch.gather(self.dim, self.index.unsqueeze(3 - self.dim).expand(sizes))

    def into(self, batch: Tensor | float, part: Tensor) -> Tensor:
        """Return a batch whose taken rows or columns are `part`."""
        if self.place is None:
            return part
        place = self.place.unsqueeze(3 - self.dim)
        spread = part.gather(self.dim, place.clamp_min(0).expand(self.shape))
        return torch.where(place < 0, batch, spread)

    def alone(self, part: Tensor) -> Tensor:
        """Return the batch that is `part` where it is taken, and else IDLE."""
        return self.into(IDLE, part)

    def of_rows(self) -> "Submatrix":
        """Return what is taken of numbers of which each row has one, [matrices, rows, 1]."""
        shape = torch.Size((*self.shape[:2], 1))
        return Submatrix(shape, 1, self.index, self.place) if self.dim == 1 else Submatrix(shape, 1)


def longest(batch: Tensor, fraction: float, dtype: torch.dtype) -> Submatrix:
    """Return the rows of largest L2 norm of each matrix, or its columns where it is tall.

    Args:
        batch: [matrices, rows, columns].
        fraction: which share of them.
        dtype: that the numbers have on every rank: one process takes the rows that ranks take.
    """
    dim = _thinned(batch.shape)
    if fraction == 1:
        return Submatrix(batch.shape, dim)
    lengths = torch.linalg.vector_norm(batch.to(dtype), dim=3 - dim, dtype=torch.float32)
    taken = lengths.topk(count_taken(fraction, batch.size(dim))).indices
    order = torch.arange(taken.size(1), device=batch.device).expand_as(taken)
    place = torch.full(lengths.shape, -1, device=batch.device).scatter_(1, taken, order)
    return Submatrix(batch.shape, dim, taken, place)


def count_touched(updates: Tensor) -> Tensor:
    """Return how many rows of a batch, or columns where it is tall, are not IDLE."""
    return (updates.select(3 - _thinned(updates.shape), 0) != IDLE).sum()


def _thinned(shape: torch.Size) -> int:
    """Return the dimension of a batch of which a part is taken: 1 for rows, 2 for columns."""
    return 1 if shape[1] <= shape[2] else 2
