"""Compute half of a product that is symmetric, and write it twice.

A matrix times its own transpose is symmetric, and so is the product of two polynomials of one
symmetric matrix: all that Muon's iteration multiplies but its last product (orthogonalize.py). A
library's matmul computes both halves. Here a program computes one tile on or below the diagonal,
scales it, adds a matrix and a number on the diagonal, rounds once, and writes the tile and its
mirror image.

LOG.md has what a prototype took beside cuBLAS: it won from 768 rows on, and most where a matrix is
added. The iteration adds none any more, and in whole steps of 1b it lost (learning.jsonl, kind
optimizer_share), so that nothing chooses it unasked.

Triton compiles it for a GPU with a tensor memory accelerator; `reference` is torch's own
operations. Source: the idea is that of BLAS's `syrk`; for Muon see github.com/nil0x9/flash-muon and
modded-nanogpt.

Shapes: B matrices; M rows; K columns that are summed over.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.launches import COUNTS

LEAST_ROWS = 768
"""The fewest rows of matrices from which half of a product was faster than all of it."""
ALIGNED = 8
"""Columns in half precision whose bytes the memory accelerator takes at once."""
CAPABILITY = (9, 0)
"""The compute capability from which GPUs have the accelerator (Hopper)."""


def is_served(rows: int, columns: int) -> bool:
    """Return whether half of the product of matrices of this shape is worth computing alone."""
    return rows >= LEAST_ROWS and rows % ALIGNED == 0 and columns % ALIGNED == 0


def reference(
    left: Tensor,
    right: Tensor,
    added: Tensor | None = None,
    scale: float = 1.0,
    share: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Compute what `symmetric_matmul` equals by torch's own operations, rounding as they do."""
    if added is not None:
        out = torch.baddbmm(added, left, right.mT, beta=share, alpha=scale)
    elif scale != 1 and left.size(-1) == left.size(-2):
        out = torch.baddbmm(left, left, right.mT, beta=0, alpha=scale)  # which copies nothing
    else:
        out = scale * torch.bmm(left, right.mT) if scale != 1 else torch.bmm(left, right.mT)
    if diagonal:
        add_to_diagonals_(out, diagonal)
    return out


@torch.library.custom_op("headrace::add_to_diagonals_", mutates_args=("squares",))
def add_to_diagonals_(squares: Tensor, value: float) -> None:
    """Add a number to the diagonals of squares [batch, n, n], in place.

    A compiler that saw the view of a diagonal would write whole squares anew.
    """
    squares.diagonal(dim1=-2, dim2=-1).add_(value)


@add_to_diagonals_.register_fake
def _(squares: Tensor, value: float) -> None:
    return None


@torch.library.custom_op("headrace::symmetric_matmul", mutates_args=())
def symmetric_matmul(
    left: Tensor,
    right: Tensor,
    added: Tensor | None = None,
    scale: float = 1.0,
    share: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Return scale x left right^T + share x added + diagonal x identity, [B, M, M].

    Args:
        left: [B, M, K] in half precision on a GPU, contiguous.
        right: the same, so that left right^T is symmetric; nothing checks that.
        added: symmetric matrices [B, M, M]; None adds nothing.
        scale: factor of the product.
        share: factor of `added`.
        diagonal: added to each diagonal.
    """
    from headrace.kernels import symmetric_matmul_triton

    COUNTS["symmetric_matmul"] += 1
    return symmetric_matmul_triton.launch(left, right, added, scale, share, diagonal)


@symmetric_matmul.register_fake
def _(left: Tensor, *rest: Any) -> Tensor:
    return left.new_empty(left.size(0), left.size(1), left.size(1))
