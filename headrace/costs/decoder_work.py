"""List what one step of the baseline computes, piece by piece: the lines before techniques.

Counted for eager torch on a GPU. Bytes follow the operations that eager torch runs under autocast,
and beside them stands what one fused kernel reads and writes. Small pieces are left out: statistics
of norms, the embedding's lookup, counters.

Shapes: N = rows x length tokens, D features, L layers, Q and G features of queries and of keys, F
hidden features, V entries of the vocabulary, P parameters.
"""

from collections.abc import Mapping
from dataclasses import replace

from headrace.core.model_config import ModelConfig
from headrace.costs.count import FP32, block_linears, linear_parameters, total_parameters
from headrace.costs.ledger import Ledger
from headrace.costs.links import BUCKET_BYTES
from headrace.costs.rates import SCORE_BYTES
from headrace.costs.work import (
    HALVES,
    UNFUSED,
    Attention,
    HostCopy,
    Matmul,
    Phase,
    ScoreMask,
    Stream,
    Work,
    collective,
)

FROZEN = (
    "weight_cast/backward",
    "head_cast/backward",
    "embedding/backward",
    "embedding_values/backward",
    "embedding_pairs/backward",
    "embedding_smear/backward",
    "embedding_leads/backward",
)
"""Pieces that frozen weights do not need, beside their gradients' matmuls and sums."""
LEARNED = ("gradients/", "clip/", "update/", "reduce/")
"""How the names of pieces begin whose bytes are those of trained parameters."""
NARROW = {"bf16": 2, "fp16": 2}
"""precision -> bytes of a number of an activation; 4 in other precisions"""


def baseline_work(
    config: ModelConfig, *, rows: int, length: int, precision: str, micro_batches: float = 1.0
) -> dict[str, Work]:
    """Return pieces by name for one micro-batch, and for the update.

    Args:
        config: the decoder.
        rows: of the micro-batch.
        length: tokens of a row.
        precision: of its matmuls.
        micro_batches: of a step, whose gradients are added up.
    """
    tokens, size = rows * length, NARROW.get(precision, FP32)
    work = _matmuls(config, tokens, precision) | _attention(config, rows, length, precision)
    for name, (count, forward, backward) in _streams(config, tokens, size).items():
        passes: tuple[tuple[Phase, StreamTraffic], ...] = (
            ("forward", forward),
            ("backward", backward),
        )
        for phase, (bytes, kernels, fused) in passes:
            if bytes:
                loose = HALVES if name == "activation" and config.gated else UNFUSED
                work[f"{name}/{phase}"] = Stream(phase, count, bytes, kernels, fused, loose)
    parameters = total_parameters(config)
    if micro_batches > 1:
        share = (micro_batches - 1) / micro_batches
        work["gradients/backward"] = Stream("backward", share, 3 * FP32 * parameters)
    work["clip/optimizer"] = Stream("optimizer", 1, 3 * FP32 * parameters, 2)
    work["update/optimizer"] = Stream("optimizer", 1, 7 * FP32 * parameters)
    return work


