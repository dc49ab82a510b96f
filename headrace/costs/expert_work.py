"""Price a mixture of experts in a step: its router, the sorted rows, and the grouped products.

A token's row is copied for each of its choices, sorted by expert, multiplied by its experts'
matrices and summed again (model/moe). All choices together are multiplied as often as the rows of
one matrix would be, whatever each expert gets, so products are exact. On a Hopper GPU one kernel
multiplies all experts; what it takes beyond one product of as many rows is that it reads and writes
every expert's matrix. Elsewhere a loop multiplies one expert after the other, and joins the results
in a copy.

Streams are the operations of eager torch with the bytes that they read and write. A test counts
both in a real pass. No mixture was timed in a step, so a time that rests on these has no interval.
Assumed: experts get equally many rows, which the balance loss aims at. Left out: tiles of a grouped
kernel that an expert's last rows do not fill.

Shapes: N tokens, k choices of a token, C = N x k choices, D features, F hidden features of an
expert, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from headrace.costs.count import FP32
from headrace.costs.decoder_work import LEARNED
from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.work import Matmul, Phase, Stream, Work

INT64 = 8
ROUTER = "router"
"""Name of the router's products and of what it reads and writes."""
SORTS, SCATTER = 12, 10
"""Kernels of a GPU that choose the experts and sort the choices, and that add rows up by their
index, which sorts the index first. Counted from torch's calls of CUB, and measured on no GPU."""
EXCHANGED = "experts/sorted"
"""Name of the copies that sort rows which ranks have sent each other."""


@dataclass(frozen=True)
class Routed:
    """Hold the sizes of a mixture.

    Args:
        experts: MLPs of a block.
        top_k: experts of a token.
        width: hidden features of one.
        gates: 2 where an MLP has a gate, else 1.
        parameters: numbers that the mixture adds to the model.
    """

    experts: int
    top_k: int
    width: int
    gates: int
    parameters: float

    @property
    def first(self) -> str:
        """Return the name of an expert's first product."""
        return "gate_up" if self.gates == 2 else "up"


def routed_work(ledger: Ledger, routed: Routed) -> Ledger:
    """Return a ledger with the work of a mixture in the place of that of dense MLPs.

    Args:
        ledger: of the decoder with dense MLPs, its parameters too.
        routed: the mixture.
    """
    sizes = ledger.sizes
    dense = f"mlp.{routed.first}/", "mlp.down/"
    precision = next(
        piece.precision
        for name, piece in ledger.work.items()
        if isinstance(piece, Matmul) and name.startswith(dense)
    )
    work = {name: piece for name, piece in ledger.work.items() if not name.startswith(dense)}
    wider = routed.top_k * routed.width / sizes["ffn"]
    before = ledger.memory["parameters"].bytes
    grown = (before + FP32 * routed.parameters) / before
    matrices = sizes["dim"] * (routed.gates + 1)
    cast = routed.experts * routed.width - sizes["ffn"]  # hidden features that have a cast more

    def edit(name: str, piece: Work) -> Work:
        if name.startswith(LEARNED):
            return piece.with_bytes(lambda bytes: bytes * grown)
        if name.startswith("activation/"):
            return piece.divided(1 / wider)
        if name.startswith("weight_cast/") and piece.count and isinstance(piece, Stream):
            if precision == "fp32":
                return piece
            return piece.with_bytes(
                lambda bytes: bytes + (FP32 + sizes["activation_bytes"]) * matrices * cast
            )
        return piece

    work = {name: edit(name, piece) for name, piece in work.items()}
    more = {**dict(_matmuls(sizes, routed, precision)), **dict(_streams(sizes, routed))}
    return replace(ledger, work={**work, **more}, sizes={**sizes, DERIVED: 1.0})


def _matmuls(sizes: Any, routed: Routed, precision: str) -> Iterator[tuple[str, Work]]:
    """Yield the products of the router and of the experts."""
    layers, tokens, dim = sizes["layers"], int(sizes["tokens"]), int(sizes["dim"])
    yield from _three(ROUTER, layers, tokens, dim, routed.experts, "fp32")
    choices = tokens * routed.top_k
    rows = choices if sizes["on_gpu"] else ceil(choices / routed.experts)
    count = layers * choices / rows
    wide = routed.gates * routed.width
    for name, inner, outer in ((routed.first, dim, wide), ("down", routed.width, dim)):
        yield from _three(f"experts.{name}", count, rows, inner, outer, precision)


def _three(
    name: str, count: float, rows: int, inner: int, outer: int, precision: str
) -> Iterator[tuple[str, Work]]:
    """Yield the matmuls of a linear: its result, and the gradients of its input and weight."""
    shapes: tuple[tuple[str, Phase, tuple[int, int, int]], ...] = (
        ("result", "forward", (rows, outer, inner)),
        ("input", "backward", (rows, inner, outer)),
        ("weight", "backward", (outer, inner, rows)),
    )
    for what, phase, shape in shapes:
        yield f"{name}/{what}", Matmul(phase, count, shape, precision)


