"""This module holds the Triton kernel of float8_cast.py; the first of them to run imports it."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launches import on_device_of

BLOCK = 4096
"""Numbers of a program: 32 for each thread of 4 warps."""


@triton.jit
def scaled_cast(x_ptr, out_ptr, scale_ptr, numbers, block: tl.constexpr):
    """Write `block` numbers."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < numbers
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    scaled = x * tl.load(scale_ptr)
    tl.store(out_ptr + at, scaled.to(out_ptr.dtype.element_ty), mask=inside)


def cast(x: Tensor, scale: Tensor) -> Tensor:
    """Launch the kernel."""
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    launch: Any = scaled_cast[(triton.cdiv(x.numel(), BLOCK),)]
    with on_device_of(x):
        launch(x, out, scale, x.numel(), block=BLOCK)
    return out
