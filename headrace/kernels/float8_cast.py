"""Cast numbers to e4m3 under a scale that lies on the device.

Torch multiplies in one kernel and casts in the next, which move 13 bytes for a number of fp32. On a
GPU one kernel moves 5. Scales are powers of two that keep every number inside e4m3, so the product
is exact and both round it once, to the nearest.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from headrace.kernels.launches import COUNTS

KERNEL = "float8_cast"
"""The name of its launches."""


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def cast_to_float8(x: Tensor, scale: Tensor) -> Tensor:
    """Return x * scale as e4m3, of the same shape.

    Args:
        x: fp32 or bf16, and contiguous.
        scale: a scalar in fp32 on the same device; no product is beyond e4m3's largest, 448.
    """
    if x.is_cuda and _has_triton():
        return fused_cast(x, scale)
    return (x * scale).to(torch.float8_e4m3fn)


def fused_cast(x: Tensor, scale: Tensor) -> Tensor:
    """Return what `cast_to_float8` does, by the kernel."""
    from headrace.kernels import float8_cast_triton

    COUNTS[KERNEL] += 1
    return float8_cast_triton.cast(x, scale)
