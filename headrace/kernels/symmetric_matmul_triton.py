"""This module holds the Triton kernel of symmetric_matmul.py; its first launch imports it.

Shapes: B matrices; M rows; K columns that are summed over; a program does one tile of BLOCK rows
and BLOCK columns, STEP of the summed columns at a time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.launches import on_device_of

BLOCK, STEP, WARPS, STAGES = 128, 64, 8, 3
"""The fastest of nine choices for matrices of 768 and 2,048 rows on an H200 (LOG.md)."""


@triton.jit
def symmetric_tile(
    left,
    right,
    added_ptr,
    out_ptr,
    rows,
    columns,
    scale,
    share,
    diagonal,
    adds: tl.constexpr,
    block: tl.constexpr,
    step: tl.constexpr,
):
    """Write what of one tile is on or below the diagonal, and its mirror image.

    The two halves of a tile on the diagonal may be rounded apart, so the lower one is used alone.
    """
    # Tiles are counted row by row, and row i begins at i (i + 1) / 2. Roots may be a little off.
    tile, matrix = tl.program_id(0), tl.program_id(1)
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    sums = tl.zeros((block, block), dtype=tl.float32)
    # Rows beyond a matrix are the next one's, and are not written. Columns beyond it are zeros.
    for k in range(0, tl.cdiv(columns, step)):
        x = left.load([matrix * rows + i * block, k * step])
        y = right.load([matrix * rows + j * block, k * step])
        sums = tl.dot(x, y.T, sums)
    down, across = i * block + tl.arange(0, block), j * block + tl.arange(0, block)
    first = matrix.to(tl.int64) * rows * rows
    at = first + down[:, None] * rows + across[None, :]
    inside = (down[:, None] < rows) & (across[None, :] <= down[:, None])
    sums = sums * scale
    if adds:
        sums += share * tl.load(added_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sums = tl.where(down[:, None] == across[None, :], sums + diagonal, sums)
    out = sums.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=inside)
    back = first + across[:, None] * rows + down[None, :]
    above = (down[None, :] < rows) & (across[:, None] < down[None, :])
    tl.store(out_ptr + back, tl.trans(out), mask=above)


def launch(
    left: Tensor, right: Tensor, added: Tensor | None, scale: float, share: float, diagonal: float
) -> Tensor:
    """Launch the kernel for a batch of products."""
    count, rows, columns = left.shape
    out = torch.empty(count, rows, rows, dtype=left.dtype, device=left.device)
    tiles = triton.cdiv(rows, BLOCK)
    sides = [
        TensorDescriptor.from_tensor(x.contiguous().view(count * rows, columns), [BLOCK, STEP])
        for x in (left, right)
    ]
    run: Any = symmetric_tile[(tiles * (tiles + 1) // 2, count)]
    with on_device_of(left):
        run(
            *sides,
            out if added is None else added.contiguous(),
            out,
            rows,
            columns,
            scale,
            share,
            diagonal,
            adds=added is not None,
            block=BLOCK,
            step=STEP,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return out
