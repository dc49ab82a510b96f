"""Reduce over a vocabulary whose columns lie on several ranks: no rank sees whole logits.

Each rank holds the logits of its own ids, made from its own rows of the output matrix. A reduction
sends N numbers over the wire and not N x V. Forward it is an all-reduce; backward each rank takes
the gradient of the reduced value, which is equal everywhere, to its own columns without any
communication. That is right while an objective uses a reduced value only together with other
reduced values. `logits - logsumexp` on a shard and then a sum would be wrong by what the other
ranks' columns say of the logsumexp: an objective is written as reductions of products, as in
`sum(p * logits) - logsumexp(logits) * sum(p)`, where p does not depend on the logits. Source: arXiv
1909.08053 (section 3).

Shapes: N tokens, V vocabulary, v of its columns here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.kernels.fused_cross_entropy import (
    add_parts_,
    cross_entropy,
    cross_entropy_gradient_,
)
from headrace.model.head import IGNORED, Vocabulary, capped
from headrace.parallel.tensor import Peers, all_reduce, sum_forward

NOWHERE = -1
"""A column that no rank has, for the gradient of a token whose target is elsewhere."""


class ShardedVocabulary(Vocabulary):
    """Reductions over the vocabulary dimension, of which this rank holds [offset, offset + count).

    Args:
        offset: the first id of this rank.
        count: its ids.
        vocab: ids over all ranks.
        peers: the ranks that hold the others.
    """

    def __init__(self, offset: int, count: int, vocab: int, peers: Peers) -> None:
        self.offset, self.count, self.vocab, self.peers = offset, count, vocab, peers

    def nll(self, logits_NV: Tensor, targets_N: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the summed negative log likelihood of all targets but `IGNORED`, a scalar.

        Of each target's probability the share `smoothing` is spread over the vocabulary evenly.
        """
        return self.nll_of_each(logits_NV, targets_N, smoothing).sum()

    def nll_of_each(self, logits_NV: Tensor, targets_N: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the negative log likelihood of each target, [N]; 0 where it is `IGNORED`."""
        place_N, elsewhere_N = self._places(targets_N)
        given = (place_N, elsewhere_N, smoothing, smoothing / self.vocab, self.peers)
        loss_N = _Nll.apply(logits_NV, *given)
        assert isinstance(loss_N, Tensor)
        return loss_N.masked_fill(targets_N == IGNORED, 0.0)

    def nll_by_kernels(
        self,
        logits_NV: Tensor,
        targets_N: Tensor,
        *,
        softcap: float = 0.0,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        z_nats: Tensor | None = None,
        moved_nats: Tensor | None = None,
    ) -> Tensor:
        """Return what `fused_cross_entropy` returns of whole logits, an fp32 scalar.

        The gradient is written over this rank's logits. See there for the arguments.
        """
        how = (IGNORED, softcap, z_loss, label_smoothing, self.vocab)
        losses_N, norms_N3 = _Kernels.apply(logits_NV, targets_N, self, how)
        add_parts_(norms_N3, z_loss, z_nats, moved_nats)
        return losses_N.sum()

    def logsumexp(self, logits_NV: Tensor) -> Tensor:
        """Log sum exp over the whole vocabulary, [N]."""
        most_N = all_reduce(logits_NV.detach().amax(-1), "max", self.peers)
        return self.sum((logits_NV - most_N[:, None]).exp()).log() + most_N

    def pick(self, logits_NV: Tensor, ids_N: Tensor) -> Tensor:
        """Return the value of each token at its id, [N]; 0 where no rank holds the id."""
        place_N, elsewhere_N = self._places(ids_N)
        picked_N = super().pick(logits_NV, place_N)
        return sum_forward(picked_N.masked_fill(elsewhere_N, 0.0), self.peers)

    def sum(self, values_NV: Tensor) -> Tensor:
        """Sum over the whole vocabulary, [N]."""
        return sum_forward(values_NV.sum(-1), self.peers)

    def dot(self, logits_NV: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return the sum over K of weight x the value at its id, [N]."""
        place_NK, elsewhere_NK = self._places(ids_NK)
        mine_N = super().dot(logits_NV, place_NK, weights_NK.masked_fill(elsewhere_NK, 0.0))
        return sum_forward(mine_N, self.peers)

    def without(self, logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
        """Return the logits with minus infinity at those ids of each token that are here, [N, v].

        Ids of other ranks go to a column more, which is cut off.
        """
        place_NK, elsewhere_NK = self._places(ids_NK)
        N, count = logits_NV.shape
        taken_NV = torch.zeros(N, count + 1, dtype=torch.bool, device=logits_NV.device)
        taken_NV = taken_NV.scatter(-1, place_NK.masked_fill(elsewhere_NK, count), True)
        return logits_NV.masked_fill(taken_NV[:, :count], -torch.inf)

    def argmax(self, values_NV: Tensor) -> Tensor:
        """Return the id of each token's largest value, [N]; the lowest where several are."""
        value_N, place_N = values_NV.detach().max(-1)
        beaten_N = value_N < all_reduce(value_N, "max", self.peers)
        mine_N = (place_N + self.offset).masked_fill(beaten_N, self.vocab)
        return all_reduce(mine_N, "min", self.peers)

    def ids(self, values_NV: Tensor) -> Tensor:
        """Return the vocabulary ids of this rank's columns."""
        return super().ids(values_NV) + self.offset

    def part(self, values_NV: Tensor) -> Tensor:
        """Return this rank's columns of values over the whole vocabulary."""
        return values_NV.narrow(-1, self.offset, self.count)

    def _places(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each id here, 0 for one that is not here, and whether it is not."""
        place_N = ids_N - self.offset
        elsewhere_N = (place_N < 0) | (place_N >= self.count)
        return place_N.masked_fill(elsewhere_N, 0), elsewhere_N


class _Nll(torch.autograd.Function):
    """logsumexp - pick, holding two tensors [N, v] where autograd would hold four.

    Smoothed, `smoothing` of the pick is replaced by `each` of every logit. The backward pass writes
    the gradient over the probabilities, and can be run once.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits_NV: Tensor,
        place_N: Tensor,
        elsewhere_N: Tensor,
        smoothing: float,
        each: float,
        peers: Peers,
    ) -> Tensor:
        shifted_NV = logits_NV - all_reduce(logits_NV.amax(-1), "max", peers)[:, None]
        picked_N = shifted_NV.gather(-1, place_N[:, None]).squeeze(-1)
        picked_N = (1 - smoothing) * picked_N.masked_fill(elsewhere_N, 0.0)
        if smoothing:
            picked_N += each * shifted_NV.sum(-1)
        exp_NV = shifted_NV.exp_()
        # One collective for both. Not by `stack`: inductor reduces that in place, over a sum of its
        # own that a z-loss may read afterwards.
        first_2N = torch.arange(2, device=picked_N.device)[:, None] == 0
        sums_2N = torch.where(first_2N, exp_NV.sum(-1), picked_N)
        total_N, picked_N = all_reduce(sums_2N, "sum", peers).unbind()
        ctx.save_for_backward(exp_NV.div_(total_N[:, None]), place_N, elsewhere_N)
        ctx.smoothing, ctx.each = smoothing, each
        return total_N.log() - picked_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grad_NV, place_N, elsewhere_N = ctx.saved_tensors
        target_N = (ctx.smoothing - 1) * grad_N.masked_fill(elsewhere_N, 0.0)
        grad_NV.mul_(grad_N[:, None])  # torch refuses to read what was saved once more
        if ctx.smoothing:
            grad_NV -= ctx.each * grad_N[:, None]
        grad_NV.scatter_add_(-1, place_N[:, None], target_N[:, None])
        return grad_NV, None, None, None, None, None


class _Kernels(torch.autograd.Function):
    """Run the kernels of a whole vocabulary over a rank's columns, with two collectives between.

    The first kernel finds a rank's largest logit and the rest of its log-sum-exp; ranks merge them,
    and the second kernel writes the gradient with what all have. A target that is elsewhere is
    column 0 for the first and none for the second.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, shard: ShardedVocabulary, how: Any
    ) -> tuple[Tensor, Tensor]:
        _, softcap, z_loss, smoothing, vocab = ctx.how = how
        ignored_N = targets_N == IGNORED
        place_N, elsewhere_N = shard._places(targets_N)
        norms_N3 = cross_entropy(logits_NV, place_N.masked_fill(ignored_N, IGNORED), *how, False)[1]
        most_N, rest_N, moved_N = norms_N3.unbind(1)
        target_N = capped(logits_NV.gather(-1, place_N[:, None]).squeeze(-1).float(), softcap)
        spread_N = moved_N - smoothing * target_N  # what smoothing takes of these columns
        target_N = target_N.masked_fill(elsewhere_N, 0.0)
        largest_N = all_reduce(most_N, "max", shard.peers)
        total_N, target_N, moved_N = all_reduce(
            torch.stack(
                ((most_N - largest_N + rest_N).exp(), target_N, spread_N + smoothing * target_N)
            ),
            "sum",
            shard.peers,
        ).unbind()
        rest_N = total_N.log()
        norm_N = largest_N + rest_N
        losses_N = largest_N - target_N + rest_N + z_loss * norm_N.square() + moved_N
        unknown_N = (targets_N < 0) | (targets_N >= vocab)
        losses_N = losses_N.masked_fill(unknown_N, torch.nan).masked_fill(ignored_N, 0.0)
        norms_N3 = torch.stack((largest_N, rest_N, moved_N), 1)
        norms_N3 = norms_N3.masked_fill(ignored_N[:, None], 0.0)
        own_N = place_N.masked_fill(elsewhere_N, NOWHERE).masked_fill(ignored_N, IGNORED)
        ctx.save_for_backward(logits_NV, own_N, norms_N3)
        ctx.mark_non_differentiable(norms_N3)
        return losses_N, norms_N3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        logits_NV, own_N, norms_N3 = ctx.saved_tensors  # refuses what was written over since
        cross_entropy_gradient_(logits_NV, own_N, norms_N3, grad_N.contiguous(), *ctx.how)
        return logits_NV.detach(), None, None, None
