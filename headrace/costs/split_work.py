"""Price a step's pieces on a rank that holds a part of every matrix, and what it sends.

Matmuls are cut along their output where a matrix is cut by rows and along their sum where it is by
columns; work inside of attention and MLP is divided with them. What stands between is whole, or cut
along the sequence. A piece that other techniques made of a linear, and that is not known here, has
no time.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from headrace.costs.adapters import TRAINED
from headrace.costs.count import FP32
from headrace.costs.decoder_work import LEARNED
from headrace.costs.ledger import Ledger
from headrace.costs.links import CollectiveOperation
from headrace.costs.split_adapters import (
    PREFIX,
    partial_bytes,
    split_adapter,
    summed_lengths,
    unreached,
)
from headrace.costs.work import Attention, Collective, Matmul, Phase, Stream, Work, collective

AXIS = "tensor"
COLUMNS = ("mixer.qkv", "mlp.gate_up", "mlp.up", "experts.gate_up", "experts.up", "head")
"""Linears of which a rank computes some of the outputs."""
ROWS = ("mixer.out", "mlp.down", "experts.down")
"""Linears of which a rank has some of the inputs, and of all outputs a part of the sum."""
INSIDE = (
    "attention",
    "rope",
    "qk_norm",
    "queries",
    "value",
    "embedding_values",
    "activation",
    "weight_cast",
    "whole_weight",
    "experts_read",
    "experts_stacked",
    "head_cast",
    "loss",
)
"""Pieces that a rank has a part of, by how their names begin."""
BETWEEN = ("norms", "residual", "residual_out", "stream")
"""Pieces of the stream, which may be cut along the sequence."""
ROUTED = ("router", "order", "routed", "mixed", "unsorted", "experts", "experts_joined")
"""Pieces of a mixture of experts that go by whole rows."""
WHOLE = (
    "embedding",
    "embedding_leads",
    "embedding_norm",
    "embedding_pairs",
    "embedding_smear",
    "mlp_pieces",
    "count",
    "head",
    *ROUTED,
)
"""Pieces that every rank has whole, apart from the exceptions in `_part`."""
OF_EXPERTS = ("experts/gradients", "experts/copy")
"""Pieces that sum the gradients of experts, all of which are cut."""
CUT_TABLES = {"embedding/backward": "embedding", "embedding_pairs/backward": "pairs"}
"""Piece that makes the gradient of a table that is cut by rows -> the size that counts its
numbers."""
RESULT, INPUT, WEIGHT = (1, 2), (2, 1), (0, 1)
"""Place of the size of a linear's matmul that is cut: (where its outputs are cut, where its inputs
are), for its result, for the gradient of what it reads, and for its weight's."""
CUTS = {
    "result": RESULT,
    "again": RESULT,
    "last": RESULT,
    "earlier": RESULT,
    "input": INPUT,
    "weight": WEIGHT,
}
"""End of a matmul's name -> which of these it is."""
LAST = "mlp.down/{}/last"
"""Pattern of the names of pieces that end a block: a block that is run again runs without them."""


def split_work(
    ledger: Ledger, *, sequence: bool, kept: float, asynchronous: bool = False
) -> dict[str, Work]:
    """Return the pieces of one rank.

    Args:
        ledger: before anything of it is cut.
        sequence: the stream between the parts is cut along the sequence.
        kept: share of all parameters that a rank has.
        asynchronous: matmuls go on while parts of their inputs and results are sent.
    """
    work = {n: _part(n, piece, ledger.sizes, sequence, kept) for n, piece in ledger.work.items()}
    sends = _sends(ledger, sequence)
    if asynchronous:
        for name, piece in sends.items():
            around = name.startswith("parts/") or name == LAST.format("scatter")
            if around and isinstance(piece, Collective):
                sends[name] = replace(piece, beside="blocks")
    return work | sends


