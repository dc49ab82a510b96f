"""One kernel computes silu(gate) x up of a fused, grouped matmul, and one its backward pass.

A compiler does the forward pass as well as a hand-written kernel. The backward pass writes
gradients of gate and of up side by side into one tensor, and inductor makes that two kernels which
both read all of gate, up and the incoming gradient, and compute the sigmoid twice. Here one kernel
reads each once: 3 rows of F in, 2 out, where two kernels move 8. Arithmetic is fp32, results are
rounded once.

Triton compiles it for a GPU; `reference` is the plain sequence of operations. A compiler sees two
operations without parts. Source: arXiv 2002.05202 (SwiGLU); the layout is model/mlp.py's.

Shapes: N tokens, F hidden features, in groups of `group`: `gate_up` is [N, 2 F], a group of gates
beside a group of ups.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.launches import COUNTS


def reference(gate_up: Tensor, group: int) -> Tensor:
    """Compute silu(gate) x up by torch's own operations, [..., 2 F] to [..., F]."""
    gate, up = gate_up.unflatten(-1, (-1, 2, group)).unbind(-2)
    return (F.silu(gate) * up).flatten(-2)


@torch.library.custom_op("headrace::swiglu", mutates_args=())
def swiglu(gate_up: Tensor, group: int) -> Tensor:
    """Return silu(gate) x up, [..., 2 F] to [..., F], in the dtype of its input.

    Args:
        gate_up: contiguous, on a GPU.
        group: hidden features of a group.
    """
    from headrace.kernels import swiglu_triton

    COUNTS["swiglu_forward"] += 1
    return swiglu_triton.forward(gate_up, group)


@torch.library.custom_op("headrace::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate_up: Tensor, group: int) -> Tensor:
    """Return the gradient of `gate_up` from that of the result."""
    from headrace.kernels import swiglu_triton

    COUNTS["swiglu_backward"] += 1
    return swiglu_triton.backward(grad, gate_up, group)


@swiglu.register_fake
def result_like(gate_up: Tensor, group: int) -> Tensor:
    """Give a compiler a tensor shaped like the result."""
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.size(-1) // 2)


@swiglu_backward.register_fake
def _(grad: Tensor, gate_up: Tensor, group: int) -> Tensor:
    return torch.empty_like(gate_up)


def keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    """Keep the fused matmul's result and its groups for autograd."""
    ctx.save_for_backward(inputs[0])
    ctx.group = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (gate_up,) = ctx.saved_tensors
    return swiglu_backward(grad.contiguous(), gate_up, ctx.group), None


swiglu.register_autograd(_backward, setup_context=keep)
