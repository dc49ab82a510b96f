"""One kernel rotates queries or keys by their positions' angles.

Eager torch computes four products by element, two sums and a join, each through device memory and
in fp32. The kernel reads each number once where it lies (keys lie between queries and values in the
fused projection, so nothing is copied first), rotates pairs in fp32 and writes once in the input's
dtype. The backward pass is the same kernel with the angle's sign reversed: it needs cosine and sine
alone, which all layers share, and keeps nothing else.

`rope_norm` normalises each head first, as `model.qk_norm` asks for it: the head is in registers
anyway. Nothing is rounded between the two. The heads are kept as they were, without a copy in fp32
and without statistics: a head is small, so the backward pass, one kernel too, sums its squares a
second time.

Triton compiles it for a GPU; `reference` is the plain sequence of operations. A compiler sees one
operation without parts. Source: arXiv 2104.09864; Liger (arXiv 2410.10989) fuses it too.

Shapes: B rows, T tokens, H heads, K features of a head; feature i is paired with i + K/2.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.launches import COUNTS


def reference(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by torch's own operations."""
    a, b = x_BTHK.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BTHK)


def rope(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x_BTHK` rotated, contiguous, in its own dtype.

    Args:
        x_BTHK: queries or keys with any strides, on a GPU; K is even.
        cos: fp32 [B or 1, T, 1, K/2].
        sin: as `cos`. Neither gets a gradient.
    """
    return rope_rotate(x_BTHK, cos, sin, False)


def reference_norm(
    x_BTHK: Tensor, weight_K: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Normalise each head and rotate it by torch's own operations, rounded once."""
    normal = F.rms_norm(x_BTHK.float(), weight_K.shape, weight_K.float(), eps)
    return reference(normal, cos, sin).type_as(x_BTHK)


def rope_norm(x_BTHK: Tensor, weight_K: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x_BTHK` normalised by head and then rotated, contiguous, in its own dtype.

    Args:
        x_BTHK: queries or keys with any strides, on a GPU; K is even.
        weight_K: the norm's weight, in any dtype.
        eps: added to the mean square.
        cos: fp32 [B or 1, T, 1, K/2].
        sin: as `cos`. Neither gets a gradient.
    """
    return rope_norm_rotate(x_BTHK, weight_K, eps, cos, sin)


@torch.library.custom_op("headrace::rope", mutates_args=())
def rope_rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Return `x_BTHK` rotated by the angles, or `back` by them."""
    from headrace.kernels import rope_triton

    COUNTS["rope_back" if back else "rope_rotate"] += 1
    return rope_triton.rotate(x_BTHK, cos.contiguous(), sin.contiguous(), back)


@torch.library.custom_op("headrace::rope_norm", mutates_args=())
def rope_norm_rotate(
    x_BTHK: Tensor, weight_K: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return `x_BTHK` normalised by head, then rotated by the angles."""
    from headrace.kernels import rope_triton

    COUNTS["rope_norm_rotate"] += 1
    return rope_triton.norm_rotate(
        x_BTHK, weight_K.contiguous(), eps, cos.contiguous(), sin.contiguous()
    )


@torch.library.custom_op("headrace::rope_norm_backward", mutates_args=())
def rope_norm_back(
    grad: Tensor,
    x_BTHK: Tensor,
    weight_K: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    trained: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x_BTHK` and, where `trained`, of the weight, else an empty one."""
    from headrace.kernels import rope_triton

    COUNTS["rope_norm_back"] += 1
    return rope_triton.norm_back(
        grad, x_BTHK, weight_K.contiguous(), eps, cos.contiguous(), sin.contiguous(), trained
    )


@rope_rotate.register_fake
def _(x_BTHK: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return x_BTHK.new_empty(x_BTHK.shape)


@rope_norm_rotate.register_fake
def _(x_BTHK: Tensor, weight_K: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    return x_BTHK.new_empty(x_BTHK.shape)


@rope_norm_back.register_fake
def _(
    grad: Tensor,
    x_BTHK: Tensor,
    weight_K: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    trained: bool,
) -> tuple[Tensor, Tensor]:
    return x_BTHK.new_empty(x_BTHK.shape), weight_K.new_empty(weight_K.numel() if trained else 0)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.back = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return rope_rotate(grad, *ctx.saved_tensors, not ctx.back), None, None, None


def _keep_norm(
    ctx: Any, inputs: tuple[Tensor, Tensor, float, Tensor, Tensor], output: Tensor
) -> None:
    x_BTHK, weight_K, ctx.eps, cos, sin = inputs
    ctx.save_for_backward(x_BTHK, weight_K, cos, sin)


def _backward_norm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x_BTHK, weight_K, cos, sin = ctx.saved_tensors
    trained = ctx.needs_input_grad[1]
    of_x, of_weight = rope_norm_back(grad, x_BTHK, weight_K, ctx.eps, cos, sin, trained)
    return of_x, of_weight if trained else None, None, None, None


rope_rotate.register_autograd(_backward, setup_context=_keep)
rope_norm_rotate.register_autograd(_backward_norm, setup_context=_keep_norm)
