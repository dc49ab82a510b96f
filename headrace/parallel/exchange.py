"""Exchange tokens for heads: every rank attends over whole rows with a share of the heads.

Each of R ranks holds T / R successive tokens of a row, with all heads. Before attention an
all-to-all gives it all T tokens of a share of the heads, and after it another gives its own tokens
back (DeepSpeed-Ulysses, arXiv 2309.14509). So any attention backend and any mask of whole rows
works as on one rank. A rank sends (R - 1) / R of its queries, keys, values and outputs in each
direction, fewer with every rank more, where a ring sends keys and values R - 1 times.

The exchange is an operation that autograd and the compiler see through, as those of
`parallel/tensor`: its gradient is the exchange back.

Shapes: B rows, T tokens, t = T / R tokens of a rank, N heads of any kind, n = N / R, K features.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operations
from torch import Tensor

from headrace.parallel.tensor import Peers

_OPS = torch.ops._c10d_functional


def _swapped(x_R: Tensor, peers: Peers) -> Tensor:
    """Send part r of the first dimension to rank r; return what each rank sent here."""
    sizes = [x_R.size(0) // peers.ranks] * peers.ranks
    return _OPS.wait_tensor(
        _OPS.all_to_all_single(x_R.contiguous(), sizes, sizes, peers.group),
    )


def _to_heads(x_BtNK: Tensor, peers: Peers) -> Tensor:
    parts_RBtnK = x_BtNK.unflatten(2, (peers.ranks, -1)).movedim(2, 0)
    return _swapped(parts_RBtnK, peers).movedim(0, 1).flatten(1, 2)


def _to_tokens(x_BTnK: Tensor, peers: Peers) -> Tensor:
    parts_RBtnK = x_BTnK.unflatten(1, (peers.ranks, -1)).movedim(1, 0)
    return _swapped(parts_RBtnK, peers).movedim(0, 2).flatten(2, 3)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtNK: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers = peers
        return _to_heads(x_BtNK, peers)

    @staticmethod
    def backward(ctx: Any, grad_BTnK: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _to_tokens(grad_BTnK, ctx.peers), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTnK: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers = peers
        return _to_tokens(x_BTnK, peers)

    @staticmethod
    def backward(ctx: Any, grad_BtNK: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _to_heads(grad_BtNK, ctx.peers), None


def tokens_to_heads(x_BtNK: Tensor, peers: Peers) -> Tensor:
    """Return all tokens [B, T, n, K] of this rank's heads, from its tokens of all heads."""
    return _ToHeads.apply(x_BtNK, peers)  # type: ignore[return-value]


def heads_to_tokens(x_BTnK: Tensor, peers: Peers) -> Tensor:
    """Return this rank's tokens [B, t, N, K] of all heads, from all tokens of its heads."""
    return _ToTokens.apply(x_BTnK, peers)  # type: ignore[return-value]