def _streams(sizes: Any, routed: Routed) -> Iterator[tuple[str, Work]]:
    """Yield what a mixture reads and writes around its products, for all layers."""
    layers, size, on_gpu = sizes["layers"], sizes["activation_bytes"], sizes["on_gpu"]
    tokens, dim, experts = sizes["tokens"], sizes["dim"], routed.experts
    choices, scores = tokens * routed.top_k, FP32 * tokens * experts
    row, rows = size * tokens * dim, size * choices * dim  # bytes of all tokens, of all choices
    cast = (size + FP32) * tokens * dim if size != FP32 else 0.0
    sorts, scatter = (SORTS, SCATTER) if on_gpu else (3, 2)
    hidden = size * choices * routed.width
    matrices = size * dim * routed.width * (routed.gates + 1)  # of one expert
    listed: dict[str, tuple[Phase, float, int, float | None]] = {
        # The softmax, its mean, the weights of the choices, and how many each expert has.
        "router/forward": ("forward", cast + 3 * scores + 12 * INT64 * choices, 14, row + scores),
        "router/backward": (
            "backward",
            cast + 3 * row + 10 * scores + 12 * INT64 * choices,
            18,
            3 * row + scores,
        ),
        "order/forward": ("forward", scores + 12 * INT64 * choices, sorts, None),
        "routed/forward": ("forward", row + rows, 1, None),
        "routed/backward": ("backward", rows + 3 * row, scatter, None),
        "mixed/forward": ("forward", 5 * rows + row, 3, rows + row),
        # Gradients of the rows and of their weights; and rows that go back to where they came from.
        "mixed/backward": ("backward", 6 * rows, 3, 2 * rows + row),
        "unsorted/backward": ("backward", 4 * rows, scatter, None),
    }
    for name, (phase, bytes, kernels, fused) in listed.items():
        yield name, Stream(phase, layers, bytes, kernels, fused)
    if on_gpu:  # every matrix but the one that a product of as many rows has
        others = (experts - 1) * matrices
        for name, phase, passes in (
            ("experts_read/forward", "forward", 1),
            ("experts_read/backward", "backward", 2),
        ):
            yield name, Stream(phase, layers, passes * others, launch=0.0)  # pyright: ignore
        return
    joined = routed.gates * hidden + rows, hidden + rows
    yield "experts_joined/forward", Stream("forward", layers, 2 * joined[0], 2)
    yield "experts_joined/backward", Stream("backward", layers, 2 * joined[1], 2)
    yield "experts_stacked/backward", Stream("backward", layers, 2 * experts * matrices, 2)


def divided_work(
    ledger: Ledger, *, experts: int, share: float, ranks: int, kept: float
) -> dict[str, Work]:
    """Return the work of a rank that holds some of the experts.

    Rows come from all ranks of a group for fewer experts: a rank multiplies as many as before where
    the experts divide evenly. They are sorted again when they have arrived, and before they return.

    Args:
        ledger: before anything of it is divided.
        experts: all experts of a layer.
        share: share of the experts that the rank with most of them holds.
        ranks: ranks of a group.
        kept: share of all parameters that the rank holds.
    """
    rows, size = share * ranks, ledger.sizes["activation_bytes"]
    numbers = sum(m.numbers for m in ledger.experts().values()) / ledger.sizes["layers"]
    cast = (1 - share) * (FP32 + size) * numbers if size != FP32 else 0.0

    def edit(name: str, piece: Work) -> Work:
        if isinstance(piece, Matmul) and name.startswith("experts."):
            if ledger.sizes["on_gpu"]:
                return replace(piece, count=piece.count * rows)
            place = 2 if name.endswith("/weight") else 0
            ends = list(piece.sizes)
            ends[place] *= ranks
            return replace(piece, count=piece.count * share, sizes=tuple(ends))
        if name.startswith("experts_read/"):
            others = (experts * share - 1) / (experts - 1)
            return piece.with_bytes(lambda bytes: bytes * others)
        if name.startswith("weight_cast/"):
            return piece.with_bytes(lambda bytes: bytes - cast)
        if name.startswith("experts_stacked/"):
            return piece.with_bytes(lambda bytes: bytes * share)
        if name.startswith(("experts_joined/", "activation/")):
            return piece.divided(1 / rows)
        return piece.with_bytes(lambda bytes: bytes * kept) if name.startswith(LEARNED) else piece

    work = {name: edit(name, piece) for name, piece in ledger.work.items()}
    moved = ledger.memory["0/routed"].bytes * rows  # a row is read and written
    for phase in ("forward", "backward"):
        name = f"{EXCHANGED}_{phase}"
        work[name] = Stream(phase, 2 * ledger.sizes["layers"], moved, 1 + SORTS / 2)
    return work