def shared_work(config: ModelConfig, sizes: Mapping[str, float]) -> dict[str, Work]:
    """Return what the baseline's ranks send each other in a step.

    They send gradients, in buckets, and three numbers.

    Args:
        config: the decoder.
        sizes: the sizes of a ledger, which hold the ranks of each axis.
    """
    pieces, gradients = {}, FP32 * total_parameters(config)
    for axis, name, bytes in (
        ("shard", "targets", 8),
        ("shard", "loss", FP32),
        ("pipeline", "loss_of_stages", FP32),
        ("world", "norm", FP32),
    ):
        if sizes[f"{axis}_ranks"] > 1:
            pieces[f"count/{name}"] = collective(sizes, axis, "optimizer", "all_reduce", bytes)
    if sizes["shard_ranks"] > 1:
        buckets = -(-gradients // BUCKET_BYTES)
        pieces["reduce/gradients"] = collective(
            sizes, "shard", "optimizer", "all_reduce", gradients, kernels=buckets
        )
        # Into buckets and back out of them.
        pieces["reduce/copy"] = Stream("optimizer", 1, 4 * gradients, 2 * buckets)
    return pieces


def _matmuls(config: ModelConfig, tokens: int, precision: str) -> dict[str, Work]:
    """Return the three matmuls of each linear.

    They make its result, and the gradients of its input and its weight.
    """
    linears = {name: (config.layers, *pair) for name, pair in block_linears(config).items()}
    linears["head"] = (1, config.dim, config.vocab)
    work = {}
    for name, (count, inner, outer) in linears.items():
        shapes: tuple[tuple[str, Phase, tuple[int, int, int]], ...] = (
            ("result", "forward", (tokens, outer, inner)),
            ("input", "backward", (tokens, inner, outer)),
            ("weight", "backward", (outer, inner, tokens)),
        )
        for what, phase, sizes in shapes:
            work[f"{name}/{what}"] = Matmul(phase, count, sizes, precision)
    return work


def _attention(config: ModelConfig, rows: int, length: int, precision: str) -> dict[str, Work]:
    """Return causal attention; in fp32 with the bytes of a score where matmuls make it."""
    sizes = (rows, config.heads, config.resolved_kv_heads, length, config.resolved_head_dim)
    phases: tuple[Phase, ...] = ("forward", "backward")
    work = {f"attention/{p}": Attention(p, config.layers, sizes) for p in phases}
    if precision in NARROW:
        return {**work}
    return {
        name: replace(piece, precision=precision, score_bytes=2 * half, fused=half)
        for (name, piece), half in zip(work.items(), SCORE_BYTES, strict=True)
    }


StreamTraffic = tuple[float, float, float | None]
"""bytes of eager torch, its kernels, and bytes when fused; None where fusing changes nothing"""


def _streams(
    config: ModelConfig, tokens: int, size: int
) -> dict[str, tuple[float, StreamTraffic, StreamTraffic]]:
    """Return what is read and written around the matmuls by name: how many, forward, backward."""
    N, D, L, V = tokens, config.dim, config.layers, config.vocab
    width = config.resolved_head_dim
    Q, G, F = config.heads * width, config.resolved_kv_heads * width, config.resolved_ffn
    x, half = size * N, size != FP32
    cast_bytes = (FP32 + size) * N if half else 0  # a cast between the precisions
    wide = FP32 * N  # norms and rotations run in fp32
    turned = N * (Q + G)
    grouped = 1 < config.resolved_kv_heads < config.heads
    copied = 2 * x * (Q + 2 * G)
    weights = (linear_parameters(config) - D * V) / L
    cast = (FP32 + size) * weights if half else 0.0
    head_cast = (FP32 + size) * D * V if half else 0.0
    rope = 9 * wide / N * turned + 2 * cast_bytes / N * turned
    gates = 2 if config.gated else 1
    cap = int(config.logit_cap > 0)  # a quotient, its tanh and a product; and their gradients
    return {
        "norms": (
            config.norms,
            (2 * cast_bytes * D + 2 * wide * D, 3 if half else 1, 2 * x * D),
            (2 * cast_bytes * D + 3 * wide * D, 4 if half else 2, 3 * x * D),
        ),
        "residual": (L, (3 * x * D, 1, 2 * x * D), (3 * x * D, 1, x * D)),
        "residual_out": (L, (3 * x * D, 1, 2 * x * D), (3 * x * D, 1, x * D)),  # a block's last
        "rope": (
            L if config.position == "rope" else 0,
            (rope, 18, 2 * x * (Q + G)),
            # Turned back, and then joined with the values' gradient: no compiler makes them one.
            (rope + wide / N * turned, 20, 2 * x * (Q + G) + copied),
        ),
        "qk_norm": (
            L if config.qk_norm else 0,
            (2 * (cast_bytes + wide) / N * turned, 6 if half else 2, 2 * x * (Q + G)),
            ((2 * cast_bytes + 3 * wide) / N * turned, 8 if half else 4, 3 * x * (Q + G)),
        ),
        "queries": (L if grouped else 0, (2 * x * Q, 1, 0.0), (copied, 1, 0.0)),
        "activation": (
            L,
            ((3 * gates - 1) * x * F, gates, (gates + 1) * x * F),
            ((6 * gates + 1) * x * F, 2 * gates, 5 * gates * x * F),
        ),
        "weight_cast": (L, (cast, 4, None), (cast, 4, None)),
        "head_cast": (1, (head_cast, 1, None), (head_cast, 1, None)),
        "loss": (
            1,
            (cast_bytes * V + (2 + 6 * cap) * wide * V, 2 + 3 * cap, 3 * x * V),
            (cast_bytes * V + (4 + 7 * cap) * wide * V, 4 + 3 * cap, 3 * x * V),
        ),
        "embedding": (
            1,
            (2 * wide * D + cast_bytes * D, 2, None),
            (FP32 * D * V + wide * D, 2, None),
        ),
    } | _reading_streams(config, x, wide, cast_bytes)


def _reading_streams(
    config: ModelConfig, x: float, wide: float, cast_bytes: float
) -> dict[str, tuple[float, StreamTraffic, StreamTraffic]]:
    """Return what blocks read and write that read the embedding again, and what is added to it.

    Args:
        config: the decoder.
        x: bytes of one feature of all tokens.
        wide: such bytes in fp32.
        cast_bytes: bytes that a cast of one feature between the precisions moves.
    """
    D, V = config.dim, config.vocab
    G = config.resolved_kv_heads * config.resolved_head_dim

    def mixed(count: float, features: int) -> tuple[float, StreamTraffic, StreamTraffic]:
        """Count two products and their sum, and each factor's gradient as a product and a sum."""
        moved = x * features
        return count, (7 * moved, 3, 3 * moved), (15 * moved, 7, 6 * moved)

    return {
        "stream": mixed(config.layers if config.embedding_residual else 0, D),
        "value": mixed(len(config.table_of_layer), G),
        "embedding_norm": (
            int(config.embedding_norm),
            (2 * wide * D, 1, 2 * x * D),
            (3 * wide * D, 2, 3 * x * D),
        ),
        "embedding_values": (
            config.value_embeddings,
            (2 * wide * G + cast_bytes * G, 2, None),
            (FP32 * G * V + wide * G + cast_bytes * G, 2, None),
        ),
        # The row's number, the row and its sum with the token's.
        "embedding_pairs": (
            int(config.bigram_rows > 0),
            (5 * wide * D, 8, None),
            (FP32 * D * config.bigram_rows + wide * D, 2, None),
        ),
        # The tokens before, their share and its sum with the token's; then all their gradients.
        "embedding_smear": (
            int(config.embedding_smear),
            (9 * wide * D, 4, 3 * wide * D),
            (16 * wide * D, 9, 4 * wide * D),
        ),
    }


def stored_in_bf16(
    name: str, piece: Work, *, adds_up: bool, master: bool, widened: float = 1.0
) -> Work | None:
    """Return a piece of work of matrices that are stored in bf16; None where it is left out.

    Casts of weights go, and of gradients that nothing adds up; the update shrinks.

    Args:
        name: of the piece.
        piece: its work where weights are stored in fp32.
        adds_up: a step adds several gradients of one weight.
        master: the update keeps the rest of each weight.
        widened: share of the gradients that are made fp32 before they are added up.
    """
    if name in ("weight_cast/forward", "weight_cast/forward/again", "head_cast/forward"):
        return None
    if name in ("weight_cast/backward", "head_cast/backward") and not adds_up:
        return None
    if not isinstance(piece, Stream):
        return piece
    if name in ("weight_cast/backward", "head_cast/backward"):
        return piece.divided(1 / widened)
    if name == "gradients/backward":  # of 12 bytes a number: one of the two that are added
        return piece.with_bytes(lambda bytes: bytes * (10 + 2 * (widened == 1)) / 12)
    if name == "clip/optimizer":  # the norm alone, in bf16 as slow; the update multiplies
        return piece.whole(piece.bytes / 3)
    if name == "update/optimizer":  # of 28 bytes a number: weight, gradient, moments and the rest
        return piece.whole(piece.bytes * (22 + 4 * master + 2 * adds_up) / 28)
    return piece


def masked(
    ledger: Ledger, layers: float, seen: float | None, *, column: int = 0, extra: float = 0.0
) -> Ledger:
    """Return the ledger with a mask of attention that a causal flag cannot say.

    Args:
        ledger: the ledger before.
        layers: share of the layers that have it.
        seen: share of causal scores that it leaves there; None where it is unavailable.
        column: of a pattern of blocks, the most blocks of queries that see one block of keys.
        extra: what a kernel that makes the mask computes more for each score, in features of a head
            that would take as long.
    """

    def edit(_: str, piece: Work) -> Work:
        if not isinstance(piece, Attention):
            return piece
        mask = piece.mask
        left = None if seen is None or mask.seen is None else seen * mask.seen
        return replace(
            piece,
            mask=ScoreMask(
                layers=max(mask.layers, layers),
                seen=left,
                column=max(mask.column, column),
                extra=mask.extra + extra,
            ),
        )

    return ledger.reworked(edit)


def capped(ledger: Ledger) -> Ledger:
    """Return the ledger with a soft cap on every score of attention."""
    return ledger.reworked(
        lambda _, piece: replace(piece, capped=True) if isinstance(piece, Attention) else piece
    )


def offloaded(ledger: Ledger, sent: float) -> Ledger:
    """Return the ledger with so many bytes sent to the host in the forward pass, and back later."""
    phases: tuple[Phase, ...] = ("forward", "backward")
    more = {f"offload/{phase}": HostCopy(phase, bytes=sent) for phase in phases}
    return replace(ledger, work={**ledger.work, **more})
