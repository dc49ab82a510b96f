"""The Triton kernels of rope.py; imported when the first of them runs.

A program turns `tile` heads, of one token or of several, each in `block` pairs of features.

Shapes: B rows, T tokens, H heads, K features of a head, P programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launches import on_device_of

TILE_PAIRS = 1024
"""Pairs of features of a program: 8 for each thread of 4 warps."""
PARTS = 512
"""Most programs of the backward pass through a norm; a constant, as in rms_norm_triton.py."""


@triton.jit
def start_of(head, tokens, heads, x_row, x_token, x_head):
    """Where each head's first feature lies, of all heads of all tokens."""
    place = head // heads
    row, token = (place // tokens).to(tl.int64), (place % tokens).to(tl.int64)
    return row * x_row + token * x_token + (head % heads).to(tl.int64) * x_head


@triton.jit
def rope_turn(
    x_ptr, cos_ptr, sin_ptr, out_ptr, count, tokens, heads, half,
    x_row, x_token, x_head, x_feature, angle_row,
    back: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One tile of heads turned; `angle_row` is 0 where one row of angles serves all."""
    head = tl.program_id(0) * tile + tl.arange(0, tile)  # of all heads of all tokens
    feature = tl.arange(0, block)
    inside = (head < count)[:, None] & (feature < half)[None, :]
    angle = start_of(head, tokens, heads, angle_row, half, 0)[:, None] + feature[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    if back:
        sin = -sin
    start = start_of(head, tokens, heads, x_row, x_token, x_head)
    at = start[:, None] + feature[None, :] * x_feature
    a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + half * x_feature, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    to = head.to(tl.int64)[:, None] * (2 * half) + feature[None, :]
    tl.store(out_ptr + to, (a * cos - b * sin).to(kind), mask=inside)
    tl.store(out_ptr + to + half, (b * cos + a * sin).to(kind), mask=inside)


@triton.jit
def rope_norm_turn(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, count, tokens, heads, half,
    x_row, x_token, x_head, x_feature, angle_row, eps,
    tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One tile of heads, each over the root of its mean square, times the weight, then turned."""
    head = tl.program_id(0) * tile + tl.arange(0, tile)
    feature = tl.arange(0, block)
    here = feature < half
    inside = (head < count)[:, None] & here[None, :]
    angle = start_of(head, tokens, heads, angle_row, half, 0)[:, None] + feature[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    start = start_of(head, tokens, heads, x_row, x_token, x_head)
    at = start[:, None] + feature[None, :] * x_feature
    a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + half * x_feature, mask=inside, other=0.0).to(tl.float32)
    of_a = tl.load(weight_ptr + feature, mask=here, other=0.0).to(tl.float32)
    of_b = tl.load(weight_ptr + half + feature, mask=here, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / (2 * half) + eps)
    a = a * rstd[:, None] * of_a[None, :]
    b = b * rstd[:, None] * of_b[None, :]
    kind = out_ptr.dtype.element_ty
    to = head.to(tl.int64)[:, None] * (2 * half) + feature[None, :]
    tl.store(out_ptr + to, (a * cos - b * sin).to(kind), mask=inside)
    tl.store(out_ptr + to + half, (b * cos + a * sin).to(kind), mask=inside)


@triton.jit
def rope_norm_back(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, part_ptr, count, tokens, heads, half,
    g_row, g_token, g_head, g_feature, x_row, x_token, x_head, x_feature, angle_row, eps,
    trained: tl.constexpr, steps: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`steps` tiles of heads: gradients of `x`, and a partial sum of the weight's."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    feature = tl.arange(0, block)
    here = feature < half
    of_a = tl.load(weight_ptr + feature, mask=here, other=0.0).to(tl.float32)
    of_b = tl.load(weight_ptr + half + feature, mask=here, other=0.0).to(tl.float32)
    part_a = tl.zeros([block], dtype=tl.float32)
    part_b = tl.zeros([block], dtype=tl.float32)
    for step in range(steps):
        head = (step * programs + program) * tile + tl.arange(0, tile)
        inside = (head < count)[:, None] & here[None, :]
        angle = start_of(head, tokens, heads, angle_row, half, 0)[:, None] + feature[None, :]
        cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
        start = start_of(head, tokens, heads, g_row, g_token, g_head)
        at = start[:, None] + feature[None, :] * g_feature
        c = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad_ptr + at + half * g_feature, mask=inside, other=0.0).to(tl.float32)
        start = start_of(head, tokens, heads, x_row, x_token, x_head)
        at = start[:, None] + feature[None, :] * x_feature
        a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + at + half * x_feature, mask=inside, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / (2 * half) + eps)
        rstd = tl.where(head < count, rstd, 0.0)
        a = a * rstd[:, None]
        b = b * rstd[:, None]
        turned_c = c * cos + d * sin  # back by the angle: the gradients of what was turned
        turned_d = d * cos - c * sin
        c = turned_c * of_a[None, :]
        d = turned_d * of_b[None, :]
        radial = (tl.sum(c * a + d * b, axis=1) / (2 * half))[:, None]
        kind = out_ptr.dtype.element_ty
        to = head.to(tl.int64)[:, None] * (2 * half) + feature[None, :]
        tl.store(out_ptr + to, ((c - a * radial) * rstd[:, None]).to(kind), mask=inside)
        tl.store(out_ptr + to + half, ((d - b * radial) * rstd[:, None]).to(kind), mask=inside)
        if trained:
            part_a += tl.sum(turned_c * a, axis=0)
            part_b += tl.sum(turned_d * b, axis=0)
    if trained:
        to = program * (2 * half) + feature
        tl.store(part_ptr + to, part_a, mask=here)
        tl.store(part_ptr + to + half, part_b, mask=here)


def turn(x_BTHK: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """`x_BTHK` turned by the angles, or `back` by them; contiguous."""
    out, sizes, angle_row, how = _shape(x_BTHK, cos)
    launch: Any = rope_turn[(-(-sizes[0] // how["tile"]),)]
    with on_device_of(x_BTHK):
        launch(x_BTHK, cos, sin, out, *sizes, *x_BTHK.stride(), angle_row, back=back, **how)
    return out


def norm_turn(x_BTHK: Tensor, weight_K: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """`x_BTHK` normalised by head, then turned by the angles; contiguous."""
    out, sizes, angle_row, how = _shape(x_BTHK, cos)
    launch: Any = rope_norm_turn[(-(-sizes[0] // how["tile"]),)]
    with on_device_of(x_BTHK):
        launch(x_BTHK, weight_K, cos, sin, out, *sizes, *x_BTHK.stride(), angle_row, eps, **how)
    return out


def norm_back(
    grad_BTHK: Tensor, x_BTHK: Tensor, weight_K: Tensor, eps: float, cos: Tensor, sin: Tensor,
    trained: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of `x_BTHK` and, where it is `trained`, of the weight; else an empty one."""
    out, sizes, angle_row, how = _shape(x_BTHK, cos)
    steps = 1 << (-(-sizes[0] // (PARTS * how["tile"])) - 1).bit_length()
    programs = -(-sizes[0] // (steps * how["tile"]))
    part_PK = weight_K.new_empty(programs if trained else 0, weight_K.numel(), dtype=torch.float32)
    launch: Any = rope_norm_back[(programs,)]
    with on_device_of(x_BTHK):
        launch(
            grad_BTHK, x_BTHK, weight_K, cos, sin, out, part_PK, *sizes,
            *grad_BTHK.stride(), *x_BTHK.stride(), angle_row, eps,
            trained=trained, steps=steps, **how,
        )  # fmt: skip
    return out, part_PK.sum(0).to(weight_K.dtype) if trained else weight_K.new_empty(0)


def _shape(
    x_BTHK: Tensor, cos: Tensor
) -> tuple[Tensor, tuple[int, int, int, int], int, dict[str, int]]:
    """A place for the result; heads of all tokens, tokens, heads, pairs; angles of a row; tiles."""
    B, T, H, K = x_BTHK.shape
    block = 1 << (K // 2 - 1).bit_length()  # the smallest power of two that holds the pairs
    angle_row = 0 if len(cos) == 1 else T * (K // 2)  # one row of angles may serve all
    how = {"tile": max(1, TILE_PAIRS // block), "block": block}
    return x_BTHK.new_empty(B, T, H, K), (B * T * H, T, H, K // 2), angle_row, how
