"""Cross-entropy with softened targets or a z-loss, as objectives that a head can look into.

An objective is a function of logits, and most heads only call it. Kernels that make the loss and
its gradient in one reading of the logits must know what is computed of them: these objectives have
parts that can be asked for. A head without kernels calls them as any other, and gets the plain
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
        smoothing: the share.
        entries: of the whole vocabulary.
        moved_nats: fp32 scalar that what smoothing changes is added to, whoever computes it.
        ignored: the target of a token that has no loss.
    """

    smoothing: float
    entries: int
    moved_nats: Tensor
    ignored: int

    def __call__(
        self, logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Any
    ) -> Tensor:
        """The sum over all tokens in nats, reduced over V by `vocabulary` only."""
        with torch.no_grad():
            ignored_N = targets_N == self.ignored
            target_N = vocabulary.pick(logits_NV, targets_N.masked_fill(ignored_N, 0))
            moved_N = target_N - vocabulary.sum(logits_NV) / self.entries
            self.moved_nats.add_(self.smoothing * moved_N.masked_fill(ignored_N, 0.0).sum())
        return vocabulary.nll(logits_NV, targets_N, self.smoothing)


@dataclass(frozen=True, eq=False)
class WithZLoss:
    """`plain` plus `weight` x logsumexp^2 of each token that has a target.

    Args:
        plain: an objective.
        weight: nats per squared logsumexp.
        z_nats: fp32 scalar that the z-loss is added to, whoever computes it.
        ignored: the target of a token that has no loss.
    """

    plain: Callable[..., Tensor]
    weight: float
    z_nats: Tensor
    ignored: int

    def __call__(
        self, logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Any
    ) -> Tensor:
        """The sum over all tokens in nats, reduced over V by `vocabulary` only."""
        loss = self.plain(logits_NV, targets_N, extras, vocabulary)
        z_N = vocabulary.logsumexp(logits_NV)
        z_loss = self.weight * (z_N.square() * (targets_N != self.ignored)).sum()
        self.z_nats.add_(z_loss.detach())
        return loss + z_loss


def asked_of_kernels(objective: Any, cross_entropy: Any) -> dict[str, Any] | None:
    """What tells an objective to the fused cross-entropy; None where it is more than that makes.

    Args:
        objective: of a step.
        cross_entropy: the plain objective.
    """
    if isinstance(objective, WithZLoss):
        plain = asked_of_kernels(objective.plain, cross_entropy)
        z_loss = {"z_loss": objective.weight, "z_nats": objective.z_nats}
        return None if plain is None else {**plain, **z_loss}
    if isinstance(objective, Smoothed):
        return {"label_smoothing": objective.smoothing, "moved_nats": objective.moved_nats}
    return {} if objective is cross_entropy else None
