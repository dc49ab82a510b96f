"""A mixture of experts multiplies rows, sorted by expert, with each expert's own matrix.

`ends_E` says where each expert's rows end, so every expert takes as many rows as it was given and
none is padded or dropped (arXiv 2211.15841). On a Hopper or later GPU in bf16 one kernel does all
experts (torch's grouped_mm); its operands must have rows of a multiple of 16 bytes. Everywhere else
a loop over the experts does it: the plain reference, one matmul each. The loop reads `ends_E` on
the host, which waits for a GPU; a compiler sees it as one operation.

Shapes: N rows, K input features, O output features, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

OLDEST = (9, 0)
"""Compute capability from which torch's grouped_mm has its kernel: Hopper's."""
ALIGNED_BYTES = 16
"""Rows of grouped_mm's operands are a multiple of so many bytes; torch checks it."""


def has_grouped_kernel(x_NK: Tensor, weight_EOK: Tensor) -> bool:
    """Return whether one kernel can do all experts."""
    if x_NK.device.type != "cuda" or x_NK.dtype != torch.bfloat16:
        return False
    sizes = (d * x_NK.element_size() for d in weight_EOK.shape[1:])
    aligned = all(size % ALIGNED_BYTES == 0 for size in sizes)
    return aligned and torch.cuda.get_device_capability(x_NK.device) >= OLDEST


def grouped_linear(x_NK: Tensor, weight_EOK: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply `x_NK` with the transposed matrix of each row's expert; returns [N, O].

    Args:
        x_NK: rows sorted by expert.
        weight_EOK: a matrix per expert, of the same dtype.
        ends_E: int32; expert e has the rows from `ends_E[e - 1]` to `ends_E[e]`.
    """
    if has_grouped_kernel(x_NK, weight_EOK):
        return F.grouped_mm(x_NK, weight_EOK.transpose(1, 2), offs=ends_E)
    return looped_linear(x_NK, weight_EOK, ends_E)


def _spans(ends_E: Tensor) -> list[slice]:
    ends = ends_E.tolist()
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


@torch.library.custom_op("headrace::looped_linear", mutates_args=())
def looped_linear(x_NK: Tensor, weight_EOK: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each expert's rows by a matmul of their own: the reference."""
    spans = zip(_spans(ends_E), weight_EOK, strict=True)
    return torch.cat([F.linear(x_NK[span], weight_OK) for span, weight_OK in spans])


@torch.library.custom_op("headrace::looped_outer", mutates_args=())
def looped_outer(grad_NO: Tensor, x_NK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the gradient of the matrices, [E, O, K]; zero for an expert without rows."""
    return torch.stack([grad_NO[span].t() @ x_NK[span] for span in _spans(ends_E)])


@looped_linear.register_fake
def _(x_NK: Tensor, weight_EOK: Tensor, ends_E: Tensor) -> Tensor:
    return x_NK.new_empty(x_NK.size(0), weight_EOK.size(1))


@looped_outer.register_fake
def _(grad_NO: Tensor, x_NK: Tensor, ends_E: Tensor) -> Tensor:
    return x_NK.new_empty(ends_E.size(0), grad_NO.size(1), x_NK.size(1))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_NK, weight_EOK, ends_E = ctx.saved_tensors
    grad_NO = grad_NO.contiguous()
    wants_x, wants_weight, _ = ctx.needs_input_grad
    back = looped_linear(grad_NO, weight_EOK.transpose(1, 2), ends_E) if wants_x else None
    return back, looped_outer(grad_NO, x_NK, ends_E) if wants_weight else None, None


looped_linear.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.headrace.looped_linear)
def _linear_flops(x: Any, weight: Any, ends: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * x[1] * weight[1]


@register_flop_formula(torch.ops.headrace.looped_outer)
def _outer_flops(grad: Any, x: Any, ends: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * x[1] * grad[1]
