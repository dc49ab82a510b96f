"""Cut the rows of a step into shares of `mesh.context` ranks, with their memory and work."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger
from headrace.costs.links import COMMUNICATORS
from headrace.costs.work import Attention, Matmul, Phase, Stream, Work

WEIGHT_LINES = ("weight_cast", "mask_copy")
"""Lines of a block that do not grow with its tokens, or that are a mask's."""
WEIGHT_WORK = (
    "weight_cast",
    "head_cast",
    "experts_read",
    "experts_stacked",
    "gradients",
    "clip",
    "update",
    "reduce",
    "count",
)
"""How the names of pieces of work begin that do not grow with a block's tokens."""
KEPT = (
    *("final_norm", "rotation", "work", "values"),
    *("embedding_norm", "embedding_smear", "pairs"),
)
"""Lines outside of blocks that grow with tokens."""
READS_BEFORE = ("embedding_pairs", "embedding_smear")
"""How the names of pieces begin that read the token before: a rank embeds two tokens more for each
piece of a row, and leaves them out in a copy."""


def cut_rows(ledger: Ledger, attention: Callable[[Attention, int], Attention]) -> Ledger:
    """Return the ledger of a rank that has its share of the tokens of every row.

    Masks stay as they are, and are the caller's.

    Args:
        ledger: of whole rows.
        attention: (attention over whole rows, ranks) -> what a rank computes of it.
    """
    sizes = dict(ledger.sizes)
    ranks, tokens = int(sizes["context_ranks"]), sizes["tokens"]
    left = 1 / ranks
    ledger = ledger.scaled(
        lambda name: name in KEPT or ("/" in name and name.split("/")[1] not in WEIGHT_LINES),
        left,
    )
    if logits := ledger.memory.get("logits"):
        share = logits.bytes * left
        if "loss_forward" in sizes:  # one chunk's, which may stay so
            share = min(logits.bytes, tokens * left * sizes["logits_per_token"])
        ledger = ledger.with_line("logits", replace(logits, bytes=share))
    hidden = sizes["activation_bytes"] if sizes["on_gpu"] else FP32
    gone = hidden * sizes["dim"] * tokens * (1 - left)  # of the hidden states' gradient
    if head := ledger.memory.get("head_gradients"):
        ledger = ledger.with_line("head_gradients", replace(head, bytes=head.bytes - gone))
    sizes |= {n: sizes[n] * left for n in ("tokens", "residual", "logits_fused")}
    sizes["head_gradients"] -= gone
    sizes[COMMUNICATORS] = sizes.get(COMMUNICATORS, 0.0) + 1
    tables = _table_bytes(sizes)
    work = {
        name: attention(piece, ranks)
        if isinstance(piece, Attention)
        else _part(name, piece, tokens, ranks, tables.get(name, 0.0))
        for name, piece in ledger.work.items()
    }
    return replace(ledger, sizes=sizes, work=work | _without_leads(work, sizes))


def _table_bytes(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes of each table's gradient, by the piece that makes it."""
    values = sizes["kv_heads"] * sizes["head_dim"] * sizes["vocab"]
    return {
        "embedding/backward": FP32 * sizes["embedding"],
        "embedding_values/backward": FP32 * values,
        "embedding_pairs/backward": FP32 * sizes["pairs"],
    }


def _without_leads(work: Mapping[str, Work], sizes: Mapping[str, float]) -> dict[str, Work]:
    """Return the copies that leave out what was embedded for the token before alone.

    Backward that is zeros, and the gradient between them.
    """
    features = FP32 * sizes["tokens"] * sizes["dim"]
    passes: dict[Phase, int] = {"forward": 2, "backward": 3}
    copies: dict[str, Work] = {}
    for phase, moved in passes.items():
        pieces = (work.get(f"{name}/{phase}") for name in READS_BEFORE)
        if any(piece is not None and piece.count for piece in pieces):
            copies[f"embedding_leads/{phase}"] = Stream(phase, 1, moved * features, moved - 1)
    return copies


def _part(name: str, piece: Work, tokens: float, ranks: int, table: float) -> Work:
    """Cut a piece of whole rows, of so many tokens, to a rank's tokens of them.

    `table` is the bytes of it that are a table's, and stay.
    """
    left, what = 1 / ranks, name.partition("/")[0]
    if isinstance(piece, Matmul):
        place = 2 if name.endswith("/weight") else 0
        ends = list(piece.sizes)
        if what.startswith("experts."):  # their rows are choices
            ends[place] = ceil(ends[place] * left)
        else:
            ends[place] = min(ends[place], int(tokens * left))  # fewer chunks, if it was one
        count = piece.count * left * piece.sizes[place] / ends[place]
        return replace(piece, count=count, sizes=tuple(ends))
    if name == "head/sum":  # of the output matrix's gradient, once a chunk
        return replace(piece, count=max(1.0, piece.count * left))
    if not isinstance(piece, Stream) or what in WEIGHT_WORK:
        return piece
    fused = None if piece.fused is None else piece.fused * left
    return replace(piece, bytes=table + (piece.bytes - table) * left, fused=fused)
