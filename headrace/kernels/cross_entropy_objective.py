"""Cross-entropy with smoothed targets or a z-loss is an objective whose parts a head can read.

An objective is a function of logits, and most heads only call it. Kernels that make the loss and
its gradient in one reading of the logits must know what is computed of them, so these objectives
are classes with fields. A head without kernels calls them as any other, and gets the plain
computation, which is also the reference.

Shapes: N tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Smoothed:
    """Cross-entropy against targets whose share `smoothing` is spread over the vocabulary.

    Args:
        smoothing: the share, 0 to 1.
        entries: size of the whole vocabulary.
        moved_nats: fp32 scalar to which what smoothing changes is added, whoever computes it.
        ignored: the target of a token that has no loss.
    """

    smoothing: float
    entries: int
    moved_nats: Tensor
    ignored: int

    def __call__(
        self, logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Any
    ) -> Tensor:
        """Return the sum over all tokens in nats, reduced over V by `vocabulary` only."""
        with torch.no_grad():
            ignored_N = targets_N == self.ignored
            target_N = vocabulary.pick(logits_NV, targets_N.masked_fill(ignored_N, 0))
            moved_N = target_N - vocabulary.sum(logits_NV) / self.entries
            self.moved_nats.add_(self.smoothing * moved_N.masked_fill(ignored_N, 0.0).sum())
        return vocabulary.nll(logits_NV, targets_N, self.smoothing)


@dataclass(frozen=True, eq=False)
class WithZLoss:
    """An objective adds `weight` x logsumexp^2 of each token that has a target to `plain`.

    Args:
        plain: an objective.
        weight: nats per squared logsumexp.
        z_nats: fp32 scalar to which the z-loss is added, whoever computes it.
        ignored: the target of a token that has no loss.
    """

    plain: Callable[..., Tensor]
    weight: float
    z_nats: Tensor
    ignored: int

    def __call__(
        self, logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Any
    ) -> Tensor:
        """Return the sum over all tokens in nats, reduced over V by `vocabulary` only."""
        loss = self.plain(logits_NV, targets_N, extras, vocabulary)
        z_N = vocabulary.logsumexp(logits_NV)
        z_loss = self.weight * (z_N.square() * (targets_N != self.ignored)).sum()
        self.z_nats.add_(z_loss.detach())
        return loss + z_loss


def kernel_arguments(objective: Any, cross_entropy: Any) -> dict[str, Any] | None:
    """Return the fused cross-entropy's arguments for an objective; None where it cannot make it.

    Args:
        objective: what a step minimises.
        cross_entropy: the plain objective.
    """
    if isinstance(objective, WithZLoss):
        plain = kernel_arguments(objective.plain, cross_entropy)
        z_loss = {"z_loss": objective.weight, "z_nats": objective.z_nats}
        return None if plain is None else {**plain, **z_loss}
    if isinstance(objective, Smoothed):
        return {"label_smoothing": objective.smoothing, "moved_nats": objective.moved_nats}
    return {} if objective is cross_entropy else None
