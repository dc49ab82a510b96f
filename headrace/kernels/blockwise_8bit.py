"""Optimizer state takes 8 bits a number: codes into a map of levels, times a scale of each block.

The moments of Adam span many orders of magnitude, so the 256 levels are spaced by a *dynamic* map:
seven decades, each with its own linear levels, finest near the block's largest. A block is 256
numbers along a row, or what is left of the row. Rows are quantized by themselves, so a shard of
rows holds the same codes and scales as the whole. (torchao cuts blocks of the flattened shard, and
its state depends on where shards are cut.) The update reads codes, computes in fp32 and writes
codes; the parameter sees the moments before they are rounded. All of it works on a slice of rows at
a time, because eager steps would keep several fp32 copies of a matrix otherwise.
Source: arXiv 2110.02861.

Shapes: R rows, C columns, B blocks of a row, K numbers of a block.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Numbers under one scale (torchao's choice; the paper has 2,048)."""
SLICE_NUMBERS = 1 << 22
"""Numbers that are updated at once: 16 MiB of each fp32 temporary."""
LEAST_SCALE = 1e-12
"""The scale of a block whose numbers are all zero, and of one whose numbers are smaller."""
_DECADES = 7
"""Powers of ten that the map spans (arXiv 2110.02861, section 2.2)."""


@lru_cache(maxsize=2)
def levels(signed: bool) -> tuple[float, ...]:
    """Return the 256 levels of the dynamic map, ascending, from -1 (or 0) to 1."""
    levels = [0.0, 1.0]
    signs = (1, -1) if signed else (1,)
    for decade in range(_DECADES):
        count = 2 ** (decade + (0 if signed else 1))
        edges = torch.linspace(0.1, 1, count + 1)
        means = ((edges[:-1] + edges[1:]) / 2).tolist()
        levels += [s * 10.0 ** (decade - _DECADES + 1) * m for m in means for s in signs]
    return tuple(sorted(levels))


class Moment(NamedTuple):
    """A quantized moment is these three tensors."""

    codes: Tensor
    """Indices into the map, uint8, in the parameter's shape."""
    scales: Tensor
    """The largest magnitude of each block, fp32 [R, B]."""
    map: Tensor
    """The levels, fp32 [256]."""


def blocks_of(columns: int) -> int:
    """Return the number of blocks of a row."""
    return math.ceil(columns / BLOCK)


def quantize(values_RC: Tensor, levels_256: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [R, C] uint8 of the nearest levels, and scales [R, B]."""
    columns = values_RC.size(1)
    size = min(BLOCK, columns)
    if columns % size:
        values_RC = F.pad(values_RC, (0, blocks_of(columns) * size - columns))
    blocks_RBK = values_RC.unflatten(1, (-1, size))
    scales_RB = blocks_RBK.abs().amax(-1).clamp(min=LEAST_SCALE)
    between = (levels_256[1:] + levels_256[:-1]) / 2
    codes = torch.bucketize(
        blocks_RBK / scales_RB.unsqueeze(-1), between, right=True, out_int32=True
    )
    return codes.to(torch.uint8).flatten(1)[:, :columns], scales_RB


def dequantize(codes_RC: Tensor, scales_RB: Tensor, levels_256: Tensor) -> Tensor:
    """Return the numbers that codes and scales stand for, fp32 [R, C]."""
    columns = codes_RC.size(1)
    size = min(BLOCK, columns)
    scale_RC = scales_RB.repeat_interleave(size, 1)[:, :columns]
    return levels_256[codes_RC.int()] * scale_RC


def adamw_(
    weight: Tensor,
    grad: Tensor,
    first: Moment,
    second: Moment,
    *,
    lr: Tensor,
    step: Tensor,
    skip: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update a matrix by AdamW in place; where `skip` is true everything stays as it is.

    Args:
        weight: the parameter [R, C].
        grad: its gradient.
        first: its first moment, signed.
        second: its second moment.
        lr: the learning rate, a scalar on the device: a number would be compiled into the code.
        step: the count of updates with this one, a scalar on the device.
        skip: a bool on the device.
        betas: shares of the old moments that are kept.
        eps: added to the root.
        weight_decay: decoupled, times the learning rate.
    """
    gradient = grad.float()
    m_RC = dequantize(*first).lerp(gradient, 1 - betas[0])
    v_RC = dequantize(*second).lerp(gradient.square(), 1 - betas[1])
    for moment, values in ((first, m_RC), (second, v_RC)):
        codes, scales = quantize(values, moment.map)
        moment.codes.copy_(torch.where(skip, moment.codes, codes))
        moment.scales.copy_(torch.where(skip, moment.scales, scales))
    root = v_RC.sqrt() / (1 - betas[1] ** step).sqrt() + eps
    kept = weight.float() * (1 - lr * weight_decay)
    updated = kept - lr * (m_RC / (1 - betas[0] ** step)) / root
    weight.copy_(torch.where(skip, weight, updated.to(weight.dtype)))
