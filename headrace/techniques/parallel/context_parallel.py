"""Give every rank a part of each row, and let keys and values go round a ring.

Data parallelism splits rows; a row whose activations do not fit on one GPU it cannot split. Here
`mesh.context` ranks share every row: each holds two of its 2R chunks, zig-zag, so that causal work
is equal (parallel/ring). Norms, MLPs, head and loss see tokens one by one and need no change, for
the loss is a sum and positions come with the tokens. Attention alone looks across, and passes keys
and values from rank to rank while it computes. Weights are whole on every rank; `shard` is data x
context, so gradients are summed and FSDP shards over both.

It changes two sockets: `place` cuts the tokens, and the ring takes the place of `parts.attend`.
What fills that before, as `cudnn_attention`, says by which kernel blocks are computed; else each is
by the fastest that is right for it. It acts at the stage of parts and not at that of the context
split, since the decoder takes its backend from the parts when it is made. The pass is the same for
evaluation, under recomputation and in compiled code, where the ring is one opaque operation.
Documents and windows are exact: blocks that they touch take a mask of one block, made where it is
used and never kept.

Not split: a mixer that is not attention, and a prefix that sees both ways. Beside attention only
what adds up over tokens is exact. A loss that layers keep over whole rows must be made a sum of the
ranks' parts, as the balance loss of a mixture of experts is (model/moe).
Source: arXiv 2310.01889; Llama 3 (arXiv 2407.21783, 3.3.2).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from headrace.assemble.row_parts import AXIS, RowPartTechnique, part_of
from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import RefusalKind, UnsupportedError
from headrace.core.remedy import mend
from headrace.costs.count import FP32
from headrace.costs.cut_rows import cut_rows
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import Attention, Phase, Stream, Work, collective
from headrace.kernels.block_attention import HEAD_MULTIPLE, WIDEST, takes_heads
from headrace.model.adapter import shape_of
from headrace.model.attention import Attend
from headrace.model.mask import MaskSpec, Rows
from headrace.parallel.ring import Ring, RingMask, ring_attention
from headrace.plan.plan import ATTENDS, Plan
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

CHUNKS = 2
"""Pieces of a row that a rank has: one from each end, for equal causal work."""
MERGED = 26
"""Bytes that an output's number costs where a block's is added to it: its fp32 sum is read and
written twice, and the block's read, cast and read."""
ADDED = 12
"""Bytes that a number of a gradient costs in that sum: one fp32 number is added to another."""


class RingAttend:
    """The ring as the decoder's attention backend; it also cuts rows for it.

    Args:
        ring: the ranks.
        asked: the backend whose kernel computes blocks, which may have to be loaded.
    """

    def __init__(self, ring: Ring, asked: Attend | None = None) -> None:
        self.ring, self.asked = ring, asked
        self.whole = self.own = 0
        """Tokens of a row, and those of them that this rank was last given."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> RingMask:
        """Return the mask in the ring's words, with the documents of every rank's tokens."""
        if self.asked is not None:
            self._check_plain(spec.within(length * self.ring.ranks))
            self.asked.prepare(MaskSpec(), rows, length)  # which loads what is to be loaded
        if spec.prefix:
            raise UnsupportedError(
                "context_parallel has no mask for a prefix that sees both ways",
                mend("-context_parallel", "mesh.context=1"),
            )
        documents = rows.segments_BT if spec.document else None
        segments = None if documents is None else self.ring.gather(documents)
        return RingMask(spec.causal, spec.window, segments)

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Return attention of this rank's queries over whole rows."""
        assert isinstance(mask, RingMask)
        return ring_attention(self.ring, q_BTHK, k_BTGK, v_BTGK, mask)

    def _check_plain(self, spec: MaskSpec) -> None:
        """Raise UnsupportedError where the kernel that was asked for would need a mask."""
        if not spec.is_plain_causal:
            owner = type(self.asked).__module__.rpartition(".")[2]
            raise UnsupportedError(
                f"{owner} has no kernel for a block of a ring with a mask, and rows have {spec}",
                mend(f"-{owner}"),
            )

    @property
    def launched(self) -> set[str]:
        """Return the kernels that computed blocks so far."""
        return self.ring.launched

    def part(self, work: MicroBatch) -> MicroBatch:
        """Return this rank's tokens of a micro-batch.

        Raises:
            ConfigError: rows do not divide into two chunks for each rank.
        """
        cut = part_of(work, self.ring.ranks, CHUNKS, self.ring.cut)
        self.whole, self.own = work.ids_BT.size(1), cut.ids_BT.size(1)
        return cut


