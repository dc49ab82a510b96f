"""Price a step of linear attention: FLOPs of its chunks and states, and the bytes that they move.

Chunks of 64 tokens and heads of 64 features make matmuls so small that memory decides, so they are
priced by the bytes that eager torch reads and writes operation by operation in the forward pass,
counted in kernels/linear_attention.py, kernels/gated_delta.py and the mixer around them. How long
those take is from steps, and so is what a compiler and other kernels leave of them.

Predicted over measured steps of the twelve rows of techniques.jsonl, baselines and recipes of 160m
and 1b: of a sum 1.01 to 1.04, of the gated delta rule 1.01 to 1.04, by fla 1.01 to 1.02; the same
plans with attention are 1.00 to 1.03. All have chunks of 64 and heads of 64; others go by their
bytes.

Shapes: N tokens, G heads of keys, H of queries, K features of a head, C tokens of a chunk, Z chunks
of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from headrace.costs.constants import number, numbers
from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.work import CUSTOM, UNFUSED, Attention, Matmul, Phase, Stream, Work

ChunkRule = Literal["sum", "gated_delta"]
Kernels = Literal["torch", "fla"]


@dataclass(frozen=True)
class RuleTraffic:
    """Hold how many bytes the forward pass of one rule moves, per number of each tensor.

    Args:
        queries, keys: of N x H x K and of N x G x K.
        scores, weights: of N x H x C and of N x G x C.
        states: of Z x G x K x K in each row.
        steps: of the same size, where one state is made of the last.
        kernels: how many kernels, forward and backward, it takes beside the matmuls.
        matmuls: how many matmuls it takes, forward and backward.
        fused: share of its time that a compiler leaves.
    """

    queries: float
    keys: float
    scores: float
    weights: float
    states: float
    steps: float
    kernels: tuple[int, int]
    matmuls: tuple[int, int]
    fused: float


RULES: Mapping[ChunkRule, RuleTraffic] = {
    "sum": RuleTraffic(58, 28, 16, 32, 16, 0, (30, 65), (5, 10), number("chunk_sum_fused")),
    "gated_delta": RuleTraffic(
        92, 180, 16, 60, 40, 24, (48, 100), (7, 16), number("chunk_gated_delta_fused")
    ),
}
"""Rule -> its traffic, counted in the source of its kernels, but for `fused`."""
BACK, LOOSE = number("chunk_backward"), number("chunk_stream")
OUTSIDE, OUTSIDE_BACK = numbers("fla_around"), number("fla_around_backward")
FLA, FLA_KERNELS = numbers("fla_kernel"), (7, 12)
"""Bytes of N x H x K that fla's kernels of the gated delta rule take as long as, forward and
backward; and how many kernels they are."""


def chunk_flops(
    sizes: Mapping[str, float], rule: ChunkRule, kernels: Kernels, chunk: int
) -> tuple[float, float]:
    """Return the FLOPs per token of one layer's chunks and states, forward and backward.

    Args:
        sizes: of a ledger.
        rule: what a token writes.
        kernels: who computes it.
        chunk: tokens of a chunk.
    """
    G, K, H, T = (sizes[n] for n in ("kv_heads", "head_dim", "heads", "length"))
    C, Z = chunk, ceil(T / chunk)
    G = G if kernels == "torch" else H  # fla's heads come one for each query
    if rule == "sum":
        inside = 4 * C * H * K + 2 * (G + H) * K * K
        between = 2 * (Z + 1) ** 2 * G * K * K / T if kernels == "torch" else 0.0
        forward = inside * Z * C / T + between
        return forward, 2 * forward
    near, solve = Z * C * (2 * C * G * K + 4 * C * H * K), Z * C * 2 * C * G * K
    writes, reads = Z * C * 4 * G * K * K, Z * C * 2 * (G + H) * K * K
    move = 2 * G * K**3  # of one chunk to the next
    # The first state is nothing, so it has no gradient, and nothing reads the last one. A
    # solve's gradient is another solve and a product of twice its work.
    back = 2 * near + 3 * solve
    back += 2 * (writes + reads) + (2 * Z - 3) * move if Z > 1 else reads
    return (near + solve + writes + reads + Z * move) / T, back / T


def chunked(ledger: Ledger, rule: ChunkRule, kernels: Kernels, chunk: int) -> Ledger:
    """Return the ledger's work with chunks and states in the place of every layer's attention.

    Args:
        ledger: before.
        rule: what a token writes.
        kernels: who computes it.
        chunk: tokens of a chunk.
    """
    work = {
        name: piece
        for name, piece in ledger.work.items()
        if not isinstance(piece, Attention) and not name.startswith("queries/")
    }
    parts = _matmuls(ledger, rule)
    parts |= (
        _streams(ledger.sizes, rule, chunk) if kernels == "torch" else (_fla(ledger.sizes, rule))
    )
    work |= {f"attention/{name}": piece for name, piece in parts.items()}
    return replace(ledger, work=work, sizes={**ledger.sizes, DERIVED: 1.0})


def _matmuls(ledger: Ledger, rule: ChunkRule) -> dict[str, Work]:
    """Return the matmuls of all gates of a layer, as one."""
    sizes = ledger.sizes
    precision = next((p.precision for p in ledger.work.values() if isinstance(p, Matmul)), "bf16")
    tokens, dim = int(sizes["tokens"]), int(sizes["dim"])
    outer = int(sizes["kv_heads"]) * (1 + (rule == "gated_delta"))
    shapes: dict[str, tuple[Phase, tuple[int, int, int]]] = {
        "gates_result": ("forward", (tokens, outer, dim)),
        "gates_input": ("backward", (tokens, dim, outer)),
        "gates_weight": ("backward", (outer, dim, tokens)),
    }
    return {
        name: Matmul(phase, sizes["layers"], shape, precision)
        for name, (phase, shape) in shapes.items()
    }


def _streams(sizes: Mapping[str, float], rule: ChunkRule, chunk: int) -> dict[str, Work]:
    """Return the streams of chunks by torch's operations."""
    moved, layers = RULES[rule], sizes["layers"]
    G, K, H, T = (sizes[n] for n in ("kv_heads", "head_dim", "heads", "length"))
    chunks = ceil(T / chunk)
    padded = sizes["rows"] * chunks * chunk
    state = sizes["rows"] * chunks * G * K * K
    bytes = padded * (
        K * (H * moved.queries + G * moved.keys) + chunk * (H * moved.scores + G * moved.weights)
    )
    bytes += state * moved.states
    streams = dict[str, Work]()
    passes: tuple[tuple[Phase, float], ...] = (("forward", 1.0), ("backward", BACK))
    for index, (phase, times) in enumerate(passes):
        streams[f"chunks_{phase}"] = Stream(
            phase,
            layers,
            times * bytes,
            moved.kernels[index],
            fused=moved.fused * LOOSE * times * bytes,
            loose=LOOSE,
        )
        # Their bytes are counted; of each there is a launch.
        streams[f"products_{phase}"] = Stream(phase, layers, 0.0, moved.matmuls[index])
        if moved.steps:  # a product and a sum for each chunk; backward two products and a sum
            streams[f"steps_{phase}"] = Stream(
                phase, layers, times * moved.steps * state, chunks * (2 + index)
            )
    return streams


def _fla(sizes: Mapping[str, float], rule: ChunkRule) -> dict[str, Work]:
    """Return the streams of chunks by fla's kernels, and of the operations around them."""
    layers, G, K, H = (sizes[n] for n in ("layers", "kv_heads", "head_dim", "heads"))
    why = "" if rule == "gated_delta" else "linear attention's sum by fla's kernels was never timed"
    around = sizes["tokens"] * K * (H * (OUTSIDE[0] + OUTSIDE[2] * (H > G)) + G * OUTSIDE[1])
    streams = dict[str, Work]()
    passes: tuple[tuple[Phase, float], ...] = (("forward", 1.0), ("backward", OUTSIDE_BACK))
    for index, (phase, times) in enumerate(passes):
        bytes = FLA[index] * sizes["tokens"] * H * K
        streams[f"chunks_{phase}"] = Stream(
            phase, layers, bytes, FLA_KERNELS[index], launch=CUSTOM, unknown=why
        )
        streams[f"around_{phase}"] = Stream(
            phase, layers, times * around, 20 * (1 + index), fused=0.0, loose=UNFUSED
        )
    return streams
