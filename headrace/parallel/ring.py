"""Ring attention: every rank holds a part of each row, and keys and values travel past its queries.

A row of T tokens is cut into 2R chunks for R ranks; rank r holds chunks r and 2R-1-r. A causal
query near the end sees much and one near the beginning little, and this zig-zag gives every rank
the same work. Each rank sends its keys and values to the next rank and takes those of the one
before, R - 1 times: attention over what is here runs while the next block is on its way. Partial
results merge exactly by their log-sum-exp, in fp32 (kernels/block_attention). Going backward, keys
and values travel again, and their gradients travel with them, summed in fp32, until they are home.

Nothing of size T exists on a rank but documents' indices (int32), and the probabilities are never
kept. Blocks that causality or the window hides wholly are not computed, and without documents or a
window no block needs a mask: what remains is whole, or this rank's own and causal.

Cost: each layer sends 2 (R - 1) / R of a row's keys or values forward, and backward as much again
and twice that of fp32 gradients. It hides behind attention when rows are long: the work of a block
grows with the square of its tokens, its bytes with their number.

The compiler sees one opaque operation, as it should: it can fuse nothing here, and the order of
sends must be the same on all ranks. An operation takes tensors and numbers only, so a ring is known
to it by its number (`Ring.number`).

Left out: all-gather of keys and values, which is simpler and holds whole rows of them; skipping
blocks that hold other documents only, which the host would have to read from the device.
Source: arXiv 2310.01889 (ring attention); arXiv 2311.09431 (balance under causality).

Shapes: B rows, t tokens of this rank, H query heads, G key-value heads, K features, R ranks.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from headrace.kernels.autocast import compute_dtype
from headrace.kernels.block_attention import (
    Kernel,
    Mask,
    block_attention,
    block_attention_backward,
    kernel_for,
)


class RingMask(NamedTuple):
    """Which key each query of a row may see.

    Args:
        causal: itself and what stands before it.
        window: at most this many tokens, itself included; None is no limit.
        segments_RBt: every rank's document of each of its tokens, or None: documents see each
            other. See `Ring.gather`.
    """

    causal: bool = True
    window: int | None = None
    segments_RBt: Tensor | None = None


class KeyBlock(NamedTuple):
    """This rank's queries and another's keys, as far as they can see each other at all."""

    queries: slice
    keys: slice
    mask: Mask


@dataclass
class Traffic:
    """Count what went round a ring so far."""

    calls: int = 0
    """Forward passes of attention."""
    bytes_sent: int = 0
    """By this rank."""
    blocks: int = 0
    """Blocks that were computed, forward and backward."""
    skipped: int = 0
    """Blocks that no query of this rank could see."""


class Ring:
    """A ring is the ranks that share every row, and this rank's place among them.

    Args:
        group: the ranks.
        kernel: the one that computes blocks, which then need no mask; None takes the fastest that
            is right for each (`kernel_for`).
    """

    def __init__(self, group: dist.ProcessGroup, kernel: Kernel | None = None) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.kernel: Kernel | None = kernel
        self.launched: set[str] = set()
        """Kernels that computed blocks so far; a release of FlashAttention by its own name."""
        self.traffic = Traffic()
        self.number = next(_NUMBERS)
        _RINGS[self.number] = self

    def cut(self, x_BT: Tensor) -> Tensor:
        """Return this rank's tokens [B, t] of whole rows; T must be a multiple of 2R."""
        chunks = x_BT.unflatten(1, (2 * self.ranks, -1))
        return chunks[:, list(self._chunks(self.rank))].flatten(1, 2)

    def gather(self, x_Bt: Tensor) -> Tensor:
        """Return every rank's `x_Bt` [R, B, t]; all ranks call it together."""
        x_RBt = x_Bt.new_empty((self.ranks, *x_Bt.shape))
        dist.all_gather(list(x_RBt.unbind()), x_Bt.contiguous(), group=self.group)
        return x_RBt

    def block(
        self, owner: int, tokens: int, mask: RingMask, device: torch.device
    ) -> KeyBlock | None:
        """Return what this rank computes with the keys of `owner`; None where nothing is seen.

        Args:
            owner: the rank whose keys are here.
            tokens: t, of every rank.
            mask: of the whole row.
            device: where a mask is made, if the block needs one.
        """
        c = tokens // 2
        mine, theirs = self._chunks(self.rank), self._chunks(owner)
        rows = [i for i, a in enumerate(mine) if any(_sees(a, b, c, mask) for b in theirs)]
        columns = [j for j, b in enumerate(theirs) if any(_sees(a, b, c, mask) for a in mine)]
        if not rows:
            return None
        queries = slice(rows[0] * c, (rows[-1] + 1) * c)
        keys = slice(columns[0] * c, (columns[-1] + 1) * c)
        pairs = [(mine[i], theirs[j]) for i in rows for j in columns]
        if mask.segments_RBt is None:
            if all(_sees_all(a, b, c, mask) for a, b in pairs):
                return KeyBlock(queries, keys, "full")
            span = (mine[1] - mine[0] + 1) * c
            if owner == self.rank and mask.causal and (mask.window or span) >= span:
                return KeyBlock(queries, keys, "causal")  # chunks lie in the order of their places
        places_t = self._places(self.rank, c, device)[queries]
        places_s = self._places(owner, c, device)[keys]
        seen_Bts = visible(places_t, places_s, mask.causal, mask.window)[None]
        if mask.segments_RBt is not None:
            mine_Bt = mask.segments_RBt[self.rank][:, queries]
            theirs_Bs = mask.segments_RBt[owner][:, keys]
            seen_Bts = seen_Bts & (mine_Bt[:, :, None] == theirs_Bs[:, None])
        return KeyBlock(queries, keys, seen_Bts)

    def pass_on(self, x: Tensor) -> "Transfer":
        """Begin to send `x` to the next rank and to receive its like from the one before."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        taken = torch.empty_like(x)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, taken, group=self.group, group_peer=before),
            ]
        )
        self.traffic.bytes_sent += x.nbytes
        return Transfer(taken, x, works)

    def forward(
        self, q_BtHK: Tensor, k_BtGK: Tensor, v_BtGK: Tensor, mask: RingMask
    ) -> tuple[Tensor, Tensor]:
        """Return output [B, t, H, K] and lse fp32 [B, H, t] of this rank's queries."""
        q_BHtK = q_BtHK.transpose(1, 2)
        o_BHtK = torch.zeros_like(q_BHtK, dtype=torch.float32)
        lse_BHt = o_BHtK.new_full(q_BHtK.shape[:3], -torch.inf)
        kv_2BtGK = torch.stack((k_BtGK, v_BtGK))
        self.traffic.calls += 1
        for step in range(self.ranks):
            coming = self.pass_on(kv_2BtGK) if step + 1 < self.ranks else None
            block = self._block(step, q_BtHK, mask)
            if block:
                k, v = kv_2BtGK[:, :, block.keys].transpose(2, 3)
                q = q_BHtK[:, :, block.queries]
                kernel = self._kernel(q, k, block.mask)
                o, lse = block_attention(q, k, v, block.mask, kernel=kernel)
                merge_(o_BHtK[:, :, block.queries], lse_BHt[:, :, block.queries], o, lse)
            if coming:
                kv_2BtGK = coming.wait()
        return o_BHtK.to(q_BtHK.dtype).transpose(1, 2).contiguous(), lse_BHt

    def backward(
        self,
        do_BtHK: Tensor,
        q_BtHK: Tensor,
        k_BtGK: Tensor,
        v_BtGK: Tensor,
        o_BtHK: Tensor,
        lse_BHt: Tensor,
        mask: RingMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of this rank's q, k and v, from what `forward` returned."""
        do, q, o = (x.transpose(1, 2) for x in (do_BtHK.contiguous(), q_BtHK, o_BtHK))
        dq_BHtK = torch.zeros_like(q, dtype=torch.float32)
        kv_2BtGK = torch.stack((k_BtGK, v_BtGK))
        dkv_2BtGK = torch.zeros_like(kv_2BtGK, dtype=torch.float32)
        gradient = None
        for step in range(self.ranks):
            coming = self.pass_on(kv_2BtGK) if step + 1 < self.ranks else None
            block = self._block(step, q_BtHK, mask)
            share = None
            if block:
                k, v = kv_2BtGK[:, :, block.keys].transpose(2, 3)
                dq, *share = block_attention_backward(
                    do[:, :, block.queries],
                    q[:, :, block.queries],
                    k,
                    v,
                    o[:, :, block.queries],
                    lse_BHt[:, :, block.queries],
                    block.mask,
                    kernel=self._kernel(q[:, :, block.queries], k, block.mask),
                )
                dq_BHtK[:, :, block.queries] += dq
            if gradient:  # of the keys that are here, from the ranks that they passed
                dkv_2BtGK = gradient.wait()
            if block and share:
                for whole_BtGK, part_BGsK in zip(dkv_2BtGK, share, strict=True):
                    whole_BtGK[:, block.keys] += part_BGsK.transpose(1, 2)
            gradient = self.pass_on(dkv_2BtGK)
            if coming:
                kv_2BtGK = coming.wait()
        assert gradient is not None
        # Copies: an operation's results may not share their storage.
        dk, dv = (g.to(k_BtGK.dtype, copy=True) for g in gradient.wait())
        return dq_BHtK.to(q_BtHK.dtype).transpose(1, 2).contiguous(), dk, dv

    def _kernel(self, q_BHtK: Tensor, k_BGsK: Tensor, mask: Mask) -> Kernel:
        """Return the kernel of a block, and note it."""
        kernel: Kernel = self.kernel or kernel_for(q_BHtK, k_BGsK, mask)
        name: str | None = current_flash_attention_impl() if kernel == "flash" else None
        self.launched.add(name or kernel)
        return kernel

    def _block(self, step: int, q_BtHK: Tensor, mask: RingMask) -> KeyBlock | None:
        """Return the block of a step, and count it."""
        owner = (self.rank - step) % self.ranks
        block = self.block(owner, q_BtHK.size(1), mask, q_BtHK.device)
        self.traffic.blocks += block is not None
        self.traffic.skipped += block is None
        return block

    def _chunks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ranks - 1 - rank

    def _places(self, rank: int, c: int, device: torch.device) -> Tensor:
        """Return each token's place in the row [t], int32."""
        return torch.cat(
            [
                torch.arange(chunk * c, (chunk + 1) * c, dtype=torch.int32, device=device)
                for chunk in self._chunks(rank)
            ]
        )


class Transfer(NamedTuple):
    """A transfer is under way."""

    taken: Tensor
    sent: Tensor
    """Kept until it is gone."""
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Return what came."""
        for work in self.works:
            work.wait()
        return self.taken


_NUMBERS = itertools.count()
_RINGS: WeakValueDictionary[int, Ring] = WeakValueDictionary()
"""Open rings by number, as torch keeps process groups by name: an operation takes no objects."""


def visible(queries_t: Tensor, keys_s: Tensor, causal: bool, window: int | None) -> Tensor:
    """Return bool [t, s]: which key each query sees by their places in the row; documents aside."""
    query_t1, key_1s = queries_t[:, None], keys_s[None, :]
    seen = torch.ones((len(queries_t), len(keys_s)), dtype=torch.bool, device=keys_s.device)
    if causal:
        seen = seen & (key_1s <= query_t1)
    if window is not None:
        seen = seen & (key_1s > query_t1 - window) & (key_1s < query_t1 + window)
    return seen


def _sees(query: int, key: int, c: int, mask: RingMask) -> bool:
    """Return whether any query of one chunk of `c` tokens may see any key of another."""
    nearest = max(0, abs(query - key) * c - (c - 1))
    return not (mask.causal and key > query) and (mask.window is None or nearest < mask.window)


def _sees_all(query: int, key: int, c: int, mask: RingMask) -> bool:
    """Return whether every query of one chunk sees every key of another."""
    farthest = abs(query - key) * c + c - 1
    ordered = key < query or farthest == 0
    return (ordered or not mask.causal) and (mask.window is None or farthest < mask.window)


def merge_(o_BHtK: Tensor, lse_BHt: Tensor, more_BHtK: Tensor, more_lse_BHt: Tensor) -> None:
    """Add a block's result to that of others, in place; where neither sees anything, nothing."""
    both_BHt = torch.logaddexp(lse_BHt, more_lse_BHt)
    safe_BHt = both_BHt.masked_fill(both_BHt == -torch.inf, 0)
    o_BHtK.mul_((lse_BHt - safe_BHt).exp()[..., None])
    o_BHtK.addcmul_(more_BHtK.float(), (more_lse_BHt - safe_BHt).exp()[..., None])
    lse_BHt.copy_(both_BHt)


# --- the operation that autograd and the compiler see ------------------------------------------


def ring_attention(
    ring: Ring, q_BtHK: Tensor, k_BtGK: Tensor, v_BtGK: Tensor, mask: RingMask
) -> Tensor:
    """Return attention of this rank's queries over the keys of whole rows, [B, t, H, K].

    All ranks of the ring call it together; under autocast it computes in autocast's dtype, as
    torch's own attention does.
    """
    q, k, v = (x.to(compute_dtype(q_BtHK)) for x in (q_BtHK, k_BtGK, v_BtGK))
    return _forward(q, k, v, mask.segments_RBt, mask.causal, mask.window, ring.number)[0]


@torch.library.custom_op("headrace::ring_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    causal: bool,
    window: int | None,
    ring: int,
) -> tuple[Tensor, Tensor]:
    return _RINGS[ring].forward(q, k, v, RingMask(causal, window, segments))


@torch.library.custom_op("headrace::ring_attention_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    segments: Tensor | None,
    causal: bool,
    window: int | None,
    ring: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _RINGS[ring].backward(do, q, k, v, o, lse, RingMask(causal, window, segments))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, t, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, t), dtype=torch.float32)


@_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, segments)


def _gradients(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse, segments = ctx.saved_tensors
    return *_backward(do, q, k, v, o, lse, segments, *ctx.rest), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
