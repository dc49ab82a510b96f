"""The root-mean-square norm is one kernel forward and one backward.

Eager torch under bf16 copies the input to fp32, normalises, and rounds the result in a third
kernel; autograd keeps the fp32 copy. Here a kernel reads the input once in its own dtype, computes
in fp32 and rounds once; one fp32 statistic per row and the input itself are all that is kept. The
backward pass reads input and gradient once, writes the input's gradient, and adds up the weight's
gradient in registers: each of at most PARTS programs writes one partial sum, and the partial sums
are added in one order. So the result is the same in every run, on every GPU.

`rms_norm_add` includes the addition before a norm: the same kernels write the sum beside the
result, and add the gradient that comes along the residual stream to the norm's own. A norm alone
reads a sum that another kernel has just written, and a third kernel adds up the two gradients.

Triton compiles it for a GPU; `reference` is the plain sequence of operations. A compiler sees two
operations without parts. Source: arXiv 1910.07467; Liger (arXiv 2410.10989) has the same fusion.

Shapes: N rows, D features, P programs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.launches import COUNTS


def reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise [..., D] by torch's own operations, with fp32 statistics."""
    return F.rms_norm(x.float(), weight_D.shape, weight_D.float(), eps).type_as(x)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return `x` over the root of its mean square, times `weight_D`; computed in fp32.

    Args:
        x: [..., D] in fp32, bf16 or fp16, on a GPU; copied if it is not contiguous.
        weight_D: in any of these dtypes.
        eps: added to the mean square.

    Returns:
        [..., D] in the dtype of `x`.
    """
    return rms_norm_forward(x.contiguous(), weight_D, eps)[0]


def reference_add(x: Tensor, delta: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and that sum normalised, by torch's own operations."""
    total = x + delta
    return total, reference(total, weight_D, eps)


def rms_norm_add(x: Tensor, delta: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and that sum normalised, in one pass over both.

    Args:
        x: [..., D] in fp32, bf16 or fp16, on a GPU; copied if it is not contiguous.
        delta: as `x`, in any of these dtypes.
        weight_D: in any of these dtypes.
        eps: added to the mean square.

    Returns:
        Both [..., D] in the dtype that torch gives the sum; what is normalised is the rounded sum.
    """
    return rms_norm_add_forward(x.contiguous(), delta.contiguous(), weight_D, eps)[:2]


@torch.library.custom_op("headrace::rms_norm", mutates_args=())
def rms_norm_forward(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the result [..., D], and one over the root of each row's mean square, fp32 [N]."""
    from headrace.kernels import rms_norm_triton

    COUNTS["rms_norm_forward"] += 1
    return rms_norm_triton.forward(x, None, weight_D.contiguous(), eps)[1:]


@torch.library.custom_op("headrace::rms_norm_add", mutates_args=())
def rms_norm_add_forward(
    x: Tensor, delta: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sum and result [..., D], and one over each row's root mean square, fp32 [N]."""
    from headrace.kernels import rms_norm_triton

    COUNTS["rms_norm_add_forward"] += 1
    return rms_norm_triton.forward(x, delta, weight_D.contiguous(), eps)


@torch.library.custom_op("headrace::rms_norm_backward", mutates_args=())
def rms_norm_backward(
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
    from headrace.kernels import rms_norm_triton

    COUNTS["rms_norm_backward" if along is None else "rms_norm_add_backward"] += 1
    return rms_norm_triton.backward(grad, x, weight_D.contiguous(), rstd_N, trained, along)


@rms_norm_forward.register_fake
def results_like(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Give a compiler tensors shaped like the results."""
    rows = x.numel() // x.size(-1)
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


@rms_norm_add_forward.register_fake
def _(x: Tensor, delta: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, delta.dtype))
    rows = x.numel() // x.size(-1)
    return total, torch.empty_like(total), x.new_empty(rows, dtype=torch.float32)


@rms_norm_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight_D: Tensor,
    rstd_N: Tensor,
    trained: bool,
    along: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), weight_D.new_empty(weight_D.numel() if trained else 0)


def keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    """Keep input, weight and each row's statistic for autograd."""
    ctx.set_materialize_grads(False)  # nobody asks for the statistics' gradient
    ctx.save_for_backward(*inputs[:2], output[1])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    x, weight_D, rstd_N = ctx.saved_tensors
    trained = ctx.needs_input_grad[1]
    of_x, of_weight = rms_norm_backward(grad.contiguous(), x, weight_D, rstd_N, trained)
    return of_x, of_weight if trained else None, None


def _keep_add(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], inputs[2], output[2])
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype


def _backward_add(
    ctx: Any, along: Tensor | None, grad: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight_D, rstd_N = ctx.saved_tensors
    of_total, of_weight, trained = along, None, ctx.needs_input_grad[2]
    if grad is not None:
        along = None if along is None else along.contiguous()
        of_total, of_weight = rms_norm_backward(
            grad.contiguous(), total, weight_D, rstd_N, trained, along
        )
    if of_total is None:
        return None, None, None, None
    of_x, of_delta = (of_total.to(dtype) for dtype in ctx.dtypes)
    return of_x, of_delta, of_weight if trained else None, None


rms_norm_forward.register_autograd(_backward, setup_context=keep)
rms_norm_add_forward.register_autograd(_backward_add, setup_context=_keep_add)
