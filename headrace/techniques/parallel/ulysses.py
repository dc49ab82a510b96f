"""Give every rank a part of each row, and exchange tokens for heads around attention.

`mesh.context` ranks share every row: each holds T / R successive tokens. Norms, MLPs, head and loss
see tokens one by one. Around attention an all-to-all gives each rank whole rows of a share of the
heads, and another gives its tokens back (DeepSpeed-Ulysses, arXiv 2309.14509; parallel/exchange).
The backend computes what it computes on one rank, with its own mask of whole rows, so any of them
serves: cuDNN's, FlashAttention's, flex, varlen.

Against the ring of `context_parallel`: fewer bytes where a key-value head serves few queries, one
large kernel instead of R small ones, and any mask, in which a rank's heads keep their own slopes;
but no more ranks than there are key-value heads, and nothing hides the exchange.

Its stage is the model's: the decoder is there, and each attention's backend is given the exchange
around it. Not split: a mixer that is not attention, and a teacher, which would attend within its
part of a row.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import ClassVar

import torch
from torch import Tensor

from headrace.assemble.row_parts import AXIS, RowPartTechnique, part_of
from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.remedy import mend
from headrace.costs.cut_rows import cut_rows
from headrace.costs.ledger import Ledger, Line
from headrace.costs.mask_work import mask_of_heads
from headrace.costs.work import Attention, Phase, collective
from headrace.model.adapter import shape_of
from headrace.model.attention import Attend
from headrace.model.mask import MaskSpec, Rows
from headrace.parallel.exchange import heads_to_tokens, tokens_to_heads
from headrace.parallel.layout import gather
from headrace.parallel.tensor import peers_of
from headrace.parallel.world import World
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Unsupported,
)

COPIES = 3
"""Copies of queries, keys and values beside each other: sent, received, and their gradient."""


class Exchange:
    """An exchange stands around one backend, and knows what went through it."""

    def __init__(self, world: World, attend: Attend) -> None:
        self.world, self.attend = world, attend
        self.peers = peers_of(world.group(AXIS))
        self.whole = self.own = self.heads = 0
        """A row's tokens, those of them here, and the heads that attended here, as last seen."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> object:
        """Return the backend's mask of whole rows, from this rank's tokens of them."""
        whole, segments = length * self.peers.ranks, rows.segments_BT
        spec = spec.of_heads(self.peers.place, self.peers.ranks)
        if not spec.document or segments is None:
            places = torch.arange(whole, device=rows.positions_BT.device)
            return self.attend.prepare(spec, rows._replace(positions_BT=places[None]), whole)
        positions, segments = (
            gather(x.expand(segments.shape).contiguous(), 1, whole, self.world, AXIS)
            for x in (rows.positions_BT, segments)
        )
        known = rows._replace(positions_BT=positions, segments_BT=segments)
        return self.attend.prepare(spec, known, whole)

    def __call__(self, q_BtHK: Tensor, k_BtGK: Tensor, v_BtGK: Tensor, mask: object) -> Tensor:
        """Return attention of this rank's queries over whole rows."""
        parts, ranks = (q_BtHK, k_BtGK, v_BtGK), self.peers.ranks
        shares = [x.unflatten(2, (ranks, -1)) for x in parts]
        sent = torch.cat(shares, 3).flatten(2, 3)  # each rank's queries, keys and values together
        counts = [share.size(3) for share in shares]
        q, k, v = tokens_to_heads(sent, self.peers).split(counts, 2)
        self.own, self.whole, self.heads = q_BtHK.size(1), q.size(1), q.size(2)
        return heads_to_tokens(self.attend(q, k, v, mask), self.peers)

    def part(self, work: MicroBatch) -> MicroBatch:
        """Return this rank's tokens of a micro-batch."""
        place, ranks = self.peers.place, self.peers.ranks
        return part_of(work, ranks, 1, lambda x_BT: x_BT.chunk(ranks, 1)[place].contiguous())


