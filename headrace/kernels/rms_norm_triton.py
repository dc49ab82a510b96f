"""This module holds the Triton kernels of rms_norm.py; the first of them to run imports it.

A program computes whole rows: `tile` of them, each in `block` features, a power of two.

Shapes: N rows, D features, P programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launches import on_device_of

TILE_NUMBERS = 2048
"""Numbers that a program reads at once, in several rows where rows are narrower."""
PARTS = 512
"""Most programs of the backward pass: about four for each of an H200's 132 processors. A constant,
so that the weight's gradient is added up in the same order on every GPU."""


@triton.jit
def rms_norm_forward(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    rstd_ptr,
    rows,
    features,
    eps,
    adds: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """Write results of one tile of rows, and one over the root of each row's mean square.

    With `adds` what is normalised is x + delta, rounded as it is written.
    """
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    feature = tl.arange(0, block)
    here = feature < features
    inside = (row < rows)[:, None] & here[None, :]
    at = row.to(tl.int64)[:, None] * features + feature[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = (x + delta).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + feature, mask=here, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / features + eps)
    out = x * rstd[:, None] * weight[None, :]
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward(
    grad_ptr,
    along_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    out_ptr,
    part_ptr,
    rows,
    features,
    adds: tl.constexpr,
    trained: tl.constexpr,
    steps: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """Write gradients of `steps` tiles of rows, and a partial sum of the weight's gradient.

    With `adds` the gradient that reaches `x` past the norm is added to the norm's own.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    feature = tl.arange(0, block)
    here = feature < features
    weight = tl.load(weight_ptr + feature, mask=here, other=0.0).to(tl.float32)
    part = tl.zeros([block], dtype=tl.float32)
    for step in range(steps):
        row = (step * programs + program) * tile + tl.arange(0, tile)
        inside = (row < rows)[:, None] & here[None, :]
        at = row.to(tl.int64)[:, None] * features + feature[None, :]
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normal = x * rstd
        scaled = grad * weight[None, :]
        radial = tl.sum(scaled * normal, axis=1) / features
        out = (scaled - normal * radial[:, None]) * rstd
        if adds:
            out += tl.load(along_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
        if trained:
            part += tl.sum(grad * normal, axis=0)
    if trained:
        tl.store(part_ptr + program * features + feature, part, mask=here)


def forward(
    x: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sum and result [..., D], and one over the root of each row's mean square, fp32 [N].

    Without a `delta` the sum is `x`.
    """
    features, total = x.size(-1), x
    rows = x.numel() // features
    if delta is not None:
        total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, delta.dtype))
    out, rstd_N = torch.empty_like(total), x.new_empty(rows, dtype=torch.float32)
    how = _shape(features)
    launch: Any = rms_norm_forward[(-(-rows // how["tile"]),)]
    with on_device_of(x):
        launch(
            x,
            x if delta is None else delta,
            weight_D,
            total,
            out,
            rstd_N,
            rows,
            features,
            eps,
            adds=delta is not None,
            **how,
        )
    return total, out, rstd_N


def backward(
    grad: Tensor,
    x: Tensor,
    weight_D: Tensor,
    rstd_N: Tensor,
    trained: bool,
    along: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and, where `trained`, of the weight, else an empty one.

    `along` is a gradient that reaches `x` past the norm, and is added to the first.
    """
    rows, features = len(rstd_N), x.size(-1)
    how = _shape(features)
    # A power of two, so that few variants are compiled for rows of many lengths.
    steps = _power_of_two(-(-rows // (PARTS * how["tile"])))
    programs = -(-rows // (steps * how["tile"]))
    out = torch.empty_like(x)
    part_PD = x.new_empty(programs if trained else 0, features, dtype=torch.float32)
    launch: Any = rms_norm_backward[(programs,)]
    with on_device_of(x):
        launch(
            grad,
            grad if along is None else along,
            x,
            weight_D,
            rstd_N,
            out,
            part_PD,
            rows,
            features,
            adds=along is not None,
            trained=trained,
            steps=steps,
            **how,
        )
    of_weight = part_PD.sum(0).to(weight_D.dtype) if trained else weight_D.new_empty(0)
    return out, of_weight


def _shape(features: int) -> dict[str, int]:
    """Return rows and features of a program, and warps for 16 numbers a thread."""
    block = _power_of_two(features)
    tile = max(1, TILE_NUMBERS // block)
    return {"tile": tile, "block": block, "num_warps": min(16, max(4, tile * block // 512))}


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is not below `least`."""
    return 1 << (least - 1).bit_length()