def _part(name: str, piece: Work, sizes: Mapping[str, float], sequence: bool, kept: float) -> Work:
    """Return a rank's part of a piece."""
    ranks, (what, _, part) = int(sizes[f"{AXIS}_ranks"]), name.partition("/")
    if isinstance(piece, Matmul) and what in COLUMNS + ROWS and part in CUTS:
        ends, place = list(piece.sizes), CUTS[part][what in ROWS]
        ends[place] //= ranks
        return replace(piece, sizes=tuple(ends))
    if part.startswith(PREFIX) and what in COLUMNS + ROWS:
        return split_adapter(what, part, piece, ranks) or _unknown(name, piece)
    if isinstance(piece, Attention):
        rows, heads, kv_heads, length, features = piece.sizes
        return replace(piece, sizes=(rows, heads // ranks, kv_heads // ranks, length, features))
    if name.startswith(LEARNED):
        return piece.with_bytes(lambda bytes: bytes * kept)
    if name in OF_EXPERTS:
        return piece.divided(ranks)
    if what in INSIDE or part == "sum" or (sequence and what in BETWEEN):
        return piece.divided(ranks)
    if name in CUT_TABLES:
        gone = FP32 * sizes[CUT_TABLES[name]] * (1 - 1 / ranks)
        return piece.with_bytes(lambda bytes: bytes - gone)
    if what in BETWEEN + WHOLE:
        return piece
    return _unknown(name, piece)


def _unknown(name: str, piece: Work) -> Work:
    """Return a piece that has no time, with the reason."""
    return replace(piece, unknown=f"what {name} takes on a rank with a part of it was not counted")


def _sends(ledger: Ledger, sequence: bool) -> dict[str, Work]:
    """Return the collectives around attention and MLP, at both ends, and of gradients.

    What the loss of a token needs is sent as the baseline's objective does. Left out: what pads a
    row whose tokens do not divide.
    """
    sizes, pieces = ledger.sizes, dict[str, Work]()
    tokens = sizes["tokens"]
    stream = sizes["activation_bytes"] * tokens * sizes["dim"]
    layers, fewer = sizes["layers"], unreached(sizes)

    def add(
        name: str, phase: Phase, operation: CollectiveOperation, bytes: float, count: float = 1.0
    ) -> None:
        count -= fewer.get(name, 0.0)
        if not count:
            return
        pieces[name] = collective(sizes, AXIS, phase, operation, bytes, count)
        if operation != "all_reduce":  # ranks' tokens are joined, or cut, in a copy
            pieces[name.replace("/", "/copy_", 1)] = Stream(phase, count, 2 * bytes)

    entered = FP32 * tokens * sizes["dim"]
    add("embedding/sum", "forward", "all_reduce", entered)
    if sizes["pairs"]:
        add("embedding_pairs/sum", "forward", "all_reduce", entered)
    if sequence:
        gathered = sizes["stream_bytes"] / sizes["activation_bytes"] * stream
        add("parts/gather", "forward", "all_gather", stream, 2 * layers)
        add("parts/scatter", "forward", "reduce_scatter", stream, layers)
        add(LAST.format("scatter"), "forward", "reduce_scatter", stream, layers)
        add("parts/gather_back", "backward", "all_gather", stream, 2 * layers)
        add("parts/scatter_back", "backward", "reduce_scatter", stream, 2 * layers)
        if not fewer:
            add("embedding/gather_back", "backward", "all_gather", gathered)
        add("head/gather", "forward", "all_gather", stream)
        add("head/scatter_back", "backward", "reduce_scatter", stream)
    else:
        add("parts/sum", "forward", "all_reduce", stream, layers)
        add(LAST.format("sum"), "forward", "all_reduce", stream, layers)
        add("parts/sum_back", "backward", "all_reduce", stream, 2 * layers)
        add("head/sum_back", "backward", "all_reduce", stream)
    loss = ledger.work.get("loss/forward")
    chunks = 1 if loss is None else ceil(loss.count)
    add("loss/largest", "forward", "all_reduce", FP32 * tokens / chunks, chunks)
    sums = 3 if has_kernels(ledger.sizes) else 2
    add("loss/sums", "forward", "all_reduce", sums * FP32 * tokens / chunks, chunks)
    for name, phase, bytes, count in summed_lengths(ledger):
        add(name, phase, "all_reduce", bytes, count)
    if TRAINED in sizes:
        add("adapters/gradients", "optimizer", "all_reduce", partial_bytes(sizes))
    elif gradients := _partial(ledger, sequence):
        add("norms/gradients", "optimizer", "all_reduce", gradients)
    return pieces


def split_head(ledger: Ledger, ranks: float) -> Ledger:
    """Return the ledger of one of `ranks` with its share of the head's gradients and logits.

    Reduced in parts, logits are held once less (model/sharded_vocabulary), and a chunk's gradient,
    which is written over its probabilities, is no third tensor of fp32. Kernels hold nothing beside
    the logits.
    """
    sizes, kernels = dict(ledger.sizes), has_kernels(ledger.sizes)
    if "logits" in ledger.memory and "logits_per_token" in sizes and not kernels:
        leaf, one = sizes.get("logits_leaf", 0.0), FP32 * sizes["vocab"]
        less = one * (2 if leaf >= one and not sizes["capped"] else 1)
        bytes_per_token = sizes["logits_per_token"] + leaf
        ledger = ledger.scaled(lambda name: name == "logits", 1 - less / bytes_per_token)
        sizes["logits_per_token"] -= less
    stored = sizes["activation_bytes"] if kernels else FP32
    gone = stored * sizes["embedding"] * (1 - 1 / ranks)
    if head := ledger.memory.get("head_gradients"):
        ledger = ledger.with_line("head_gradients", replace(head, bytes=head.bytes - gone))
    sizes["head_gradients"] -= gone
    return replace(ledger, sizes=sizes)


def has_kernels(sizes: Mapping[str, float]) -> bool:
    """Return whether kernels compute the loss of a share of the vocabulary.

    Those of chunks are for whole vocabularies.
    """
    return bool(sizes.get("loss_by_kernels")) and "logits_leaf" not in sizes


def _partial(ledger: Ledger, sequence: bool) -> float:
    """Return the bytes of gradients of which a rank has a part of the sum.

    The rank saw its tokens, or its heads.
    """
    sizes = ledger.sizes
    vectors = FP32 * (sizes["unsplit"] - sizes["entering"])
    if not sequence:
        normed = any(name.endswith("/qk_norm") for name in ledger.memory)
        vectors = 2 * FP32 * sizes["layers"] * sizes["head_dim"] * normed
    learned = ledger.memory["gradients"].bytes
    learned -= FP32 * sum(matrix.numbers for matrix in ledger.updates().values())
    return max(0.0, min(vectors, learned))
