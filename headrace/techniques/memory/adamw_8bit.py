"""Keep both moments of AdamW in 8 bits: a quarter of its state.

AdamW's moments are twice the size of the weights. Here each is a byte a number and a scale of every
256 (kernels/blockwise_8bit): 2.03 bytes instead of 8. The matrices come here; vectors and matrices
of fewer than `smallest` numbers stay with the baseline's AdamW, as the paper keeps them. Codes and
scales are plain tensors of rows, so checkpoints hold them as they are and any cut along rows holds
the same numbers. A cut along columns, as tensor parallelism makes, gives other blocks unless the
columns of a rank are a multiple of 256. Such a run would not be one process's, and another mesh
would read its scales as those of other blocks, so it is refused. The step reads the learning rate
and the finite flag on the device, so nothing waits and nothing is compiled anew. Source: arXiv
2110.02861; the map and the order of the update are torchao's, and a test holds the two to the same
codes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import Build, Route
from headrace.core.errors import ConfigError, RefusalKind
from headrace.core.remedy import mend
from headrace.core.units import divisors
from headrace.costs.count import block_linears
from headrace.costs.ledger import Ledger
from headrace.costs.work import Stream, Work
from headrace.kernels.blockwise_8bit import (
    BLOCK,
    SLICE_NUMBERS,
    Moment,
    adamw_,
    blocks_of,
    levels,
)
from headrace.model.adapter import shape_of
from headrace.optim.compiled import lacks_compiler
from headrace.parallel.layout import local_of
from headrace.plan.plan import Plan
from headrace.plan.symptoms import LoopChange
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
TEMPORARIES = 6
"""fp32 copies of a slice that an uncompiled update holds at once; measured."""

SEARCHED = 188
"""Bytes of traffic that take as long as the update of one number: it moves 18 and searches two
maps of 256 levels. Four rows of techniques.jsonl: 36, 40, 48 and 52 ps a number."""


class AdamW8bitOptimizer(torch.optim.Optimizer):
    """Run AdamW over matrices, with quantized moments, masked by `found_inf` on the device."""

    state_names: ClassVar[frozenset[str]] = frozenset(
        {"step", *(f"{key}_{part}" for key in MOMENTS for part in ("codes", "scales"))}
    )
    """Keys of the state that it keeps for each parameter."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        compiled: bool,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(list(named.values()), defaults)
        self.found_inf: Tensor | None = None
        device = next(iter(named.values())).device
        self._maps = [torch.tensor(levels(signed), device=device) for signed in (True, False)]
        # One graph serves all shapes: compiled for each, a model's first step would take minutes.
        self._update: Callable[..., None] = (
            torch.compile(adamw_, dynamic=True, fullgraph=True) if compiled else adamw_
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every matrix; where `found_inf` is 1, weights and moments stay as they are."""
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            for p in ready:
                self._step(p, group)

    def _step(self, p: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self.state[p] or self._start(p)
        skip = torch.zeros((), device=p.device) if self.found_inf is None else self.found_inf
        state["step"] += 1 - skip
        how = {
            "lr": torch.full((), group["lr"], device=p.device),
            "step": state["step"],
            "skip": skip > 0,
            "betas": group["betas"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
        }
        for key in MOMENTS:
            state[f"{key}_scales"] = _laid_out_as(p, state[f"{key}_scales"])
        quantized = [state[f"{key}_{part}"] for key in MOMENTS for part in ("codes", "scales")]
        size = max(1, SLICE_NUMBERS // max(1, p.size(-1)))
        # Views of the tensors: all that is written to is contiguous.
        slices = [local_of(t).flatten(0, -2).split(size) for t in (p, p.grad, *quantized)]  # type: ignore[arg-type]
        for weight, grad, m, m_scales, v, v_scales in zip(*slices, strict=True):
            if weight.numel():
                first = Moment(m, m_scales, self._maps[0])
                second = Moment(v, v_scales, self._maps[1])
                self._update(weight, grad, first, second, **how)

    def _start(self, p: nn.Parameter) -> dict[str, Tensor]:
        """Make moments of zero: a scale of zero makes every code zero."""
        state = self.state[p]
        state["step"] = torch.zeros((), device=p.device)
        for key in MOMENTS:
            state[f"{key}_codes"] = torch.zeros_like(p, dtype=torch.uint8)
            shape = (*p.shape[:-1], blocks_of(p.size(-1)))
            state[f"{key}_scales"] = torch.zeros(shape, device=p.device)
        return state


def _laid_out_as(p: Tensor, scales: Tensor) -> Tensor:
    """Cut scales by rows as their parameter; new ones and those of a checkpoint come whole."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(p, DTensor) or isinstance(scales, DTensor):
        return scales
    return distribute_tensor(scales, p.device_mesh, p.placements, src_data_rank=None)


class Adamw8bit(Technique[Build]):
    """Keep AdamW's moments in 8 bits: a quarter of the optimizer's state."""

    smallest: int = Field(default=4096, ge=1, le=1 << 30)
    """Matrices of fewer numbers stay with the baseline's AdamW."""
    compiled: bool | None = None
    """Whether the update is fused by torch.compile, for seconds at the first step. Left open: on a
    GPU that has Triton, not on a CPU."""

    rest: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    composes: ClassVar[tuple[str, ...]] = ("routes",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:optimizer",)
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("8-bit states",)
    card: ClassVar[Card] = Card(
        buys="6 of the 8 bytes of optimizer state of every number in a matrix (derived)",
        costs=(
            "moments rounded to 8 bits at every step",
            "quantizing work by element",
            "blocks of 256 along a row: cuts along rows change nothing, and cuts along "
            "columns are refused unless each rank has a multiple of 256",
        ),
        helps="when weights, gradients and optimizer fill the memory rather than activations",
        hurts="runs that fit; embeddings of rare tokens, which the paper keeps in 32 bits",
        source="arXiv 2110.02861",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a code generator where compiled; refuse small adapters and cut blocks."""
        if self.compiled and (why := lacks_compiler(context, self.name())):
            return why
        on = context.plan.techniques.values() if context.plan else ()
        if context.plan and (cut := self._cut(context.plan)):
            return cut
        adapts = next((other for other in on if "frozen" in other.composes), None)
        if adapts is None:
            return Supported()
        shapes = _adapters(adapts, context.plan)
        if not shapes or _saves(shapes, self.smallest):
            return Supported()
        sizes = sorted({prod(shape) for shape in shapes}, reverse=True)
        fit = next((n for n in sizes if _saves(shapes, n)), 0)
        wider = "" if fit else f"techniques.{adapts.name()}.rank=2"  # rows of one number save none
        return Unsupported(
            f"all that {adapts.name()} trains are matrices of at most {sizes[0]} numbers, and 8 "
            f"bits save nothing in those of smallest = {self.smallest} or more",
            mend(wider, f"techniques.{self.name()}.smallest={fit or 1}"),
        )

    def _cut(self, plan: Plan) -> Unsupported | None:
        """Return why ranks cannot share the blocks' matrices, as far as the plan decides it.

        Another optimizer may take them first.
        """
        others = any("routes" in t.composes and not t.rest for t in plan.techniques.values())
        if plan.mesh.tensor == 1 or others:
            return None
        linears = {n: s for n, s in _linears(plan).items() if prod(s) >= self.smallest}
        rows = {n: inner for n, (inner, _) in linears.items() if n in ("mixer.out", "mlp.down")}
        return _unshared(rows, plan.mesh.tensor)

    def predict(self, ledger: Ledger) -> Ledger:
        """Count two bytes a number and two scales a block in the place of 8, row by row."""
        ledger = ledger.updated_by(self.name(), lambda _, m: prod(m.shape) >= self.smallest)
        taken, saved = ledger.updates(self.name()).values(), 0.0
        for matrix in taken:
            columns = matrix.shape[-1]
            each = 8 * columns - 2 * (columns + 4 * blocks_of(columns))
            saved += matrix.numbers / columns * each
        slices = ledger.sizes.get("slices", 1.0)
        saved /= slices
        largest = min(max((m.numbers / slices for m in taken), default=0.0), SLICE_NUMBERS)
        line = ledger.memory["optimizer"]
        ledger = ledger.with_line("optimizer", replace(line, bytes=line.bytes - saved))
        ledger = ledger.reworked(self._reworked)
        if self.compiled:
            return ledger
        return ledger.updating(TEMPORARIES * 4 * largest)

    def _reworked(self, name: str, piece: Work) -> Work:
        """Price the update by its compiled kernel; the uncompiled one was never measured."""
        if name != "update/optimizer" or not isinstance(piece, Stream):
            return piece
        why = "" if self.compiled is not False else "adamw_8bit uncompiled was never timed"
        return replace(piece.whole(piece.bytes / 28 * SEARCHED), unknown=why)

    def apply(self, build: Build) -> None:
        """Take the large matrices that no other route wants."""
        config, context = build.plan.optimizer, build.context
        compiled = self.compiled
        if compiled is None:
            compiled = context.device == "cuda" and context.has_triton

        def takes(name: str, p: nn.Parameter) -> bool:
            return p.ndim >= 2 and prod(build.layouts[name].shape) >= self.smallest

        def make(named: Mapping[str, nn.Parameter]) -> AdamW8bitOptimizer:
            layouts = {name: build.layouts[name] for name in named}
            rows = {
                name: layout.shape[-1]
                for name, layout in layouts.items()
                if layout.split.get("tensor") == len(layout.shape) - 1
            }
            if cut := _unshared(rows, build.world.size("tensor")):
                raise ConfigError(
                    f"{self.name()}: {cut.reason}", cut.remedy.otherwise(mend(f"-{self.name()}"))
                )
            return AdamW8bitOptimizer(
                named,
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                compiled=compiled,
            )

        route = Route(self.name(), takes, make, rest=self.rest, compiled=compiled)
        build.routes.append(route)

    def active(self, build: Build) -> Evidence:
        """Report the bytes of state that the matrices really hold, by tensor."""
        optimizer, taken = build.optimizers.get(self.name()), build.routed.get(self.name(), {})
        state_bytes = count = moved = 0
        for p in taken.values():
            state = optimizer.state.get(p, {}) if optimizer else {}
            parts = [local_of(t) for key, t in state.items() if key != "step"]
            state_bytes += sum(t.nbytes for t in parts)
            count += local_of(p).numel() if parts else 0
            moved += any(bool(t.any()) for t in parts if t.dtype == torch.uint8)
        each = state_bytes / max(1, count)
        return Evidence(
            active=moved > 0 and each < 8,
            detail=f"{len(taken)} matrices hold {each:.2f} bytes of state a number, {state_bytes} "
            "in all",
            numbers={"matrices": len(taken), "bytes_per_number": each, "state_bytes": state_bytes},
        )


def _unshared(rows: Mapping[str, int], ranks: int) -> Unsupported | None:
    """Return why ranks cannot share the columns of matrices: a block would lie on two of them.

    Args:
        rows: columns of each matrix whose rows are shared, by name.
        ranks: of them; what divides by so many divides by their divisors.
    """

    def wrong(ranks: int) -> list[str]:
        return [name for name, columns in rows.items() if ranks > 1 and columns % (ranks * BLOCK)]

    if not (names := wrong(ranks)):
        return None
    fit = max(n for n in divisors(ranks)[:-1] if not wrong(n))
    columns = rows[names[0]]
    return Unsupported(
        f"mesh.tensor = {ranks} gives each rank {columns / ranks:g} of the {columns} columns of "
        f"{names[0]}, and its blocks are of {BLOCK}: a rank needs a multiple of that",
        mend(f"mesh.tensor={fit}") if fit > 1 else mend("mesh.tensor=1", "-tensor_parallel"),
        RefusalKind.COMBINATION,
    )


def _linears(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return (features in, features out) of the blocks' linears that no technique replaces."""
    replaced = {
        part
        for other in plan.techniques.values()
        if other.equality != "exact"
        for part in other.claims
    }
    linears = block_linears(shape_of(plan.model)).items()
    return {n: sizes for n, sizes in linears if f"parts.{n.split('.')[0]}" not in replaced}


def _adapters(technique: Any, plan: Plan) -> list[tuple[int, int]]:
    """Return the shapes of what `technique` trains in a block; none where they are unavailable."""
    linears, targets = _linears(plan), technique.targets
    if "mixer.out" not in linears:
        return []
    return [
        shape
        for name, (inner, outer) in linears.items()
        if not targets or name in targets
        for rank in (technique.sizes.rank_of(name),)
        for shape in ((rank, inner), (outer, rank))
    ]


def _saves(shapes: Sequence[tuple[int, int]], smallest: int) -> bool:
    """Return whether such matrices hold less than AdamW's 8 bytes a number."""
    taken = [(rows, columns) for rows, columns in shapes if rows * columns >= smallest]
    quantized_bytes = sum(2 * rows * (columns + 4 * blocks_of(columns)) for rows, columns in taken)
    return quantized_bytes < 8 * sum(map(prod, taken))
