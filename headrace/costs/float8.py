"""Count what casts of fp8 linears move, and what is left where weights come as fp8."""

from collections.abc import Iterator, Mapping, Sequence

from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger
from headrace.costs.work import Phase, Stream, Work, collective

FP8 = 1.0
"""Bytes of a number in fp8."""
READ, CAST = 2, 3
"""Bytes of a number in bf16 that is looked at for the scale, and of one that is cast."""
CAST_SLICE = 5
"""Bytes of a number in fp32 that a kernel casts for a gather (kernels/float8_cast)."""
TURNED = 1.56
"""Times as long as their bytes that casts take, since each is written in the order of a matmul:
compiled kernels beside matmuls took 101.1 ms for 40.1 at 1b (kernels.jsonl, float8_linear)."""
WEIGHT_CASTS: Mapping[Phase, int] = {"forward": READ + CAST, "backward": CAST}
"""Phase -> bytes that the casts of a number of a weight move, and those of an input's."""
GRADIENT_CASTS = READ + 2 * CAST
"""Bytes that the casts of a number of an output's gradient move, in the backward pass."""
WEIGHT_COPIES: Mapping[Phase, int] = {"forward": 0, "backward": 2}
"""Phase -> bytes that a number of a weight moves that is fp8 already: the backward pass writes it
in its matmul's order."""


def casts_of(tokens: float, inner: int, outer: int) -> dict[Phase, float]:
    """Return the bytes that the casts of a linear's operands move, by phase.

    Args:
        tokens: rows of its input.
        inner: its features in.
        outer: its features out.
    """
    moved: dict[Phase, float] = {
        p: each * (tokens * inner + inner * outer) for p, each in WEIGHT_CASTS.items()
    }
    moved["backward"] += GRADIENT_CASTS * tokens * outer
    return moved


def is_fp8(ledger: Ledger, name: str) -> bool:
    """Return whether the matrix of that name belongs to a linear whose matmuls are fp8."""
    place = name.removesuffix(".weight").split(".", 2)
    return place[0] == "blocks" and f"{place[-1]}/fp8" in ledger.sizes


def without_weight_casts(ledger: Ledger) -> Ledger:
    """Return the ledger of fp8 linears whose weights come as fp8."""
    sizes = ledger.sizes
    left: dict[str, float] = {}
    for fact in (name for name in sizes if name.endswith("/fp8")):
        linear = fact.removesuffix("/fp8")
        inner, outer = int(sizes[f"{linear}/in"]), int(sizes[f"{linear}/out"])
        for phase, moved in casts_of(sizes["tokens"], inner, outer).items():
            less = (WEIGHT_CASTS[phase] - WEIGHT_COPIES[phase]) * inner * outer
            left[f"{linear}/casts_{phase}"] = 1 - less / moved
    return ledger.reworked(
        lambda name, piece: (
            piece.divided(1 / left[key])
            if (key := name.removesuffix("/again")) in left and isinstance(piece, Stream)
            else piece
        )
    )


def fp8_slices(
    sizes: Mapping[str, float], numbers: Sequence[float], times: Mapping[Phase, float]
) -> Iterator[tuple[str, Work]]:
    """Cast slices before each gather; find their scales together, once a step.

    Args:
        sizes: of the ledger.
        numbers: of each matrix that is gathered in fp8.
        times: phase -> how often it gathers all of them in a micro-batch.
    """
    if not numbers:
        return
    own = sum(numbers) / sizes["slices_ranks"]
    for phase, count in times.items():
        if count:
            each = CAST_SLICE * own / len(numbers)
            yield f"shards/cast_{phase}", Stream(phase, count * len(numbers), each)
    yield "shards/largest", Stream("forward", 1 / sizes["micro_batches"], FP32 * own)
    scales = FP32 * len(numbers)
    yield (
        "shards/scales",
        collective(sizes, "slices", "forward", "all_reduce", scales, 1, last=True),
    )
