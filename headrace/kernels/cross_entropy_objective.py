"""Cross-entropy with a z-loss, as one objective that a head can look into.

An objective is a function of logits, and most heads only call it. Kernels that make the loss and
its gradient in one reading of the logits must know what is computed of them: this objective has
parts that can be asked for. A head without kernels calls it as any other, and gets the plain
computation, which is also the reference.

Shapes: N tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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


def split(objective: Any) -> tuple[Any, dict[str, Any]]:
    """An objective without its z-loss, and what tells the z-loss to the fused cross-entropy."""
    if isinstance(objective, WithZLoss):
        return objective.plain, {"z_loss": objective.weight, "z_nats": objective.z_nats}
    return objective, {}
