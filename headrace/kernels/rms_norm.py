"""Root-mean-square norm as one kernel forward and one backward.

Eager torch under bf16 copies the input to fp32, normalises, and rounds the result in a third
kernel; autograd keeps the fp32 copy. Here a kernel reads the input once in its own dtype, computes
in fp32 and rounds once; one fp32 statistic per row and the input itself are all that is kept. The
backward pass reads input and gradient once, writes the input's gradient, and adds up the weight's
gradient in registers: each of at most PARTS programs writes one partial sum, and the partial sums
are added in one order. So the result is the same in every run, on every GPU.

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
    """[..., D] to [..., D] by torch's own operations, with fp32 statistics."""
    return F.rms_norm(x.float(), weight_D.shape, weight_D.float(), eps).type_as(x)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`x` over the root of its mean square, times `weight_D`; computed in fp32.

    Args:
        x: [..., D] in fp32, bf16 or fp16, on a GPU; copied if it is not contiguous.
        weight_D: in any of these dtypes.
        eps: added to the mean square.

    Returns:
        [..., D] in the dtype of `x`.
    """
    return rms_norm_forward(x.contiguous(), weight_D, eps)[0]


@torch.library.custom_op("headrace::rms_norm", mutates_args=())
def rms_norm_forward(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(result [..., D], one over the root of each row's mean square, fp32 [N])."""
    from headrace.kernels import rms_norm_triton

    COUNTS["rms_norm_forward"] += 1
    return rms_norm_triton.forward(x, weight_D.contiguous(), eps)


@torch.library.custom_op("headrace::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, rstd_N: Tensor, trained: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and, where it is `trained`, of the weight; else an empty one."""
    from headrace.kernels import rms_norm_triton

    COUNTS["rms_norm_backward"] += 1
    return rms_norm_triton.backward(grad, x, weight_D.contiguous(), rstd_N, trained)


@rms_norm_forward.register_fake
def _(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.size(-1)
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


@rms_norm_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight_D: Tensor, rstd_N: Tensor, trained: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), weight_D.new_empty(weight_D.numel() if trained else 0)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # nobody asks for the statistics' gradient
    ctx.save_for_backward(*inputs[:2], output[1])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    x, weight_D, rstd_N = ctx.saved_tensors
    trained = ctx.needs_input_grad[1]
    of_x, of_weight = rms_norm_backward(grad.contiguous(), x, weight_D, rstd_N, trained)
    return of_x, of_weight if trained else None, None


rms_norm_forward.register_autograd(_backward, setup_context=_keep)
