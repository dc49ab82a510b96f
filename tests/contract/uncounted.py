"""FLOPs of operations that torch's counter does not know, by the shapes of what they are given."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from headrace.kernels.chunked_loss import has_native


def whole_attention(q: Any, k: Any, *args: Any, **kwargs: Any) -> int:
    """Count two matmuls of [T, K] x [K, T] and [T, T] x [T, K] for each head."""
    rows, heads, length, width = q
    return 4 * rows * heads * length * k[2] * width


def whole_attention_backward(grad: Any, q: Any, k: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * whole_attention(q, k)


def product(into: Any, a: Any, b: Any, **kwargs: Any) -> int:
    """A product of matrices that is added to a tensor in place."""
    return 2 * a[0] * a[1] * b[1]


def filtered(x: Any, weight: Any, **kwargs: Any) -> int:
    rows, tokens, _ = x
    return 2 * prod(weight) * rows * (tokens - weight[2] + 1)


def filtered_backward(grad: Any, x: Any, weight: Any, **kwargs: Any) -> int:
    """Each of its two products is as large as the forward one."""
    return 2 * filtered(x, weight)


def chunked(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Logits, and what of both gradients is asked for, by torch's own loss in chunks."""
    of_input, of_weight = args[-3:-1]
    return 2 * prod(x) * weight[0] * (1 + of_input + of_weight)


UNCOUNTED: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: product,
    torch.ops.headrace.causal_convolution: filtered,
    torch.ops.headrace.causal_convolution_backward: filtered_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: whole_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: whole_attention_backward,
}
if has_native():
    import torch.nn.modules.linear_cross_entropy  # which registers it

    UNCOUNTED[torch.ops.torch_nn._linear_cross_entropy_batch_chunked] = chunked
