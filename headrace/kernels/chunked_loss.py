"""A loss is summed over logits that never exist whole.

The logits are the largest tensor of a small model's step: tokens x vocabulary in fp32, twice. Here
a chunk of tokens at a time goes through the head's matmul, the objective and the objective's own
gradient. The gradients of hidden states and output matrix are complete when the forward pass ends,
and one chunk of logits is all that ever exists. The objective is any function of logits: its
gradient comes from autograd, chunk by chunk. Idea: arXiv 2411.09009 and Liger Kernel's fused linear
cross-entropy (arXiv 2410.10989); here without custom kernels, and correct for any additive
objective.

A loss that knows its own gradient may be given as `both`; the fused cross-entropy writes it over
the chunk's logits. In half precision the chunks' parts of the output matrix's gradient are added up
in fp32 by the matmul itself, on a GPU.

Cross-entropy alone may be torch's own (`native_loss`, from 2.13 on): it takes the exponentials of a
chunk once, where autograd takes them twice. It serves fp32 only: it returns the sum in the dtype of
the hidden states, so that in bf16 a loss of 2,087.2 nats came out as 2,080.

Cost: no extra matmuls; the gradient of the output matrix exists during the forward pass.

Shapes: N tokens, D features, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.kernels.autocast import compute_dtype

Loss = Callable[[Tensor, Tensor, Any], Tensor]
"""(logits [n, V] as the matmul gives them, targets [n], extras of these tokens) -> scalar sum."""
Both = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [n, V], which it may write over, targets [n], scale) -> (scalar sum, its gradient [n, V]
times the scale)."""


def reference_loss(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, extras: Any, loss: Loss
) -> Tensor:
    """Compute what `chunked_loss` equals, with all logits at once."""
    return loss(F.linear(hidden_ND, weight_VD), targets_N, extras)


def chunked_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    extras: Any,
    loss: Loss,
    chunk_tokens: int,
    *,
    scale: Tensor | float = 1.0,
    both: Both | None = None,
) -> Tensor:
    """Return `reference_loss` times `scale`, with logits of at most `chunk_tokens` tokens at once.

    Args:
        hidden_ND: hidden states.
        weight_VD: output matrix.
        targets_N: ids.
        extras: None, or tensors by name whose first dimension is N.
        loss: a sum over tokens.
        chunk_tokens: tokens whose logits exist at once.
        scale: what the sum is multiplied by, and each chunk's gradient before it is rounded.
        both: the same loss with its gradient; without it autograd finds the gradient.
    """
    if not torch.is_grad_enabled():
        return _sum_of_chunks(hidden_ND, weight_VD, targets_N, extras, loss, chunk_tokens) * scale
    factor = torch.as_tensor(scale, dtype=torch.float32, device=hidden_ND.device)
    given = hidden_ND, weight_VD, targets_N, extras, loss, chunk_tokens
    return _ChunkedLoss.apply(*given, factor, both)


def has_native() -> bool:
    """Return whether this torch has a chunked cross-entropy of its own, as 2.13 has."""
    return hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


def native_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    ignored: int,
    chunk_tokens: int,
    *,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """Return cross-entropy's sum in nats times `scale`, by torch's own linear_cross_entropy; fp32.

    Args:
        hidden_ND: hidden states.
        weight_VD: output matrix.
        targets_N: ids.
        ignored: the target of a token that has no loss.
        chunk_tokens: tokens whose logits exist at once.
        scale: what the sum is multiplied by.
    """
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens, chunking_method=None)
    total: Tensor = F.linear_cross_entropy(
        hidden_ND, weight_VD, targets_N, reduction="sum", ignore_index=ignored, options=options
    )
    return total * scale


def _part(extras: Any, chunk: slice) -> Any:
    return {k: v[chunk] for k, v in extras.items()} if extras else extras


def _sum_of_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, extras: Any, loss: Loss, size: int
) -> Tensor:
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        logits = F.linear(hidden[chunk], weight)
        total += loss(logits, targets[chunk], _part(extras, chunk))
    return total


def _by_autograd(
    logits: Tensor, targets: Tensor, extras: Any, loss: Loss, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a chunk's sum, and the gradient of its logits times `scale`."""
    logits.requires_grad_()
    with torch.enable_grad():
        part = loss(logits, targets, extras)
        (gradient,) = torch.autograd.grad(part, logits, scale.to(part.dtype))
    return part.detach(), gradient


def _add_matmul_(total_VD: Tensor, grad_nV: Tensor, low_nD: Tensor) -> None:
    """Add grad.T @ low to an fp32 total."""
    if grad_nV.dtype == torch.float32:
        total_VD.addmm_(grad_nV.T, low_nD)
    elif grad_nV.is_cuda:  # the matmul adds up in fp32
        torch.ops.aten.addmm.dtype_out(total_VD, grad_nV.T, low_nD, torch.float32, out=total_VD)
    else:
        total_VD += grad_nV.T @ low_nD


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        extras: Any,
        loss: Loss,
        size: int,
        scale: Tensor,
        both: Both | None,
    ) -> Tensor:
        dtype = compute_dtype(hidden)
        low_VD = weight.detach().to(dtype)
        grad_hidden = torch.empty_like(hidden)
        learns = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            low_nD = hidden[chunk].detach().to(dtype)
            logits_nV = low_nD @ low_VD.T
            if both is not None:
                part, grad_nV = both(logits_nV, targets[chunk], scale)
            else:
                given = targets[chunk], _part(extras, chunk)
                part, grad_nV = _by_autograd(logits_nV, *given, loss, scale)
            grad_hidden[chunk] = grad_nV @ low_VD
            if grad_weight is not None:
                _add_matmul_(grad_weight, grad_nV, low_nD)
            total += part
            del logits_nV, part, grad_nV  # they would live through the next chunk's peak
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.gradients = grad_hidden, grad_weight
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grad_hidden, grad_weight = ctx.gradients
        ctx.gradients = None, None  # so that the weight takes this very tensor as its gradient
        if grad_hidden is None:
            raise RuntimeError("chunked_loss has one backward pass: its gradients are given away")
        return (
            grad_hidden.mul_(grad_total) if ctx.needs_input_grad[0] else None,
            None if grad_weight is None else grad_weight.mul_(grad_total),
            None,
            None,
            None,
            None,
            None,
            None,
        )
