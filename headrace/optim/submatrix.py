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

    Args:
        shape: of the batch, [matrices, rows, columns].
        dim: 1 where rows are taken, 2 where columns are.
        index: [matrices, taken]; None where all are.
    """

    shape: torch.Size
    dim: int
    index: Tensor | None

    def of(self, batch: Tensor) -> Tensor:
        """Return the taken rows or columns of a batch."""
        return batch if self.index is None else batch.gather(self.dim, self._index())

    def into_(self, batch: Tensor, part: Tensor) -> Tensor:
        """Replace the taken rows or columns of a batch by `part`, and return it."""
        return part if self.index is None else batch.scatter_(self.dim, self._index(), part)

    def alone(self, part: Tensor) -> Tensor:
        """Return the batch that is `part` where it is taken, and else IDLE."""
        if self.index is None:
            return part
        return self.into_(part.new_full(self.shape, IDLE), part)

    def of_rows(self) -> "Submatrix":
        """Return what is taken of numbers of which each row has one, [matrices, rows, 1]."""
        taken = self.index if self.dim == 1 else None
        return Submatrix(torch.Size((*self.shape[:2], 1)), 1, taken)

    def _index(self) -> Tensor:
        """Return the index of each number that is taken, as a view."""
        assert self.index is not None
        sizes = [*self.shape]
        sizes[self.dim] = self.index.size(1)
        return self.index.unsqueeze(3 - self.dim).expand(sizes)


def longest(batch: Tensor, fraction: float, dtype: torch.dtype) -> Submatrix:
    """Return the rows of largest L2 norm of each matrix, or its columns where it is tall.

    Args:
        batch: [matrices, rows, columns].
        fraction: which share of them.
        dtype: that the numbers have on every rank: one process takes the rows that ranks take.
    """
    dim = _thinned(batch.shape)
    if fraction == 1:
        return Submatrix(batch.shape, dim, None)
    lengths = torch.linalg.vector_norm(batch.to(dtype), dim=3 - dim, dtype=torch.float32)
    taken = lengths.topk(count_taken(fraction, batch.size(dim))).indices
    return Submatrix(batch.shape, dim, taken)


def count_touched(updates: Tensor) -> Tensor:
    """Return how many rows of a batch, or columns where it is tall, are not IDLE."""
    return (updates.select(3 - _thinned(updates.shape), 0) != IDLE).sum()


def _thinned(shape: torch.Size) -> int:
    """Return the dimension of a batch of which a part is taken: 1 for rows, 2 for columns."""
    return 1 if shape[1] <= shape[2] else 2
