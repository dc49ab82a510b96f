"""The rotation of queries or keys by their positions' angles, as one kernel.

Eager torch computes four products, two sums and a join, each through device memory and in fp32.
The kernel reads each number once where it lies (keys lie between queries and values in the fused
product, so nothing is copied first), turns pairs in fp32 and writes once in the input's dtype. The
backward pass is the same kernel with the angle's sign turned: it needs cosine and sine alone, which
all layers share, and keeps nothing else.

Triton compiles it for a GPU; `reference` is the plain sequence of operations. A compiler sees one
operation without parts. Source: arXiv 2104.09864; Liger (arXiv 2410.10989) fuses it likewise.

Shapes: B rows, T tokens, H heads, K features of a head; feature i is paired with i + K/2.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.launches import COUNTS


def reference(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation by torch's own operations."""
    a, b = x_BTHK.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BTHK)


def rope(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x_BTHK` turned, contiguous, in its own dtype.

    Args:
        x_BTHK: queries or keys with any strides, on a GPU; K is even.
        cos: fp32 [B or 1, T, 1, K/2].
        sin: as `cos`. Neither gets a gradient.
    """
    return rope_turn(x_BTHK, cos, sin, False)


@torch.library.custom_op("headrace::rope", mutates_args=())
def rope_turn(x_BTHK: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """`x_BTHK` turned by the angles, or `back` by them."""
    from headrace.kernels import rope_triton

    COUNTS["rope_back" if back else "rope_turn"] += 1
    return rope_triton.turn(x_BTHK, cos.contiguous(), sin.contiguous(), back)


@rope_turn.register_fake
def _(x_BTHK: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return x_BTHK.new_empty(x_BTHK.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.back = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return rope_turn(grad, *ctx.saved_tensors, not ctx.back), None, None, None


rope_turn.register_autograd(_backward, setup_context=_keep)
