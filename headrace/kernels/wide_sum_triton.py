"""This module holds the Triton kernel of wide_sum.py; its first launch imports it.

A program adds BLOCK numbers.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launches import on_device_of

BLOCK = 1024
"""Numbers that a program adds: 8 for each thread of 4 warps, 16 bytes in half precision. The
fastest of four from 2,048 x 8,192 numbers on."""


@triton.jit
def wide_sum(total_ptr, part_ptr, count, block: tl.constexpr):
    """Add `block` numbers."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    total = tl.load(total_ptr + at, mask=inside)
    part = tl.load(part_ptr + at, mask=inside).to(tl.float32)
    tl.store(total_ptr + at, total + part, mask=inside)


def add_(total: Tensor, part: Tensor) -> Tensor:
    """Launch the kernel over two contiguous tensors of one shape."""
    count = total.numel()
    run: Any = wide_sum[(triton.cdiv(count, BLOCK),)]
    with on_device_of(total):
        run(total, part, count, block=BLOCK)
    return total
