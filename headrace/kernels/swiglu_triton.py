"""This module holds the Triton kernels of swiglu.py; the first of them to run imports it.

Shapes: N tokens, F hidden features in groups; a program does one token and BLOCK features.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launches import on_device_of

BLOCK = 1024
"""Features of a program: 8 for each thread of 4 warps, 16 bytes at a time in half precision."""


@triton.jit
def swiglu_forward(gate_up_ptr, out_ptr, features, group, block: tl.constexpr):
    """Write `block` results of one token."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * block + tl.arange(0, block)
    inside = feature < features
    # The gate of feature f stands after the f // group groups of gates and of ups before it.
    at = token * 2 * features + feature + (feature // group) * group
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + group, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * features + feature, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(grad_ptr, gate_up_ptr, out_ptr, features, group, block: tl.constexpr):
    """Write the gradients of `block` gates of one token, and of their ups."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * block + tl.arange(0, block)
    inside = feature < features
    at = token * 2 * features + feature + (feature // group) * group
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + group, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + token * features + feature, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    of_gate = grad * up * (share + silu * (1.0 - share))
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, of_gate.to(kind), mask=inside)
    tl.store(out_ptr + at + group, (grad * silu).to(kind), mask=inside)


def forward(gate_up: Tensor, group: int) -> Tensor:
    """Launch the forward kernel, [..., 2 F] to [..., F]."""
    features = gate_up.size(-1) // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], features)
    launch: Any = swiglu_forward[_grid(out)]
    with on_device_of(gate_up):
        launch(gate_up, out, features, group, block=BLOCK)
    return out


def backward(grad: Tensor, gate_up: Tensor, group: int) -> Tensor:
    """Launch the backward kernel; returns the gradient of `gate_up`, [..., 2 F]."""
    out = torch.empty_like(gate_up)
    launch: Any = swiglu_backward[_grid(grad)]
    with on_device_of(gate_up):
        launch(grad, gate_up, out, grad.size(-1), group, block=BLOCK)
    return out


def _grid(hidden: Tensor) -> tuple[int, int]:
    return hidden.numel() // hidden.size(-1), -(-hidden.size(-1) // BLOCK)
