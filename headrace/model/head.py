"""From hidden states to a summed loss: how logits are made, and what is computed of them.

The *head* owns how logits are made (whole here; in chunks, fused or split over ranks elsewhere).
The *objective* is what is computed of them. An objective reduces over the vocabulary only through
the `Vocabulary` that it is given, so the same objective is right on any chunk of tokens and on any
shard of the vocabulary. Everything is a sum: the caller's scale carries the one denominator.

Shapes: N tokens, D features, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.core.model_config import ModelConfig

IGNORED = -100
"""The target of a token that has no loss."""


class Vocabulary:
    """Reductions over the vocabulary dimension, which this one holds whole."""

    def nll(self, logits_NV: Tensor, targets_N: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the summed negative log likelihood of all targets but `IGNORED`, a scalar.

        Of each target's probability the share `smoothing` is spread over V evenly.
        """
        return F.cross_entropy(
            logits_NV, targets_N, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
        )

    def nll_of_each(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Return the negative log likelihood of each target, [N]; 0 where it is `IGNORED`."""
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="none")

    def logsumexp(self, logits_NV: Tensor) -> Tensor:
        """Log sum exp over V, [N]."""
        return logits_NV.logsumexp(-1)

    def pick(self, logits_NV: Tensor, ids_N: Tensor) -> Tensor:
        """Return the value of each token at its id, [N]."""
        return logits_NV.gather(-1, ids_N[:, None]).squeeze(-1)

    def sum(self, values_NV: Tensor) -> Tensor:
        """Sum over V, [N]."""
        return values_NV.sum(-1)

    def argmax(self, values_NV: Tensor) -> Tensor:
        """Return the id of each token's largest value, [N]; the lowest where several are."""
        return values_NV.argmax(-1)

    def dot(self, logits_NV: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return the sum over K of weight x the value at its id, [N]."""
        return (logits_NV.gather(-1, ids_NK) * weights_NK).sum(-1)

    def without(self, logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
        """Return the logits with minus infinity at the ids of each token, [N, V]."""
        return logits_NV.scatter(-1, ids_NK, -torch.inf)

    def ids(self, values_NV: Tensor) -> Tensor:
        """Return the vocabulary ids of the columns that are here, [V]."""
        return torch.arange(values_NV.size(-1), device=values_NV.device)

    def part(self, values_NV: Tensor) -> Tensor:
        """Return the columns that are here, of values over the whole vocabulary."""
        return values_NV


Objective = Callable[[Tensor, Tensor, Any, Vocabulary], Tensor]
"""(logits fp32 [N, V], targets [N], extras of the batch, vocabulary) -> scalar sum of losses."""


def cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary
) -> Tensor:
    """Return the baseline's objective: summed negative log likelihood in nats."""
    return vocabulary.nll(logits_NV, targets_N)


def capped(logits_NV: Tensor, cap: float) -> Tensor:
    """Limit logits to `cap` by `cap` x tanh(logits / cap); 0 leaves them as they are."""
    return cap * torch.tanh(logits_NV / cap) if cap else logits_NV


def with_terms(objective: Objective, terms: Sequence[Objective]) -> Objective:
    """Return an objective plus every term."""
    if not terms:
        return objective

    def total(logits: Tensor, targets: Tensor, extras: Any, vocabulary: Vocabulary) -> Tensor:
        loss = objective(logits, targets, extras, vocabulary)
        for term in terms:
            loss = loss + term(logits, targets, extras, vocabulary)
        return loss

    return total


class Head(nn.Module):
    """The baseline's head makes all logits at once, in fp32.

    It owns the output matrix unless embeddings are tied; then the decoder hands it the embedding.
    """

    weight: nn.Parameter | None
    compilable = True
    """Whether a compiler can trace its forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.vocab, config.dim)
        weight = None if config.tied_embeddings else nn.Parameter(torch.empty(shape))
        self.register_parameter("weight", weight)
        self.vocabulary = Vocabulary()
        self.cap = config.logit_cap

    def forward(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        extras: Any,
        objective: Objective,
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Return the objective's sum over all tokens, times `scale`; a scalar.

        A head that makes gradients while it goes forward needs the scale for them: in fp16 those
        of unlikely tokens would be zero without it.
        """
        logits_NV = self.logits(hidden_ND, weight_VD)
        return objective(logits_NV, targets_N, extras, self.vocabulary) * scale

    def compile_inside(self, compile: Callable[[Any], Any]) -> None:
        """Compile what can be of a head that is not compilable as a whole: here nothing."""

    def logits(self, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        """Return whole fp32 logits [N, V]."""
        return capped(F.linear(hidden_ND, weight_VD).float(), self.cap)
