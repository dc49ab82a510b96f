"""What a step of linear attention computes: FLOPs of its chunks and states, and what they move.

Chunks of 64 tokens and heads of 64 features make products so small that memory decides, and so
they are priced: by the bytes that eager torch reads and writes operation by operation in the
forward pass, counted in kernels/linear_attention.py, kernels/gated_delta.py and the mixer around
them. How long those take is from steps, and so is what a compiler and other kernels leave of them.

Foreseen over measured steps of the twelve rows of techniques.jsonl, trunks and recipes of 160m and
1b: of a sum 1.01 to 1.04, of the gated delta rule 1.01 to 1.04, by fla 1.01 to 1.02; the same plans
with attention are 1.00 to 1.03. All have chunks of 64 and heads of 64; others go by their bytes.

Shapes: N tokens, G heads of keys, H of queries, K features of a head, C tokens of a chunk, Z chunks
of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.work import CUSTOM, UNFUSED, Phase, Work

Rule = Literal["sum", "gated_delta"]
Kernels = Literal["torch", "fla"]


@dataclass(frozen=True)
class Moved:
    """What the forward pass of one rule reads and writes, bytes of so many numbers.

    Args:
        queries, keys: of N x H x K and of N x G x K.
        scores, weights: of N x H x C and of N x G x C.
        states: of Z x G x K x K in each row.
        steps: likewise, where one state is made of the last.
        kernels: of which that is made, forward and backward, beside the products.
        products: likewise.
        fused: of its time, what a compiler leaves.
    """

    queries: float
    keys: float
    scores: float
    weights: float
    states: float
    steps: float
    kernels: tuple[int, int]
    products: tuple[int, int]
    fused: float


RULES: Mapping[Rule, Moved] = {
    "sum": Moved(58, 28, 16, 32, 16, 0, (30, 65), (5, 10), 0.26),
    "gated_delta": Moved(92, 180, 16, 60, 40, 24, (48, 100), (7, 16), 0.46),
}
"""Counted, but for the last, which is from recipes of 160m and 1b (techniques.jsonl). A solve and
products in fp32 are no part of what a compiler fuses."""
BACK = 2.3
"""Bytes of the backward pass for each of the forward pass: a product's gradient is two products, a
running sum's is a sum between two turns. Assumed; the next one is fitted with it."""
LOOSE = 1.92
"""Times as long as their bytes that eager streams take: chunks are rows of 64 numbers, and the
running sums go down their columns. From trunks of 160m and 1b, both rules (techniques.jsonl)."""
OUTSIDE = (32.0, 44.0, 8.0)
"""Around fla's kernels, as `queries` and `keys` count: copies, keys of unit length, the norm of
what is read; and for each query's head a copy of the keys' and values where they are shared."""
OUTSIDE_BACK = 1.7
"""Likewise backward, from what trunks took more than recipes, whose compiler leaves nothing of them
(160m and 1b, techniques.jsonl)."""
FLA, FLA_KERNELS = (91.0, 182.0), (7, 12)
"""Bytes of N x H x K that fla's kernels of the gated delta rule take as long as, and how many they
are: 280 in both passes at 160m and 271 at 1b (recipes, techniques.jsonl), split as products are."""


def chunk_flops(
    sizes: Mapping[str, float], rule: Rule, kernels: Kernels, chunk: int
) -> tuple[float, float]:
    """FLOPs per token of one layer's chunks and states, forward and backward.

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


def chunked(ledger: Ledger, rule: Rule, kernels: Kernels, chunk: int) -> Ledger:
    """The ledger's work with chunks and states in the place of every layer's attention.

    Args:
        ledger: before.
        rule: what a token writes.
        kernels: who computes it.
        chunk: tokens of a chunk.
    """
    work = {
        name: piece for name, piece in ledger.work.items()
        if piece.kind != "attention" and not name.startswith("queries/")
    }  # fmt: skip
    parts = _products(ledger, rule)
    parts |= _streams(ledger.sizes, rule, chunk) if kernels == "torch" else (
        _fla(ledger.sizes, rule)
    )  # fmt: skip
    work |= {f"attention/{name}": piece for name, piece in parts.items()}
    return replace(ledger, work=work, sizes={**ledger.sizes, DERIVED: 1.0})


def _products(ledger: Ledger, rule: Rule) -> dict[str, Work]:
    """The projections of all gates of a layer, as one."""
    sizes = ledger.sizes
    precision = next((p.precision for p in ledger.work.values() if p.kind == "product"), "bf16")
    tokens, dim = int(sizes["tokens"]), int(sizes["dim"])
    outer = int(sizes["kv_heads"]) * (1 + (rule == "gated_delta"))
    shapes: dict[str, tuple[Phase, tuple[int, int, int]]] = {
        "gates_result": ("forward", (tokens, outer, dim)),
        "gates_input": ("backward", (tokens, dim, outer)),
        "gates_weight": ("backward", (outer, dim, tokens)),
    }
    return {
        name: Work(phase, "product", sizes["layers"], sizes=shape, precision=precision)
        for name, (phase, shape) in shapes.items()
    }


def _streams(sizes: Mapping[str, float], rule: Rule, chunk: int) -> dict[str, Work]:
    """By torch's operations."""
    moved, layers = RULES[rule], sizes["layers"]
    G, K, H, T = (sizes[n] for n in ("kv_heads", "head_dim", "heads", "length"))
    chunks = ceil(T / chunk)
    padded = sizes["rows"] * chunks * chunk
    state = sizes["rows"] * chunks * G * K * K
    bytes = padded * (
        K * (H * moved.queries + G * moved.keys) + chunk * (H * moved.scores + G * moved.weights)
    )
    bytes += state * moved.states
    found = dict[str, Work]()
    ways: tuple[tuple[Phase, float], ...] = (("forward", 1.0), ("backward", BACK))
    for way, (phase, times) in enumerate(ways):
        found[f"chunks_{phase}"] = Work(
            phase, "stream", layers, times * bytes, moved.kernels[way],
            fused=moved.fused * LOOSE * times * bytes, loose=LOOSE,
        )  # fmt: skip
        # Their bytes are counted; of each there is a launch.
        found[f"products_{phase}"] = Work(phase, "stream", layers, 0.0, moved.products[way])
        if moved.steps:  # a product and a sum for each chunk; backward two products and a sum
            found[f"steps_{phase}"] = Work(
                phase, "stream", layers, times * moved.steps * state, chunks * (2 + way)
            )
    return found


def _fla(sizes: Mapping[str, float], rule: Rule) -> dict[str, Work]:
    """By fla's kernels, and the operations around them."""
    layers, G, K, H = (sizes[n] for n in ("layers", "kv_heads", "head_dim", "heads"))
    why = "" if rule == "gated_delta" else "linear attention's sum by fla's kernels was never timed"
    around = sizes["tokens"] * K * (
        H * (OUTSIDE[0] + OUTSIDE[2] * (H > G)) + G * OUTSIDE[1]
    )  # fmt: skip
    found = dict[str, Work]()
    ways: tuple[tuple[Phase, float], ...] = (("forward", 1.0), ("backward", OUTSIDE_BACK))
    for way, (phase, times) in enumerate(ways):
        bytes = FLA[way] * sizes["tokens"] * H * K
        found[f"chunks_{phase}"] = Work(
            phase, "stream", layers, bytes, FLA_KERNELS[way], launch=CUSTOM, unknown=why
        )
        found[f"around_{phase}"] = Work(
            phase, "stream", layers, times * around, 20 * (1 + way), fused=0.0, loose=UNFUSED
        )
    return found
