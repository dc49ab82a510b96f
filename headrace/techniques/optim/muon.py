"""Update the blocks' matrices by orthogonalised momentum instead of AdamW.

A gradient matrix is dominated by few directions; Muon gives every direction of the momentum the
same length (kernels/orthogonalize), so rare directions learn as fast as common ones. It takes the
two-dimensional weights inside of blocks; embeddings, head and vectors stay with AdamW. Fused
matrices are taken apart first: queries, keys, values, gate and up are each orthogonalised alone.
Matrices of one shape are iterated as one batch, which keeps the number of launches small. State is
one momentum per matrix: half of AdamW's. Where ranks hold parts of a matrix, each gathers the whole
direction, iterates it, and keeps its part of the result.
Source: Keller Jordan, "Muon" (2024); arXiv 2502.16982.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import Build, Route
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.work import Matmul, Stream, Work, collective
from headrace.kernels.orthogonalize import STEPS, orthogonalize
from headrace.model.fusion import Fusion, fusions
from headrace.parallel.layout import local_of
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

FP32, BF16 = 4, 2
ITERATED = ((2, 4), (3, 2), (4, 1))
"""Batches and batches of their squares [shorter, shorter] that an iteration holds at once, beside
the batch that it began with: as the squares are multiplied, then the polynomial, then the sum."""

MOMENTUM, WRITTEN = (44, 5), (48, 6)
"""Bytes of a number and kernels of a parameter: of the momentum, its choice and the direction, and
of decay, step, choice and the weight. Counted in `MuonOptimizer`, as the next ones."""
STACKED, WIDENED, APART = (24, 6), 6, 8
"""Bytes of a number of a batch, and its kernels: stacked, in bf16, its norm, the quotient and the
longer side's factor. Bytes of a number as it becomes fp32 again; and of a matrix that is taken
apart, as that is done and as it is undone."""
POLYNOMIAL, SQUARES = (10, 2), (14, 3)
"""Bytes of a number and kernels of one iteration, for the batch and for its squares: both sums."""


class MuonOptimizer(torch.optim.Optimizer):
    """Run Muon over named matrices, masked by `found_inf` on the device."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        fused: Mapping[str, Fusion],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        whole: Callable[[str, Tensor], Tensor] = lambda name, local: local,
        part: Callable[[str, Tensor], Tensor] = lambda name, whole: whole,
    ) -> None:
        """Take every matrix of `named`.

        Args:
            named: matrices by name.
            fused: which of them hold several, by the end of their name.
            lr: length of an update.
            momentum: share of the old momentum that is kept.
            weight_decay: decoupled.
            whole: (name, this rank's part) -> the whole matrix.
            part: (name, whole matrix) -> this rank's part.
        """
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(named.values()), defaults)
        self.found_inf: Tensor | None = None
        self.orthogonalized = 0
        self._whole, self._part = whole, part
        self._names = {p: n for n, p in named.items()}
        ends = {p: n.removesuffix(".weight") for n, p in named.items()}
        self._fusion = {
            p: next((f for end, f in fused.items() if name.endswith(end)), None)
            for p, name in ends.items()
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every matrix; where `found_inf` is 1, matrices and momenta stay as they are."""
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            if not ready:
                continue
            skip = (
                torch.zeros((), device=ready[0].device)
                if self.found_inf is None
                else (self.found_inf)
            )
            pieces = [self._direction(p, group["momentum"], skip > 0) for p in ready]
            for p, update in zip(ready, self._orthogonal(ready, pieces), strict=True):
                mine, update = local_of(p), self._part(self._names[p], update)
                kept = mine * (1 - group["lr"] * group["weight_decay"])
                mine.copy_(torch.where(skip > 0, mine, kept - group["lr"] * update))

    def _direction(self, p: nn.Parameter, momentum: float, skip: Tensor) -> tuple[Tensor, ...]:
        """Return the Nesterov momentum of one parameter, taken apart."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        kept, gradient = local_of(state["momentum"]), local_of(p.grad)
        kept.copy_(torch.where(skip, kept, kept.lerp(gradient, 1 - momentum)))
        direction = self._whole(self._names[p], gradient.lerp(kept, momentum))
        fusion = self._fusion[p]
        return (direction,) if fusion is None else fusion.pieces(direction)

    def _orthogonal(
        self, parameters: list[nn.Parameter], pieces: list[tuple[Tensor, ...]]
    ) -> list[Tensor]:
        """Orthogonalise every piece in batches of one shape; return them put together again."""
        shapes: dict[torch.Size, list[tuple[int, int]]] = {}
        for i, parts in enumerate(pieces):
            for j, part in enumerate(parts):
                shapes.setdefault(part.shape, []).append((i, j))
        done: dict[tuple[int, int], Tensor] = {}
        for shape, places in shapes.items():
            batch = orthogonalize(torch.stack([pieces[i][j] for i, j in places]))
            longer = max(1.0, shape[0] / shape[1]) ** 0.5
            done |= dict(zip(places, (batch * longer).unbind(), strict=True))
            self.orthogonalized += len(places)
        whole = []
        for i, p in enumerate(parameters):
            parts = tuple(done[i, j].to(p.dtype) for j in range(len(pieces[i])))
            fusion = self._fusion[p]
            whole.append(parts[0] if fusion is None else fusion.fuse(parts))
        return whole


class Muon(Technique[Build]):
    """Update the blocks' matrices by orthogonalised momentum instead of AdamW."""

    lr: float = Field(default=0.02, gt=0, le=1)
    """Length of an update per direction; tuner range 0.005 to 0.05."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Share of the old momentum that is kept."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled decay, times the learning rate."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "optim"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    composes: ClassVar[tuple[str, ...]] = ("routes",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe", "memory capacity:optimizer")
    token_share: ClassVar[float] = 0.67
    """Measured here at 45M parameters (LOG.md, "1.54 bits per byte"); the paper has 0.52."""
    card: ClassVar[Card] = Card(
        buys="fewer tokens to the same loss, and half of the optimizer state of the matrices",
        costs=(
            "about 5 x 3 matrix products per matrix and step, which do not grow with the batch",
            "two to five copies of the matrices during the update, most where all have one "
            "shape (derived)",
        ),
        helps="pretraining from scratch at ordinary batch sizes",
        hurts="tiny batches and wide matrices, where the iteration outweighs the step",
        source="https://kellerjordan.github.io/posts/muon; arXiv 2502.16982",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere, in fp32 on a CPU; alone where only adapters learn."""
        on = context.plan.techniques.items() if context.plan else ()
        adapts = [name for name, other in on if "frozen" in other.composes]
        left = [n for n, other in on if n != self.name() and "routes" in other.composes]
        if adapts and left:
            return Unsupported(
                f"all that {adapts[0]} trains are matrices of blocks, which it takes, and nothing "
                f"is left to {left[0]}",
                mend(f"-{left[0]}"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Count one state instead of two for blocks' matrices, and directions in updates."""
        ledger = ledger.updated_by(self.name(), lambda name, m: _takes(name, len(m.shape)))
        taken, line = ledger.updates(self.name()).values(), ledger.memory["optimizer"]
        mine = FP32 * sum(m.numbers for m in taken) / ledger.sizes.get("slices", 1.0)
        ledger = ledger.with_line("optimizer", replace(line, bytes=line.bytes - mine))
        return _worked(ledger.updating(_peak_bytes(ledger)), mine / FP32)

    def apply(self, build: Build) -> None:
        """Route the matrices of blocks here."""
        fused = fusions(build.config)
        build.routes.append(
            Route(
                self.name(),
                lambda name, p: _takes(name, p.ndim),
                lambda named: MuonOptimizer(
                    named,
                    fused,
                    lr=self.lr,
                    momentum=self.momentum,
                    weight_decay=self.weight_decay,
                    whole=build.whole,
                    part=build.part,
                ),
            )
        )

    def active(self, build: Build) -> Evidence:
        """Report matrices that were orthogonalised, and that AdamW no longer holds."""
        optimizer = build.optimizers.get(self.name())
        done = getattr(optimizer, "orthogonalized", 0)
        taken = build.routed.get(self.name(), {})
        shared = set(taken) & set(build.routed.get("adamw", {}))
        return Evidence(
            active=done > 0 and not shared,
            detail=f"orthogonalised {done} matrices of {len(taken)} parameters",
            numbers={"orthogonalized": done, "parameters": len(taken)},
        )


def _peak_bytes(ledger: Ledger) -> float:
    """Return the peak bytes of an update: all directions, what is done, the batch that iterates.

    Directions are made of whole matrices. Matrices of one shape iterate as one batch, so that
    blocks whose matrices have one shape, as those beside experts may, hold most.
    """
    low = BF16 if ledger.sizes["on_gpu"] else FP32
    batches, fused = _batches(ledger)
    whole = sum(prod(shape) * count for shape, count in batches.items())
    done, before, most = 0, 0, 0.0
    for shape, count in batches.items():
        batch, squares = count * prod(shape), count * min(shape) ** 2
        iterated = max(b * batch + s * squares for b, s in ITERATED)
        most = max(most, low * (done + before) + FP32 * batch + low * iterated)
        done, before = done + batch, batch  # the one before is there until this one is done
    together = FP32 * (whole if low != FP32 else fused)  # in the parameters' dtype again
    return FP32 * whole + max(most, low * (done + before) + together)


def _batches(ledger: Ledger) -> tuple[dict[tuple[int, ...], int], int]:
    """Return how many pieces of each shape iterate, and how many numbers are taken apart."""
    batches: dict[tuple[int, ...], int] = {}
    fused = 0
    for name, matrix in ledger.updates(Muon.name()).items():
        pieces = _pieces(name, matrix.shape, ledger.sizes)
        fused += prod(matrix.shape) if len(pieces) > 1 else 0
        for shape in pieces:
            batches[shape] = batches.get(shape, 0) + 1
    return batches, fused


def _worked(ledger: Ledger, mine: float) -> Ledger:
    """Price the update's matmuls and streams in AdamW's place, for `mine` numbers of this rank.

    A batch of matrices has the tiles of one matmul as long as all of them. It is derived: of the
    one row on a GPU, novels of time_to_quality.jsonl, it predicts 0.95 of a step that is short
    enough for launches to decide.
    """
    sizes, taken = ledger.sizes, ledger.updates(Muon.name())
    (batches, fused), count = _batches(ledger), len(taken)
    if not taken:
        return ledger
    parts = sum(batches.values()) - count
    more: dict[str, Work] = {
        "momentum": _stream(1, MOMENTUM[0] * mine, MOMENTUM[1] * count),
        "written": _stream(1, WRITTEN[0] * mine, WRITTEN[1] * count),
    }
    if fused:
        more |= {what: _stream(1, APART * fused, parts) for what in ("apart", "together")}
    for shape, many in batches.items():
        narrow, long, name = min(shape), max(shape), "x".join(map(str, shape))
        batch, squares = many * prod(shape), many * narrow**2
        more |= {
            f"{name}/stacked": _stream(1, STACKED[0] * batch, STACKED[1]),
            f"{name}/polynomial": _stream(STEPS, POLYNOMIAL[0] * batch, POLYNOMIAL[1]),
            f"{name}/squares": _stream(STEPS, SQUARES[0] * squares, SQUARES[1]),
            f"{name}/widened": _stream(1, WIDENED * batch, many),
        }
        for what, columns, terms in (
            ("gram", narrow, long),
            ("squared", narrow, narrow),
            ("product", long, narrow),
        ):
            shapes = (many * narrow, columns, terms)
            more[f"{name}/{what}"] = Matmul(
                "optimizer",
                STEPS,
                shapes,
                "bf16" if sizes["on_gpu"] else "fp32",
            )
    if sizes.get("slices", 1.0) > 1:
        whole = FP32 * sum(prod(m.shape) for m in taken.values())
        more["gather"] = collective(sizes, "shard", "optimizer", "all_gather", whole, kernels=count)
    if any(m.share < 1 for m in taken.values()):
        why = "what ranks send each other of the matrices that muon takes whole was not counted"
        more = {name: replace(piece, unknown=why) for name, piece in more.items()}
    work = {**ledger.work, **{f"update/muon_{name}": piece for name, piece in more.items()}}
    if isinstance(left := work.get("update/optimizer"), Stream):
        rest = max(0.0, left.bytes - 7 * FP32 * mine)
        work["update/optimizer"] = replace(left, bytes=rest)
    return replace(ledger, work=work, sizes={**sizes, DERIVED: 1.0})


def _stream(count: float, bytes: float, kernels: float) -> Stream:
    """Return a stream of the update."""
    return Stream("optimizer", count, bytes, kernels)


def _pieces(name: str, shape: tuple[int, ...], sizes: Mapping[str, float]) -> list[tuple[int, ...]]:
    """Return the shapes that a matrix is taken apart into (model/fusion)."""
    rows, columns = shape
    if name.endswith("mlp.gate_up.weight"):
        return [(rows // 2, columns)] * 2
    if name.endswith("mixer.qkv.weight"):
        queries = sizes["heads"] / sizes["kv_heads"]
        key = round(rows / (queries + 2))
        return [(rows - 2 * key, columns), (key, columns), (key, columns)]
    return [shape]


def _takes(name: str, dimensions: int) -> bool:
    """Return whether a parameter is a block's matrix."""
    return dimensions == 2 and name.startswith("blocks.")