class ContextParallel(RowPartTechnique):
    """Give every rank a part of each row, and let keys and values go round a ring."""

    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("place",)
    composes: ClassVar[tuple[str, ...]] = (ATTENDS,)
    chunks: ClassVar[int] = CHUNKS
    card: ClassVar[Card] = Card(
        buys="activations and logits of a rank divided by mesh.context, and the time of a row "
        "with them (derived)",
        costs="2 (R - 1) / R of a row's keys and values on the wire per layer forward, three times "
        "that and more backward, hidden where rows are long (derived)",
        helps="rows too long for one GPU's memory, or batches of fewer rows than GPUs",
        hurts="short rows: blocks are small and their transfer is not hidden; with rows enough, "
        "data parallelism sends less",
        source="arXiv 2310.01889; arXiv 2311.09431; arXiv 2407.21783, section 3.3.2",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require rows that divide, and attention whose results over blocks of keys merge."""
        answer, model = super().supports(context), shape_of(context.plan.model)
        if isinstance(answer, Supported) and model.attention_cap:
            return Unsupported(
                f"model.attention_cap = {model.attention_cap:g}, and the ring of mesh.context = "
                f"{context.plan.mesh.context} ranks has no cap",
                context.whole(AXIS),
                RefusalKind.COMBINATION,
            )
        for name, other in context.plan.techniques.items():
            if isinstance(answer, Unsupported) or ATTENDS not in other.claims:
                continue
            if why := _not_in_blocks(name, other, context.plan):
                return Unsupported(why, mend(f"-{name}"), RefusalKind.COMBINATION)
        return answer

    def predict(self, ledger: Ledger) -> Ledger:
        """Count a rank's share of what is kept per token, one block's mask, and what travels."""
        ledger = cut_rows(ledger, _part)
        sizes, left = ledger.sizes, 1 / ledger.sizes["context_ranks"]
        # Keys, values and their fp32 gradients, each here and on the way, beside fp32 queries'.
        keys = 2 * sizes["kv_heads"] * (sizes["activation_bytes"] + FP32)
        ring = (2 * keys + FP32 * sizes["heads"]) * sizes["head_dim"] * sizes["tokens"]
        ledger = ledger.scaled(lambda name: name == "mask", left**2)
        ledger = ledger.without(n for n in ledger.memory if n.endswith("/mask_copy"))
        sizes = {**sizes, "mask": sizes["mask"] * left**2, "mask_copy": 0.0}
        ledger = ledger.with_line("ring", Line(ring, ("backward",)))
        return replace(ledger, sizes=sizes, work={**ledger.work, **_round(ledger.work, sizes)})

    def apply(self, build: Build) -> None:
        """Put the ring in the place of the backend, and cut what the baseline places."""
        asked = next((t.blocks for t in build.techniques if ATTENDS in t.claims), None)
        kernel: Any = asked
        backend = None if asked is None else build.parts.attend
        attend = RingAttend(Ring(build.world.group(AXIS), kernel), backend)
        build.parts.attend = attend
        build.notes[self.name()] = attend
        whole = build.place
        build.place = lambda build, micro: attend.part(whole(build, micro))

    def active(self, build: Build) -> Evidence:
        """Report the tokens that this rank held of a row, and what it sent to the next one."""
        attend: RingAttend = build.notes[self.name()]
        ring, sent = attend.ring, attend.ring.traffic
        split = 0 < attend.own * ring.ranks == attend.whole
        return Evidence(
            active=split and sent.calls > 0 and sent.bytes_sent > 0,
            detail=f"held {attend.own} of {attend.whole} tokens of each row, sent "
            f"{sent.bytes_sent:,} bytes round {ring.ranks} ranks in {sent.calls} calls",
            numbers={"tokens_held": attend.own, "tokens_of_a_row": attend.whole, **vars(sent)},
        )


def _not_in_blocks(name: str, technique: Technique[Any], plan: Plan) -> str:
    """Return why a technique's attention cannot be computed in blocks; "" where it can."""
    if not technique.blocks:
        return f"{name} computes attention over whole rows, and a ring has blocks of their keys"
    model = shape_of(plan.model)
    masks = [n for n, other in plan.techniques.items() if "mask" in other.composes]
    if 0 < model.window < plan.data.sequence_length:
        masks.append(f"model.window = {model.window}")
    if masks:
        return f"{masks[0]} needs a mask, and {name} has no kernel for a block with one"
    if not takes_heads(technique.blocks, model.resolved_head_dim):
        return (
            f"{name} computes blocks of heads of multiples of {HEAD_MULTIPLE} features up to "
            f"{WIDEST[technique.blocks]}, and these have {model.resolved_head_dim}"
        )
    return ""


def _part(piece: Attention, ranks: int) -> Attention:
    """Return attention of a rank's queries with its own keys."""
    rows, heads, kv_heads, length, features = piece.sizes
    part = (rows, heads, kv_heads, length // ranks, features)
    return replace(piece, sizes=part, reach=ranks)


def _round(work: Mapping[str, Work], sizes: Mapping[str, float]) -> dict[str, Work]:
    """Return what goes round the ring, attention over others' keys, and what joins the results.

    Of another's keys half are seen, or by half of the queries. Left out: indices of documents.
    """
    layers, others = sizes["layers"], sizes["context_ranks"] - 1
    numbers = 2 * sizes["tokens"] * sizes["kv_heads"] * sizes["head_dim"]  # of keys and values
    queries = sizes["tokens"] * sizes["heads"] * sizes["head_dim"]
    blocks = 1 + others / 2
    joined: dict[Phase, float] = {
        "forward": MERGED * queries * blocks,
        "backward": ADDED * (queries + numbers) * blocks,
    }
    pieces: dict[str, Work] = {
        f"attention/joined_{phase}": Stream(phase, layers, bytes, 2 * (1 + others))
        for phase, bytes in joined.items()
    }
    for name, piece in work.items():
        if isinstance(piece, Attention):
            pieces[f"{name}/others"] = replace(piece, count=piece.count * others / 2, causal=False)
    keys, gradients = sizes["activation_bytes"] * numbers, FP32 * numbers
    sends: dict[str, tuple[Phase, float, float]] = {
        "keys_forward": ("forward", keys, others),
        "keys_backward": ("backward", keys, others),
        "gradients": ("backward", gradients, others),
        "home": ("backward", gradients, 1.0),  # the last passes, beside which nothing runs
    }
    for name, (phase, bytes, times) in sends.items():
        pieces[f"attention/{name}"] = collective(
            sizes,
            AXIS,
            phase,
            "send",
            bytes,
            layers * times,
            beside="" if name == "home" else "attention",
        )
    return pieces
