"""The Triton kernel of rope.py; imported when it first runs.

A program turns `tile` heads, of one token or of several, each in `block` pairs of features.

Shapes: B rows, T tokens, H heads, K features of a head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_PAIRS = 1024
"""Pairs of features of a program: 8 for each thread of 4 warps."""


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
    place = head // heads
    row, token = (place // tokens).to(tl.int64), (place % tokens).to(tl.int64)
    angle = (row * angle_row + token * half)[:, None] + feature[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    if back:
        sin = -sin
    start = row * x_row + token * x_token + (head % heads).to(tl.int64) * x_head
    at = start[:, None] + feature[None, :] * x_feature
    a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + half * x_feature, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    to = head.to(tl.int64)[:, None] * (2 * half) + feature[None, :]
    tl.store(out_ptr + to, (a * cos - b * sin).to(kind), mask=inside)
    tl.store(out_ptr + to + half, (b * cos + a * sin).to(kind), mask=inside)


def turn(x_BTHK: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """`x_BTHK` turned by the angles, or `back` by them; contiguous."""
    B, T, H, K = x_BTHK.shape
    out = x_BTHK.new_empty(B, T, H, K)
    block = 1 << (K // 2 - 1).bit_length()  # the smallest power of two that holds them
    tile = max(1, TILE_PAIRS // block)
    angle_row = 0 if len(cos) == 1 else T * (K // 2)  # one row of angles may serve all
    launch: Any = rope_turn[(-(-B * T * H // tile),)]
    with torch.cuda.device(x_BTHK.device if x_BTHK.is_cuda else -1):  # none for the interpreter
        launch(
            x_BTHK, cos, sin, out, B * T * H, T, H, K // 2, *x_BTHK.stride(), angle_row,
            back=back, tile=tile, block=block,
        )  # fmt: skip
    return out
