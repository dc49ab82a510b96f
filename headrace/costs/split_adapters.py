"""Count what a tensor rank has of adapters: its part of their work, and what it sends for them.

Beside a linear that is cut by outputs a rank has the first matrix whole and its rows of the second;
beside one that is cut by inputs it has its columns of the first matrix and the second whole. The
corrections are summed with the linears' own partial results, so they send nothing themselves. What
is whole has a partial gradient on each rank, and the lengths of rows of which each rank has a part
are summed in every forward pass (model/lora).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from headrace.costs.adapters import (
    BEFORE,
    CUT_RESULTS,
    NORM_RESULTS,
    PIECES,
    ROWS,
    UNSPLIT,
)
from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger
from headrace.costs.work import Matmul, Phase, Work

PREFIX = "adapter_"
"""How the names of adapters' pieces begin after the name of their linear."""
LENGTHS = f"{PREFIX}lengths"
"""The piece that finds how long rows are."""
MATMUL_CUTS: Mapping[str, tuple[int | None, int | None]] = {
    "adapter_down": (None, 2),
    "adapter_up": (1, None),
    "adapter_up_input": (2, None),
    "adapter_up_weight": (0, None),
    "adapter_down_input": (None, 1),
    "adapter_down_weight": (None, 1),
    LENGTHS: (0, 2),
}
"""Matmul -> place of the size that is cut: (where outputs are cut, where inputs are cut); None
where the rank does all of it."""
STREAM_CUTS: Mapping[str, tuple[bool, bool]] = {
    "adapter_forward": (True, False),
    "adapter_backward": (False, True),
    "adapter_read": (True, True),
    "adapter_scaled_forward": (True, False),
    "adapter_scaled_backward": (True, False),
}
"""Stream -> whether it is divided: (where outputs are cut, where inputs are cut)."""


def split_adapter(linear: str, part: str, piece: Work, ranks: int) -> Work | None:
    """Return a rank's part of a piece of an adapter; None where it is not known.

    Args:
        linear: what a block calls the adapted linear.
        part: the rest of the piece's name.
        piece: on a rank that has the whole.
        ranks: that share the linear.
    """
    is_row = linear in ROWS
    if part in MATMUL_CUTS and isinstance(piece, Matmul):
        ends, place = list(piece.sizes), MATMUL_CUTS[part][is_row]
        if place is not None:
            ends[place] //= ranks
        return replace(piece, sizes=tuple(ends))
    if part in STREAM_CUTS:
        return piece.divided(ranks) if STREAM_CUTS[part][is_row] else piece
    return None


def summed_lengths(ledger: Ledger) -> Iterator[tuple[str, Phase, float, float]]:
    """Yield the sums of rows' lengths over ranks: name, phase, bytes of each, and their count.

    An MLP that goes in pieces finds lengths in each of them, and again where the piece runs again.
    """
    sizes = ledger.sizes
    for linear in ROWS:
        if f"{linear}/{LENGTHS}" not in ledger.work:
            continue
        name, bytes = f"{linear}/{LENGTHS}_sum", FP32 * sizes[f"{linear}/out"]
        pieces = sizes.get(PIECES, 0.0) if linear.startswith("mlp.") else 0.0
        yield name, "forward", bytes, sizes["layers"] * max(1.0, pieces)
        if pieces:
            yield f"{name}/again", "recompute", bytes, sizes["layers"] * pieces


def unreached(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return how many of a piece's runs there are fewer, as no gradient enters the first block.

    Nothing learns before the first adapter unless the embedding does.
    """
    parts = sizes.get(BEFORE, 0.0)
    if not parts:
        return {}
    return {
        "mixer.qkv/input": 1.0,
        "parts/scatter_back": parts,
        "parts/sum_back": parts,
        "parts/gather_back": parts - 1,
    }


def split_lines(ledger: Ledger) -> Ledger:
    """Return the ledger with a rank's part of what adapters keep, and of a weight made whole."""
    sizes, ranks = ledger.sizes, ledger.sizes["tensor_ranks"]
    feature = sizes["residual"] / sizes["dim"]
    gone = feature * sizes.get(CUT_RESULTS, 0.0) * (1 - 1 / ranks)
    for name, line in ledger.memory.items():
        if name.endswith("/adapters"):
            ledger = ledger.with_line(name, replace(line, bytes=line.bytes - gone))
    return ledger.scaled(lambda name: name == "whole_weight", 1 / ranks)


def gathered_results(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return how many results of norms are kept whole on a rank, by the end of their line's name.

    A frozen linear keeps none of what it reads, and the loss's caller holds the last one meanwhile.
    """
    return {"norm": sizes.get(NORM_RESULTS, 2.0), "final_norm": 1.0}


def partial_bytes(sizes: Mapping[str, float]) -> float:
    """Return the bytes of adapters' gradients of which a rank has a part of the sum."""
    return FP32 * sizes.get(UNSPLIT, 0.0)
