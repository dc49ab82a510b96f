"""Send each token's row to the rank that holds its expert, and the result back to its own rank.

R ranks divide E experts: rank r has a contiguous share of them. A rank's rows are sorted by expert,
and so by the rank that they go to. The ranks first tell each other how many rows come for each
expert; then one all-to-all with splits of these counts carries the rows, as many as there are: none
is dropped and none is padded (GShard's layout, arXiv 2006.16668, without its capacity). What
arrives is sorted by sender; it is sorted again by expert, so that the grouped matmul of one process
(kernels/grouped_linear) computes it. The way back is the exact inverse, and each way's gradient is
the other way.

The counts are read on the host once for each forward pass: an all-to-all wants its splits there,
so that a GPU is waited for. Each step is one operation to a compiler, which learns the number of
arriving rows when the code runs.

Shapes: N rows of this rank, U rows that arrive here, D features, R ranks, E experts, e experts of
this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operations
from torch import Tensor

from headrace.parallel.layout import share
from headrace.parallel.tensor import Peers

_OPS = torch.ops._c10d_functional
Inner = Callable[[Tensor, Tensor], Tensor]
"""(rows [U, D] sorted by expert, rows of each expert [e]) -> what the experts made of them."""


def _swap(x: Tensor, sends: list[int], receives: list[int], group: str) -> Tensor:
    """Return what all ranks sent here: of each as many rows as `receives` says, in rank order."""
    return _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), receives, sends, group))


@torch.library.custom_op("headrace::count_arriving", mutates_args=())
def count_arriving(
    choices_E: Tensor, shares_R: list[int], place: int, group: str
) -> tuple[Tensor, Tensor]:
    """Tell the ranks how many rows go to each expert.

    Args:
        choices_E: this rank's rows of each expert.
        shares_R: experts of each rank.
        place: of this rank among them.
        group: name of the process group.

    Returns:
        The rows that each rank sends to each expert here [R, e], and on the host the rows that
        this rank sends to each rank and receives from it [2, R].
    """
    own = shares_R[place]
    arriving_Re = _swap(choices_E, shares_R, [own] * len(shares_R), group).view(-1, own)
    sends_R = torch.stack([part.sum() for part in choices_E.split(shares_R)])
    return arriving_Re, torch.stack([sends_R, arriving_Re.sum(1)]).cpu()


@count_arriving.register_fake
def _(choices_E: Tensor, shares_R: list[int], place: int, group: str) -> tuple[Tensor, Tensor]:
    own = shares_R[place]
    ranks = len(shares_R)
    splits = torch.empty(2, ranks, dtype=choices_E.dtype, device="cpu")
    return choices_E.new_empty(ranks, own), splits


def _by_expert(arriving_Re: Tensor, rows: int) -> Tensor:
    """Return which arrived row stands at each place [U], when they are sorted by expert."""
    e = arriving_Re.size(1)
    experts = torch.arange(e, device=arriving_Re.device).repeat(arriving_Re.size(0))
    of_row = experts.repeat_interleave(arriving_Re.flatten(), output_size=rows)
    return of_row.argsort(stable=True)


@torch.library.custom_op("headrace::to_experts", mutates_args=())
def to_experts(
    x_ND: Tensor, arriving_Re: Tensor, splits_2R: Tensor, group: str, rows: int | None
) -> Tensor:
    """Send rows that are sorted by expert; return the rows [U, D] of this rank's experts, sorted.

    Args:
        x_ND: this rank's rows.
        arriving_Re: of `count_arriving`.
        splits_2R: of `count_arriving`.
        group: name of the process group.
        rows: U where it is known, as in the backward pass.
    """
    sends, receives = splits_2R.tolist()
    arrived = _swap(x_ND.contiguous(), sends, receives, group)
    return arrived[_by_expert(arriving_Re, len(arrived))]


@to_experts.register_fake
def _(x_ND: Tensor, arriving_Re: Tensor, splits_2R: Tensor, group: str, rows: int | None) -> Tensor:
    U = torch.library.get_ctx().new_dynamic_size() if rows is None else rows
    return x_ND.new_empty(U, x_ND.size(1))


@torch.library.custom_op("headrace::to_tokens", mutates_args=())
def to_tokens(
    y_UD: Tensor, arriving_Re: Tensor, splits_2R: Tensor, group: str, rows: int
) -> Tensor:
    """Send rows back to the ranks that they came from: the inverse of `to_experts`; [N, D].

    Args:
        y_UD: what this rank's experts made, sorted by expert.
        arriving_Re: of `count_arriving`.
        splits_2R: of `count_arriving`.
        group: name of the process group.
        rows: N.
    """
    sends, receives = splits_2R.tolist()
    as_arrived = torch.empty_like(y_UD, memory_format=torch.contiguous_format)
    as_arrived[_by_expert(arriving_Re, len(y_UD))] = y_UD
    return _swap(as_arrived, receives, sends, group)


@to_tokens.register_fake
def _(y_UD: Tensor, arriving_Re: Tensor, splits_2R: Tensor, group: str, rows: int) -> Tensor:
    return y_UD.new_empty(rows, y_UD.size(1))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, arriving_Re, splits_2R, ctx.group, _ = inputs
    ctx.rows = rows.size(0)
    ctx.save_for_backward(arriving_Re, splits_2R)


def _to_experts_backward(ctx: Any, grad_UD: Tensor) -> tuple[Any, ...]:
    return to_tokens(grad_UD, *ctx.saved_tensors, ctx.group, ctx.rows), None, None, None, None


def _to_tokens_backward(ctx: Any, grad_ND: Tensor) -> tuple[Any, ...]:
    return to_experts(grad_ND, *ctx.saved_tensors, ctx.group, ctx.rows), None, None, None, None


to_experts.register_autograd(_to_experts_backward, setup_context=_keep)
to_tokens.register_autograd(_to_tokens_backward, setup_context=_keep)


class ExpertExchange:
    """An exchange stands around one layer's experts, of which this rank holds a share.

    Args:
        peers: the ranks that divide the experts.
        experts: how many there are.
        inner: what this rank's experts compute.
    """

    def __init__(self, peers: Peers, experts: int, inner: Inner) -> None:
        self.peers, self.inner = peers, inner
        self.shares = [share(experts, peers.ranks, rank)[1] for rank in range(peers.ranks)]
        self.arrived_Re: Tensor | None = None
        """Rows that came from each rank for each expert in the last forward pass."""

    def __call__(self, rows_ND: Tensor, choices_E: Tensor) -> Tensor:
        """Return what the experts make of rows [N, D] that are sorted by expert."""
        group, place = self.peers.group, self.peers.place
        arriving_Re, splits_2R = count_arriving(choices_E, self.shares, place, group)
        self.arrived_Re = arriving_Re
        mine_UD = to_experts(rows_ND, arriving_Re, splits_2R, group, None)
        done_UD = self.inner(mine_UD, arriving_Re.sum(0))
        return to_tokens(done_UD, arriving_Re, splits_2R, group, rows_ND.size(0))
