"""This module holds the Triton kernel of adamw.py; it is imported when that first runs.

A program updates BLOCK numbers of a matrix.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.bf16_weight import MIXERS, STEPS
from headrace.kernels.launches import on_device_of

BLOCK = 1024
"""Numbers that a program updates: 8 for each thread of 4 warps, 16 bytes in half precision."""
STEP_1, STEP_2 = (tl.constexpr(odd & 0xFFFFFFFF) for odd in STEPS)
MIX_1, MIX_2 = (tl.constexpr(odd & 0xFFFFFFFF) for odd in MIXERS)


@triton.jit
def noise_at(place, key_1, key_2, count):
    """Return 16 bits for each place: the hash of `bf16_weight.noise` in unsigned arithmetic."""
    x = place ^ key_1 ^ (count * STEP_1)
    x = (x ^ (x >> 16)) * MIX_1
    x = x ^ key_2 ^ (count * STEP_2)
    x = (x ^ (x >> 15)) * MIX_2
    return x >> 16


@triton.jit
def adamw(
    weight_ptr,
    rest_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    step_ptr,
    bias_ptr,
    factor_ptr,
    skip_ptr,
    keys_ptr,
    rows_ptr,
    columns_ptr,
    total,
    columns,
    lr,
    beta_1,
    beta_2,
    rate_1,
    rate_2,
    eps,
    kept,
    HAS_REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update `BLOCK` numbers of the weight, of what it leaves out, and of both moments."""
    if tl.load(skip_ptr) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < total
        bias_1, bias_2 = tl.load(bias_ptr), tl.load(bias_ptr + 1)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad *= tl.load(factor_ptr)
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
        upper = weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        if HAS_REST:
            rest = tl.load(rest_ptr + at, mask=inside, other=0).to(tl.int32)
            upper = (upper.to(tl.int32, bitcast=True) + rest).to(tl.uint32, bitcast=True)
        value = upper.to(tl.float32, bitcast=True) * kept
        first = tl.load(first_ptr + at, mask=inside, other=0.0) * beta_1 + grad * rate_1
        second = tl.load(second_ptr + at, mask=inside, other=0.0) * beta_2 + grad * grad * rate_2
        value -= (lr / bias_1) * first / (tl.sqrt(second) / bias_2 + eps)
        tl.store(first_ptr + at, first, mask=inside)
        tl.store(second_ptr + at, second, mask=inside)
        bits = value.to(tl.uint32, bitcast=True)
        if HAS_REST:
            near = (bits + 0x8000) >> 16
            left = bits.to(tl.int32, bitcast=True) - (near << 16).to(tl.int32, bitcast=True)
            tl.store(rest_ptr + at, left.to(tl.int16), mask=inside)
        else:
            row, column = at // columns, at % columns
            place = tl.load(rows_ptr + row, mask=inside, other=0)
            place += tl.load(columns_ptr + column, mask=inside, other=0)
            key_1 = tl.load(keys_ptr).to(tl.uint32, bitcast=True)
            key_2 = tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True)
            before = tl.load(step_ptr).to(tl.uint32)
            near = (bits + noise_at(place.to(tl.uint32, bitcast=True), key_1, key_2, before)) >> 16
        rounded = near.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(weight_ptr + at, rounded, mask=inside)


def update(
    weight: Tensor,
    rest: Tensor | None,
    noise: Any,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    corrections_2: Tensor,
    how: Any,
) -> None:
    """Launch the kernel for one matrix; the arguments are those of `adamw.adamw_`."""
    (beta_1, beta_2), total = how.betas, weight.numel()
    keys, rows, columns = noise if noise is not None else (step, step, step)
    factor = torch.ones_like(step) if how.factor is None else how.factor
    skip = torch.zeros_like(step) if how.found_inf is None else how.found_inf
    written = (weight, exp_avg, exp_avg_sq, *(() if rest is None else (rest,)))
    assert all(t.is_contiguous() and t.numel() == total for t in written)
    launch: Any = adamw[(-(-total // BLOCK),)]
    with on_device_of(weight):
        launch(
            weight,
            step if rest is None else rest,
            grad.contiguous(),
            exp_avg,
            exp_avg_sq,
            step,
            corrections_2,
            factor,
            skip,
            keys,
            rows,
            columns,
            total,
            weight.size(-1),
            how.lr,
            beta_1,
            beta_2,
            1.0 - beta_1,
            1.0 - beta_2,
            how.eps,
            1.0 - how.lr * how.weight_decay,
            HAS_REST=rest is not None,
            BLOCK=BLOCK,
        )
