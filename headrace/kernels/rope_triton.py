"""This module holds the Triton kernels of rope.py; the first of them to run imports it.

A program rotates `tile` heads, of one token or of several, each in `block` pairs of features.

Shapes: B rows, T tokens, H heads, K features of a head, P programs.
"""

# pyright: reportGeneralTypeIssues=false
# It takes calls between Triton's functions for calls on the host, which raise.

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
    """Return where the first feature of each head lies, by its number among all tokens' heads."""
    place = head // heads
    row, token = (place // tokens).to(tl.int64), (place % tokens).to(tl.int64)
    return row * x_row + token * x_token + (head % heads).to(tl.int64) * x_head


@triton.jit
def load_angles(cos_ptr, sin_ptr, head, feature, inside, tokens, heads, half, angle_row):
    """Load cosine and sine of each pair; `angle_row` is 0 where one row of angles serves all."""
    angle = start_of(head, tokens, heads, angle_row, half, 0)[:, None] + feature[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    return cos, sin


@triton.jit
def load_pairs(x_ptr, start, feature, inside, half, x_feature):
    """Load both features of each pair in fp32, from heads that begin at `start`."""
    at = start[:, None] + feature[None, :] * x_feature
    a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + half * x_feature, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(out_ptr, head, feature, inside, half, a, b):
    """Store both features of each pair, rounded, into heads that lie one behind the other."""
    kind = out_ptr.dtype.element_ty
    to = head.to(tl.int64)[:, None] * (2 * half) + feature[None, :]
    tl.store(out_ptr + to, a.to(kind), mask=inside)
    tl.store(out_ptr + to + half, b.to(kind), mask=inside)


@triton.jit
def load_weight(weight_ptr, feature, here, half):
    """Load the norm's weight of both features of each pair, in fp32."""
    of_a = tl.load(weight_ptr + feature, mask=here, other=0.0).to(tl.float32)
    of_b = tl.load(weight_ptr + half + feature, mask=here, other=0.0).to(tl.float32)
    return of_a, of_b


@triton.jit
def rope_rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    count,
    tokens,
    heads,
    half,
    x_row,
    x_token,
    x_head,
    x_feature,
    angle_row,
    back: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """Rotate one tile of heads, `back` by the negative angles."""
    head = tl.program_id(0) * tile + tl.arange(0, tile)  # of all heads of all tokens
    feature = tl.arange(0, block)
    inside = (head < count)[:, None] & (feature < half)[None, :]
    cos, sin = load_angles(cos_ptr, sin_ptr, head, feature, inside, tokens, heads, half, angle_row)
    if back:
        sin = -sin
    start = start_of(head, tokens, heads, x_row, x_token, x_head)
    a, b = load_pairs(x_ptr, start, feature, inside, half, x_feature)
    store_pairs(out_ptr, head, feature, inside, half, a * cos - b * sin, b * cos + a * sin)


@triton.jit
def rope_norm_rotate(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    count,
    tokens,
    heads,
    half,
    x_row,
    x_token,
    x_head,
    x_feature,
    angle_row,
    eps,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """Divide one tile of heads by their root mean squares, times the weight, and rotate them."""
    head = tl.program_id(0) * tile + tl.arange(0, tile)
    feature = tl.arange(0, block)
    here = feature < half
    inside = (head < count)[:, None] & here[None, :]
    cos, sin = load_angles(cos_ptr, sin_ptr, head, feature, inside, tokens, heads, half, angle_row)
    start = start_of(head, tokens, heads, x_row, x_token, x_head)
    a, b = load_pairs(x_ptr, start, feature, inside, half, x_feature)
    of_a, of_b = load_weight(weight_ptr, feature, here, half)
    rstd = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / (2 * half) + eps)
    a = a * rstd[:, None] * of_a[None, :]
    b = b * rstd[:, None] * of_b[None, :]
    store_pairs(out_ptr, head, feature, inside, half, a * cos - b * sin, b * cos + a * sin)


@triton.jit
def rope_norm_back(
    grad_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    part_ptr,
    count,
    tokens,
    heads,
    half,
    g_row,
    g_token,
    g_head,
    g_feature,
    x_row,
    x_token,
    x_head,
    x_feature,
    angle_row,
    eps,
    trained: tl.constexpr,
    steps: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """Write gradients of `steps` tiles of heads, and a partial sum of the weight's gradient."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    feature = tl.arange(0, block)
    here = feature < half
    of_a, of_b = load_weight(weight_ptr, feature, here, half)
    part_a, part_b = tl.zeros([block], dtype=tl.float32), tl.zeros([block], dtype=tl.float32)
    for step in range(steps):
        head = (step * programs + program) * tile + tl.arange(0, tile)
        inside = (head < count)[:, None] & here[None, :]
        cos, sin = load_angles(
            cos_ptr, sin_ptr, head, feature, inside, tokens, heads, half, angle_row
        )
        start = start_of(head, tokens, heads, g_row, g_token, g_head)
        c, d = load_pairs(grad_ptr, start, feature, inside, half, g_feature)
        start = start_of(head, tokens, heads, x_row, x_token, x_head)
        a, b = load_pairs(x_ptr, start, feature, inside, half, x_feature)
        rstd = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / (2 * half) + eps)
        rstd = tl.where(head < count, rstd, 0.0)[:, None]
        a, b = a * rstd, b * rstd
        back_c = c * cos + d * sin  # rotated back: the gradients of what was rotated
        back_d = d * cos - c * sin
        c, d = back_c * of_a[None, :], back_d * of_b[None, :]
        radial = (tl.sum(c * a + d * b, axis=1) / (2 * half))[:, None]
        c, d = (c - a * radial) * rstd, (d - b * radial) * rstd
        store_pairs(out_ptr, head, feature, inside, half, c, d)
        if trained:
            part_a += tl.sum(back_c * a, axis=0)
            part_b += tl.sum(back_d * b, axis=0)
    if trained:
        to = program * (2 * half) + feature
        tl.store(part_ptr + to, part_a, mask=here)
        tl.store(part_ptr + to + half, part_b, mask=here)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Return `x_BTHK` rotated by the angles, or `back` by them; contiguous."""
    out, sizes, angle_row, how = _shape(x_BTHK, cos)
    launch: Any = rope_rotate[(-(-sizes[0] // how["tile"]),)]
    with on_device_of(x_BTHK):
        launch(x_BTHK, cos, sin, out, *sizes, *x_BTHK.stride(), angle_row, back=back, **how)
    return out


def norm_rotate(x_BTHK: Tensor, weight_K: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x_BTHK` normalised by head, then rotated by the angles; contiguous."""
    out, sizes, angle_row, how = _shape(x_BTHK, cos)
    launch: Any = rope_norm_rotate[(-(-sizes[0] // how["tile"]),)]
    with on_device_of(x_BTHK):
        launch(x_BTHK, weight_K, cos, sin, out, *sizes, *x_BTHK.stride(), angle_row, eps, **how)
    return out


def norm_back(
    grad_BTHK: Tensor,
    x_BTHK: Tensor,
    weight_K: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    trained: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x_BTHK` and, where `trained`, of the weight, else an empty one."""
    out, sizes, angle_row, how = _shape(x_BTHK, cos)
    steps = 1 << (-(-sizes[0] // (PARTS * how["tile"])) - 1).bit_length()
    programs = -(-sizes[0] // (steps * how["tile"]))
    part_PK = weight_K.new_empty(programs if trained else 0, weight_K.numel(), dtype=torch.float32)
    launch: Any = rope_norm_back[(programs,)]
    with on_device_of(x_BTHK):
        launch(
            grad_BTHK,
            x_BTHK,
            weight_K,
            cos,
            sin,
            out,
            part_PK,
            *sizes,
            *grad_BTHK.stride(),
            *x_BTHK.stride(),
            angle_row,
            eps,
            trained=trained,
            steps=steps,
            **how,
        )
    return out, part_PK.sum(0).to(weight_K.dtype) if trained else weight_K.new_empty(0)


def _shape(
    x_BTHK: Tensor, cos: Tensor
) -> tuple[Tensor, tuple[int, int, int, int], int, dict[str, int]]:
    """Return what every launch needs.

    Returns:
        A tensor for the result; heads of all tokens, tokens, heads of a token, pairs of a head;
        the stride of a row of angles; and the tile and block of a program.
    """
    B, T, H, K = x_BTHK.shape
    block = 1 << (K // 2 - 1).bit_length()  # the smallest power of two that holds the pairs
    angle_row = 0 if len(cos) == 1 else T * (K // 2)  # one row of angles may serve all
    how = {"tile": max(1, TILE_PAIRS // block), "block": block}
    return x_BTHK.new_empty(B, T, H, K), (B * T * H, T, H, K // 2), angle_row, how