class Ulysses(RowPartTechnique):
    """Give every rank a part of each row, and exchange tokens for heads around attention."""

    stage: ClassVar[Stage] = Stage.MODEL
    claims: ClassVar[tuple[str, ...]] = ("place",)
    chunks: ClassVar[int] = 1
    excludes: ClassVar[Mapping[str, str]] = {
        "distillation": "the teacher has no exchange, and would attend within a part of each row "
        "(derived)",
    }
    card: ClassVar[Card] = Card(
        buys="activations and logits of a rank divided by mesh.context, and the time of a row "
        "with them (derived)",
        costs="(R - 1) / R of a rank's queries, keys, values and outputs on the wire per layer in "
        "each direction, with nothing beside it (arXiv 2309.14509, section 3.2)",
        helps="rows too long for one GPU's memory, where a backend or a mask has no ring",
        hurts="models of few key-value heads: no more ranks than these; slow links",
        source="arXiv 2309.14509",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require key-value heads that divide by the ranks too."""
        answer = super().supports(context)
        if isinstance(answer, Unsupported):
            return answer
        mesh = context.plan.mesh
        heads = shape_of(context.plan.model).resolved_kv_heads // mesh.tensor
        if heads % mesh.context:
            near = gcd(heads, mesh.context)
            return Unsupported(
                f"{heads} key-value heads of a rank do not divide by mesh.context = {mesh.context}",
                mend(f"mesh.context={near}") if near > 1 else mend("-ulysses", "+context_parallel"),
            )
        return answer

    def predict(self, ledger: Ledger) -> Ledger:
        """Count a rank's tokens of what is kept, its heads' attention, and the exchange."""
        ledger = cut_rows(ledger, _part)
        ledger = mask_of_heads(ledger, ledger.sizes["context_ranks"])
        sizes = ledger.sizes
        queries = sizes["tokens"] * sizes["heads"] * sizes["head_dim"] * sizes["activation_bytes"]
        keys = queries * 2 * sizes["kv_heads"] / sizes["heads"]
        sends: dict[str, tuple[Phase, float]] = {
            "to_heads": ("forward", queries + keys),
            "to_tokens": ("forward", queries),
            "to_heads_backward": ("backward", queries),
            "to_tokens_backward": ("backward", queries + keys),
        }
        work = {
            f"attention/{name}": collective(
                sizes, AXIS, phase, "all_to_all", bytes, sizes["layers"]
            )
            for name, (phase, bytes) in sends.items()
        }
        ledger = ledger.with_line("exchange", Line(COPIES * (queries + keys), ("backward",)))
        return replace(ledger, work={**ledger.work, **work})

    def apply(self, build: Build) -> None:
        """Put the exchange around each attention's backend, and cut what the baseline places."""
        exchange = Exchange(build.world, build.model.attend)
        for module in build.model.blocks.modules():
            if getattr(module, "attend", None) is exchange.attend:
                module.attend = exchange  # type: ignore[assignment]
        build.model.prepare_mask = exchange.prepare  # type: ignore[method-assign]
        build.notes[self.name()] = exchange
        whole = build.place
        build.place = lambda build, micro: exchange.part(whole(build, micro))

    def active(self, build: Build) -> Evidence:
        """Report the tokens that this rank held of a row, and the heads that it attended with."""
        exchange: Exchange = build.notes[self.name()]
        ranks = exchange.peers.ranks
        return Evidence(
            active=0 < exchange.own * ranks == exchange.whole,
            detail=f"held {exchange.own} of {exchange.whole} tokens of each row, and attended with "
            f"{exchange.heads} heads over {ranks} ranks",
            numbers={
                "tokens_held": exchange.own,
                "tokens_of_a_row": exchange.whole,
                "heads_here": exchange.heads,
            },
        )


def _part(piece: Attention, ranks: int) -> Attention:
    """Return attention over whole rows with a rank's heads."""
    rows, heads, kv_heads, length, features = piece.sizes
    return replace(piece, sizes=(rows, heads // ranks, kv_heads // ranks, length, features))
