"""Summed cross-entropy reads logits where they lie and writes their gradient over them.

Torch's own keeps log-probabilities, their gradient and that of the logits, all in fp32: 12 bytes of
each of tokens x vocabulary numbers at its peak. Here it is the logits alone, 4 or 2. A first kernel
reads each token's logits once, with a running maximum and sum (online softmax, arXiv 1805.02867),
and keeps its log-sum-exp. A second one reads them again and writes the gradient, times the incoming
one: into the same memory where nobody else reads the logits. Logits are fp32, bf16 or fp16;
arithmetic is fp32, and the gradient is rounded once.

A compiler sees operations without parts that change nothing, with shapes and a gradient of their
own: what it compiles is what runs. Liger's pull request 1338 shows what happens otherwise: a kernel
launched from traced Python gave 61.7 in the place of 21.4 where targets were ignored. A compiler's
backward graph never writes over what the forward graph kept, so the gradient then takes memory of
its own. Ignored tokens are not read, and their gradient is zero.

Beside the plain loss the kernels know three more, which change what is learned: label smoothing
(arXiv 1512.00567), a z-loss (arXiv 2204.02311) and soft-capped logits (arXiv 2408.00118).
Idea: Liger Kernel (arXiv 2410.10989), whose gradient comes in the forward pass and is multiplied
in another.

Shapes: N tokens, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.launches import COUNTS


def reference_cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    ignored: int = -100,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute what `fused_cross_entropy` equals by torch's operations; fp32, or fp64 for fp64."""
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    if softcap:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    loss = F.cross_entropy(
        logits_NV,
        targets_N,
        ignore_index=ignored,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    if z_loss:
        z_N = logits_NV.logsumexp(-1).masked_fill(targets_N == ignored, 0.0)
        loss = loss + z_loss * z_N.square().sum()
    return loss


def fused_cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    ignored: int = -100,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    z_nats: Tensor | None = None,
    moved_nats: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """Sum over tokens the negative log likelihood in nats; an fp32 scalar.

    A target that is neither `ignored` nor in the vocabulary makes it NaN.

    Args:
        logits_NV: on a GPU; fp32, bf16 or fp16.
        targets_N: ids, int64.
        ignored: the target of a token that has no loss.
        softcap: logits are `softcap` x tanh(logits / softcap); 0 leaves them as they are.
        z_loss: weight of the squared log-sum-exp of each token that has a target.
        label_smoothing: share of the target that is spread over the vocabulary.
        z_nats: fp32 scalar to which the z-loss's part of the sum is added.
        moved_nats: fp32 scalar to which is added by how much smoothing changes the sum.
        in_place: the backward pass may write over `logits_NV`; a second one is then an error.
    """
    if logits_NV.stride(-1) != 1:
        logits_NV = logits_NV.contiguous()
    in_place = in_place and not torch.compiler.is_compiling()
    how = (ignored, softcap, z_loss, label_smoothing, logits_NV.size(1))
    losses_N, norms_N3 = cross_entropy(logits_NV, targets_N, *how, in_place)
    add_parts_(norms_N3, z_loss, z_nats, moved_nats)
    return losses_N.sum()


def loss_and_gradient_(
    logits_NV: Tensor,
    targets_N: Tensor,
    scale: Tensor,
    *,
    ignored: int = -100,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    z_nats: Tensor | None = None,
    moved_nats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `fused_cross_entropy`, and its gradient times `scale` written over the logits."""
    how = (ignored, softcap, z_loss, label_smoothing, logits_NV.size(1))
    losses_N, norms_N3 = cross_entropy(logits_NV, targets_N, *how, True)
    add_parts_(norms_N3, z_loss, z_nats, moved_nats)
    cross_entropy_gradient_(
        logits_NV, targets_N, norms_N3, scale.expand(len(losses_N)).contiguous(), *how
    )
    return losses_N.sum(), logits_NV


def add_parts_(
    norms_N3: Tensor, z_loss: float, z_nats: Tensor | None, moved_nats: Tensor | None
) -> None:
    """Add the parts that z-loss and smoothing have in the sum; ignored tokens have zeros."""
    norms_N3 = norms_N3.detach()
    if z_nats is not None:
        z_nats.add_(z_loss * norms_N3[:, :2].sum(-1).square().sum())
    if moved_nats is not None:
        moved_nats.add_(norms_N3[:, 2].sum())


@torch.library.custom_op("headrace::cross_entropy", mutates_args=())
def cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    ignored: int,
    softcap: float,
    z_loss: float,
    smoothing: float,
    entries: int,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """Return losses [N], which have a gradient, and what the gradient is made from [N, 3].

    The three numbers of a token are its largest logit, the rest of the log-sum-exp, and what
    smoothing added. `entries` is the size of the whole vocabulary, of which logits may be a part.
    """
    from headrace.kernels import fused_cross_entropy_triton

    COUNTS["cross_entropy_forward"] += 1
    return fused_cross_entropy_triton.forward(
        logits_NV, targets_N, ignored, softcap, z_loss, smoothing, entries
    )


@torch.library.custom_op("headrace::cross_entropy_gradient", mutates_args=())
def cross_entropy_gradient(
    logits_NV: Tensor,
    targets_N: Tensor,
    norms_N3: Tensor,
    grad_N: Tensor,
    ignored: int,
    softcap: float,
    z_loss: float,
    smoothing: float,
    entries: int,
) -> Tensor:
    """Return the gradient of logits [N, V] from that of the losses, in the logits' dtype."""
    out_NV = torch.empty_like(logits_NV)
    how = (ignored, softcap, z_loss, smoothing, entries)
    _write_gradient(out_NV, logits_NV, targets_N, norms_N3, grad_N, *how)
    return out_NV


@torch.library.custom_op("headrace::cross_entropy_gradient_", mutates_args=("logits_NV",))
def cross_entropy_gradient_(
    logits_NV: Tensor,
    targets_N: Tensor,
    norms_N3: Tensor,
    grad_N: Tensor,
    ignored: int,
    softcap: float,
    z_loss: float,
    smoothing: float,
    entries: int,
) -> None:
    """Write the gradient of `cross_entropy_gradient` over the logits."""
    how = (ignored, softcap, z_loss, smoothing, entries)
    _write_gradient(logits_NV, logits_NV, targets_N, norms_N3, grad_N, *how)


@cross_entropy.register_fake
def _(logits_NV: Tensor, targets_N: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    losses_N = torch.empty_like(targets_N, dtype=torch.float32)
    return losses_N, losses_N.new_empty(len(targets_N), 3)


@cross_entropy_gradient.register_fake
def _(logits_NV: Tensor, *given: Any) -> Tensor:
    return torch.empty_like(logits_NV)


@cross_entropy_gradient_.register_fake
def _(logits_NV: Tensor, *given: Any) -> None:
    return None


def _write_gradient(out_NV: Tensor, *given: Any) -> None:
    from headrace.kernels import fused_cross_entropy_triton

    COUNTS["cross_entropy_backward"] += 1
    fused_cross_entropy_triton.backward(out_NV, *given)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits_NV, targets_N, *ctx.how, ctx.in_place = inputs
    ctx.save_for_backward(logits_NV, targets_N, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_N: Tensor, _: None) -> tuple[Any, ...]:
    logits_NV, targets_N, norms_N3 = ctx.saved_tensors  # refuses what was written over since
    given = (logits_NV, targets_N, norms_N3, grad_N.contiguous(), *ctx.how)
    if ctx.in_place:
        cross_entropy_gradient_(*given)
        return logits_NV.detach(), *[None] * 7
    return cross_entropy_gradient(*given), *[None] * 7


cross_entropy.register_autograd(_backward, setup_context=_keep)
