"""Offer collectives that autograd and the compiler see through, for tensors split over few ranks.

A forward collective has another collective as its gradient: what was gathered is reduced and
scattered, what was summed is passed on. Each pair is one autograd function here, over plain local
tensors. They call torch's functional collectives as operations and wait at once, so that a traced
graph holds an all-gather and its wait and never a tensor subclass: a DTensor, or a collective that
is still under way, at the border of a compiled block lost the embedding's gradient in a trial. The
compiler is free to move the wait to where the result is read.

The contract: what is the same on all ranks has the same gradient on all ranks, and what a rank
holds alone has the whole gradient of that part. A value that is equal everywhere and then meets
each rank's own part must pass `copy`, whose backward pass adds what the ranks found.

A sequence of T tokens over R ranks gives each of them ceil(T / R), the last ones zeros when R does
not divide T; gathering trims them. Sources: arXiv 1909.08053 (copy, sum), arXiv 2205.05198
(sequence).

Shapes: B rows, T tokens, t tokens of a rank, D features.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operations
import torch.nn.functional as F
from torch import Tensor

_OPS = torch.ops._c10d_functional
SEQUENCE = 1
"""The dimension of tokens in [B, T, D]."""


class Peers(NamedTuple):
    """The ranks that share tensors, in words that a traced graph can hold."""

    group: str
    """name of the process group"""
    ranks: int
    place: int
    """of this rank among them"""


def peers_of(group: dist.ProcessGroup) -> Peers:
    """Return the members of a process group, and this rank's place among them."""
    return Peers(group.group_name, group.size(), group.rank())


def local_length(length: int, peers: Peers) -> int:
    """Return the tokens of a rank when `length` are split: the quotient, rounded up."""
    return -(-length // peers.ranks)


# --- without gradients -----------------------------------------------------------------------


def all_reduce(x: Tensor, op: Literal["sum", "max", "min"], peers: Peers) -> Tensor:
    """Return the sum, largest or smallest over ranks, element by element; it has no gradient."""
    return _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), op, peers.group))


def _gather(x_BtD: Tensor, length: int, peers: Peers) -> Tensor:
    """Return every rank's tokens in rank order, `length` of them."""
    joined = _OPS.all_gather_into_tensor(x_BtD.contiguous(), peers.ranks, peers.group)
    pieces = _OPS.wait_tensor(joined).chunk(peers.ranks)
    whole = torch.cat(pieces, SEQUENCE)  # a view of it would hide it from parallel/micro_pipeline
    return whole if whole.size(SEQUENCE) == length else whole.narrow(SEQUENCE, 0, length)


def _scatter(x_BTD: Tensor, peers: Peers) -> Tensor:
    """Return this rank's tokens of the sum over ranks."""
    pieces = _padded(x_BTD, peers).chunk(peers.ranks, SEQUENCE)
    mine = _OPS.reduce_scatter_tensor(torch.cat(pieces), "sum", peers.ranks, peers.group)
    return _OPS.wait_tensor(mine)


def _padded(x_BTD: Tensor, peers: Peers) -> Tensor:
    """Return `x_BTD` with zeros to a multiple of the ranks."""
    more = -x_BTD.size(SEQUENCE) % peers.ranks
    return F.pad(x_BTD, (0, 0, 0, more)) if more else x_BTD


# --- with gradients --------------------------------------------------------------------------


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, length: int, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers = peers
        return _gather(x_BtD, length, peers)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _scatter(grad_BTD, ctx.peers), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.length, ctx.peers = x_BTD.size(SEQUENCE), peers
        return _scatter(x_BTD, peers)

    @staticmethod
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _gather(grad_BtD, ctx.length, ctx.peers), None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.length, ctx.peers = x_BTD.size(SEQUENCE), peers
        mine = _padded(x_BTD, peers).chunk(peers.ranks, SEQUENCE)[peers.place]
        return mine.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _gather(grad_BtD, ctx.length, ctx.peers), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        return all_reduce(x, "sum", peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return all_reduce(grad, "sum", ctx.peers), None


def gather_sequence(x_BtD: Tensor, length: int, peers: Peers) -> Tensor:
    """Gather each rank's tokens to all `length` tokens on every rank; reduce-scatter the gradient.

    For what each rank then uses differently, as its own columns of a matrix.
    """
    return _GatherSequence.apply(x_BtD, length, peers)  # type: ignore[return-value]


def scatter_sequence(x_BTD: Tensor, peers: Peers) -> Tensor:
    """Reduce partial sums of all tokens to this rank's tokens of their sum; gather the gradient."""
    return _ScatterSequence.apply(x_BTD, peers)  # type: ignore[return-value]


def split_sequence(x_BTD: Tensor, peers: Peers) -> Tensor:
    """Split what is equal on all ranks to this rank's tokens of it; gather the gradient."""
    return _SplitSequence.apply(x_BTD, peers)  # type: ignore[return-value]


def sum_forward(x: Tensor, peers: Peers) -> Tensor:
    """Add partial sums to their sum on every rank; the gradient, equal everywhere, passes."""
    return _Sum.apply(x, peers)  # type: ignore[return-value]


def copy(x: Tensor, peers: Peers) -> Tensor:
    """Copy what is equal on all ranks, for parts that differ; their gradients are added."""
    return _Copy.apply(x, peers)  # type: ignore[return-value]
