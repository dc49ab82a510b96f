"""Update the blocks' matrices by orthogonalised momentum instead of AdamW.

A gradient matrix is dominated by few directions; Muon gives every direction of the momentum the
same length (optim/muon, kernels/orthogonalize), so rare directions learn as fast as common ones. It
takes the two-dimensional weights inside of blocks; embeddings, head and vectors stay with AdamW.
Fused matrices are taken apart first: queries, keys, values, gate and up are each orthogonalised
alone. Matrices of one shape are one batch, and on a GPU one compiled function updates it. State is
one momentum per matrix, half of AdamW's. Ranks share the matrices: each orthogonalises its own and
the results go to all (parallel/team); with `mesh.replicate` each group of slices has all of them.

Knobs beyond the paper are off unless asked for: a momentum that begins low and rises
(`momentum_warmup_steps`, a pure function of the step), decay that only goes with the update
(`cautious_decay`), rows of even length (`normalize_rows`), pairs of heads apart (`head_pairs`), and
a part of each matrix in a step (`fraction`).
Source: Keller Jordan, "Muon" (2024); arXiv 2502.16982.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Any, ClassVar

from pydantic import Field

from headrace.assemble.sockets import Build, Route
from headrace.core.errors import RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.work import Stream
from headrace.kernels.launches import COUNTS, since
from headrace.kernels.orthogonalize import Name
from headrace.kernels.symmetric_matmul import CAPABILITY, LEAST_ROWS, is_served
from headrace.model.fusion import fusions
from headrace.optim.compiled import lacks_compiler
from headrace.optim.muon import (
    WHOLE,
    MatrixCut,
    MuonOptimizer,
    MuonRule,
    cut_of,
)
from headrace.optim.muon_work import PART_SCALARS, SCALARS, MuonWork
from headrace.optim.submatrix import count_taken
from headrace.parallel.layout import local_of
from headrace.parallel.team import Team
from headrace.plan.plan import Plan
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
QKV, GATE_UP = "mixer.qkv", "mlp.gate_up"
VALUE = "muon_momentum"
"""Name of the momentum among the numbers that vary in time."""


class Muon(Technique[Build]):
    """Update the blocks' matrices by orthogonalised momentum instead of AdamW."""

    lr: float = Field(default=0.02, gt=0, le=1)
    """Length of an update per direction; tuner range 0.005 to 0.05."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Share of the old momentum that is kept."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled decay, times the learning rate."""
    nesterov: bool = True
    """Look ahead: the direction is momentum x m + (1 - momentum) x gradient, not m alone."""
    momentum_warmup_steps: int = Field(default=0, ge=0, le=10**9)
    """Steps over which the momentum rises linearly from `momentum_start`; 0 is none. Tuner range 0
    to 500 (github.com/KellerJordan/modded-nanogpt has 300)."""
    momentum_start: float = Field(default=0.85, ge=0, lt=1)
    """Momentum at the first step of its warmup (modded-nanogpt's value)."""
    cautious_decay: bool = False
    """Decay a weight only where its decay and its update have one sign (arXiv 2510.12402)."""
    normalize_rows: bool = False
    """Divide each row of an update by the root of its running mean square, and give the matrix its
    norm back (NorMuon, arXiv 2510.05491). One more number a row is kept."""
    head_pairs: bool = False
    """Orthogonalise queries, keys and values for each two heads apart. Heads that share a matrix
    are scaled by one spectrum otherwise ("Muon Split" of the GLM-5 report, 2026: each head)."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the rows of a matrix that a step updates, or of its columns where it is tall: those
    with the longest direction, rounded up. Momentum of the others adds up until they are taken
    (Dion2, arXiv 2512.16928; with `normalize_rows`, Dion3, arXiv 2608.11612; the authors' program
    has no `nesterov`). Weights decay everywhere, and with `cautious_decay` only where they are
    updated. Dion2's default is 0.25."""
    polynomials: Name = "polar_express"
    """How singular values are brought to 1: by Polar Express (arXiv 2505.16932), or by Jordan's
    one polynomial, which leaves them twice as far from it."""
    symmetric_matmuls: bool = False
    """Compute half of each product that is symmetric, of matrices with 768 rows and columns or more
    (kernels/symmetric_matmul); on GPUs from Hopper on, with Triton. At 1b it was slower."""
    compiled: bool | None = None
    """Whether the update is compiled, for seconds at the first step. Left open: on a GPU that has
    Triton, not on a CPU."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "optim"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    composes: ClassVar[tuple[str, ...]] = ("routes", "values")
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe", "memory capacity:optimizer")
    unsaid: ClassVar[Mapping[str, Any]] = {"polynomials": "jordan"}
    token_share: ClassVar[float] = 0.67
    """Measured here at 45M parameters (LOG.md, "1.54 bits per byte"); the paper has 0.52."""
    card: ClassVar[Card] = Card(
        buys="fewer tokens to the same loss, and half of the optimizer state of the matrices",
        costs=(
            "15 to 18 matrix products per matrix and step, which do not grow with the batch",
            "a few copies of at most 64M weights at a time during the update (derived)",
            "with fraction = 0.25 at most a 24th of these matmuls' FLOPs, and 1.1 to 1.3 times "
            "the update's bytes, of [2048, 8192] and [2048, 2048] (derived)",
        ),
        helps="pretraining from scratch at ordinary batch sizes",
        hurts="tiny batches and wide matrices, where the iteration outweighs the step",
        source="https://kellerjordan.github.io/posts/muon; arXiv 2502.16982; arXiv 2505.16932",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere, in fp32 on a CPU; alone where only adapters learn."""
        on = context.plan.techniques.items() if context.plan else ()
        adapts = [name for name, other in on if "frozen" in other.composes]
        left = [n for n, o in on if n != self.name() and (o.rest or "routes" in o.composes)]
        if adapts and left:
            return Unsupported(
                f"all that {adapts[0]} trains are matrices of blocks, which it takes, and nothing "
                f"is left to {left[0]}",
                mend(f"-{left[0]}"),
                RefusalKind.COMBINATION,
            )
        if self.compiled and (why := lacks_compiler(context, self.name())):
            return why
        if self.symmetric_matmuls and (refused := self._refuse_symmetric(context)):
            return refused
        return self._wrong(context.plan) or Supported()

    def _refuse_symmetric(self, context: Context) -> Unsupported | None:
        """Return why half of a product cannot be computed alone here, or would nowhere be."""
        plain = mend(f"techniques.{self.name()}.symmetric_matmuls=false")
        if lacks_compiler(context, self.name()) or (context.capability or (0, 0)) < CAPABILITY:
            return Unsupported(
                "symmetric_matmuls = true needs Triton and a GPU of compute capability 9.0 or "
                f"later, and {context.device_name} has {context.capability_text}",
                plain,
                RefusalKind.DEVICE,
            )
        dim = context.plan.model.dim if context.plan else LEAST_ROWS
        taken = count_taken(self.fraction, dim) if context.plan else dim
        if not is_served(taken, dim):
            part = f", of which fraction = {self.fraction:g} takes {taken}" * (taken < dim)
            return Unsupported(
                f"symmetric_matmuls = true takes matrices from {LEAST_ROWS} rows and columns on, "
                f"by eights, and model.dim = {dim}{part}",
                plain,
            )
        return None

    def _wrong(self, plan: Plan | None) -> Unsupported | None:
        """Return why knobs contradict each other, the model or the length of the run."""
        warmup, own = self.momentum_warmup_steps, f"techniques.{self.name()}"
        if warmup and self.momentum_start > self.momentum:
            return Unsupported(
                f"momentum_start = {self.momentum_start:g} is above momentum = {self.momentum:g}, "
                "and a warmup rises",
                mend(f"{own}.momentum_start={self.momentum:g}"),
            )
        horizon = plan.horizon_steps if plan else None
        if horizon is not None and warmup > horizon:
            return Unsupported(
                f"momentum_warmup_steps = {warmup} is longer than the run's {horizon} steps, so "
                f"the momentum would never reach {self.momentum:g}",
                mend(f"{own}.momentum_warmup_steps={horizon}"),
            )
        if self.head_pairs and plan:
            heads = {"heads": plan.model.heads, "kv_heads": plan.model.resolved_kv_heads}
            odd = [f"{count} {name}" for name, count in heads.items() if count % 2]
            if odd:
                return Unsupported(
                    f"head_pairs takes heads by two, and the model has {' and '.join(odd)}",
                    mend(f"{own}.head_pairs=false"),
                )
        if self.fraction == 1:
            return None
        key, side = _longest_side(plan) if plan else ("", 0)
        if side and count_taken(self.fraction, side) == side:
            return Unsupported(
                f"fraction = {self.fraction:g} takes all rows of every matrix, as the shorter side "
                f"has at most {key} = {side} of them",
                mend(f"{own}.fraction=1.0"),
            )
        if self.nesterov and not (self.momentum and (self.momentum_start or not warmup)):
            return Unsupported(
                "with a momentum of 0 and nesterov the direction is the gradient alone, so that "
                "what fraction leaves out would be lost",
                mend(f"{own}.nesterov=false"),
            )
        return None

    def predict(self, ledger: Ledger) -> Ledger:
        """Count one state instead of two for blocks' matrices, and one chunk's update."""
        ledger = ledger.updated_by(self.name(), lambda name, m: _takes(name, len(m.shape)))
        taken, line = ledger.updates(self.name()).values(), ledger.memory["optimizer"]
        slices = ledger.sizes.get("slices", 1.0)
        mine = sum(m.numbers for m in taken) / slices
        rows = sum(m.shape[0] for m in taken) if self.normalize_rows else 0
        state_bytes = line.bytes - FP32 * mine + FP32 * rows
        ledger = ledger.with_line("optimizer", replace(line, bytes=state_bytes))
        if not taken:
            return ledger
        batches = [self._batch(ledger, *one) for one in self._alike(ledger).items()]
        ledger = ledger.updating(max(batch.peak_bytes() for batch in batches))
        work = {n: piece for batch in batches for n, piece in batch.work().items()}
        scalars = SCALARS + (PART_SCALARS if self.fraction < 1 else 0)
        work["update/muon_scalars"] = Stream("optimizer", 1, 4.0 * scalars, scalars)
        if any(m.share < 1 for m in taken):
            why = "what ranks send each other of the matrices that muon shares was not counted"
            work = {name: replace(piece, unknown=why) for name, piece in work.items()}
        work = {**ledger.work, **work}
        if isinstance(left := work.get("update/optimizer"), Stream):
            work["update/optimizer"] = replace(left, bytes=max(0.0, left.bytes - 7 * FP32 * mine))
        return replace(ledger, work=work, sizes={**ledger.sizes, DERIVED: 1.0})

    def _alike(self, ledger: Ledger) -> dict[tuple[tuple[int, ...], MatrixCut], int]:
        """Return how many matrices of each shape are taken apart in one way."""
        counts: dict[tuple[tuple[int, ...], MatrixCut], int] = {}
        for name, matrix in ledger.updates(self.name()).items():
            key = matrix.shape, self._predicted_cut(name, matrix.shape, ledger.sizes)
            counts[key] = counts.get(key, 0) + 1
        return counts

    def _predicted_cut(
        self, name: str, shape: tuple[int, ...], sizes: Mapping[str, float]
    ) -> MatrixCut:
        """Return how a matrix is taken apart, as `cuts_of` says of the model's."""
        parts, rows = sizes.get("tensor_ranks", 1.0), shape[0]  # heads are a rank's, shapes whole
        heads, groups = (round(parts * sizes[name]) for name in ("heads", "kv_heads"))
        if name.endswith(f"{GATE_UP}.weight"):
            groups = gcd(groups, rows // 2)
            return MatrixCut(groups, ((2, rows // 2 // groups, 1),))
        if name.endswith(f"{QKV}.weight"):
            each = rows // (heads + 2 * groups)
            return _heads_cut(groups, heads, each, self.head_pairs)
        return WHOLE

    def _batch(
        self, ledger: Ledger, how: tuple[tuple[int, ...], MatrixCut], count: int
    ) -> MuonWork:
        sizes = ledger.sizes
        on_gpu, slices = bool(sizes["on_gpu"]), sizes.get("slices", 1.0)
        return MuonWork(
            shape=how[0],
            cut=how[1],
            count=count,
            compiled=on_gpu if self.compiled is None else self.compiled,
            on_gpu=on_gpu,
            rows=self.normalize_rows,
            symmetric=self.symmetric_matmuls,
            ahead=self.nesterov,
            fraction=self.fraction,
            slices=slices,
            axis=(axis := "slices" if slices > 1 else "shard"),
            ranks=int(sizes.get(f"{axis}_ranks", 1) * sizes.get("tensor_ranks", 1)),
            sizes=sizes,
        )

    def apply(self, build: Build) -> None:
        """Route the matrices of blocks here."""
        cuts, context = cuts_of(build.config, self.head_pairs), build.context
        if (compiled := self.compiled) is None:
            compiled = context.device == "cuda" and context.has_triton
        build.notes[self.name()] = dict(COUNTS)
        if self.momentum_warmup_steps:
            build.values[VALUE] = self.momentum_at

        def team(name: str) -> Team | None:
            if build.world.size("shard") * build.world.size("tensor") == 1:
                return None
            return Team(build.world, build.layouts[name], build.model.get_parameter(name))

        build.routes.append(
            Route(
                self.name(),
                lambda name, p: _takes(name, p.ndim),
                lambda named: MuonOptimizer(
                    named,
                    cuts,
                    lr=self.lr,
                    momentum=self.momentum,
                    weight_decay=self.weight_decay,
                    rule=MuonRule(
                        self.polynomials,
                        self.nesterov,
                        self.cautious_decay,
                        self.normalize_rows,
                        self.symmetric_matmuls,
                        self.fraction,
                    ),
                    now=lambda: build.now.get(VALUE),
                    team=team,
                    compiled=compiled,
                ),
                compiled=compiled,
            )
        )

    def momentum_at(self, step: int) -> float:
        """Return the momentum of a step, a pure function of it."""
        done = min(1.0, step / max(1, self.momentum_warmup_steps))
        return self.momentum_start + (self.momentum - self.momentum_start) * done

    def active(self, build: Build) -> Evidence:
        """Report matrices that were orthogonalised, and that AdamW no longer holds.

        Each parameter is that many matrices a step as its knobs say. Where rows are normalised,
        each parameter's mean squares are kept, and not all 0 once a gradient has come; where the
        momentum rises, it is that of a step. With `fraction` below 1, rows that were updated are
        counted on the device, and they are fewer than there are.
        """
        optimizer = build.optimizers.get(self.name())
        taken = build.routed.get(self.name(), {})
        if not isinstance(optimizer, MuonOptimizer):
            return Evidence(None if not taken else False, "this rank holds no matrix")
        done, graphs = optimizer.orthogonalized, len(optimizer.graphs)
        shared = set(taken) & set(build.routed.get("adamw", {}))
        cuts = cuts_of(build.config, self.head_pairs)
        pieces = sum(cut_of(name, cuts).pieces for name in taken)
        states = [optimizer.state[p].get("rows") for p in taken.values()]
        rows = sum(bool(state.any()) for state in states if state is not None)
        kept = sum(state is not None for state in states)
        momentum = optimizer.momentum or 0.0
        now = build.now.get(VALUE, self.momentum)
        gradients = (local_of(p.grad) for p in taken.values() if p.grad is not None)
        # Behind a head of zeros no gradient comes in the first step.
        uneven = self.normalize_rows and not rows and any(bool(g.any()) for g in gradients)
        updated = 0 if optimizer.touched is None else int(optimizer.touched)
        there = sum(side * count for side, count in optimizer.sides.items())
        halves = since(build.notes[self.name()], "symmetric_matmul").get("symmetric_matmul", 0)
        right = (
            done > 0
            and (halves > 0 or not self.symmetric_matmuls)
            and done % max(1, pieces) == 0
            and not shared
            and (graphs > 0) == optimizer.compiled
            and (kept > 0) == self.normalize_rows
            and not uneven
            and self._takes_a_part(optimizer, updated)
            and momentum == now
        )
        return Evidence(
            active=right,
            detail=f"orthogonalised {done} matrices of {len(taken)} parameters, {pieces} a step, "
            f"with momentum {momentum:.4g}"
            + (f", by {graphs} compiled functions" if optimizer.compiled else "")
            + (f"; {rows} parameters have even rows" if self.normalize_rows else "")
            + (f"; {updated} of {there} rows were updated" if self.fraction < 1 else "")
            + (f"; {halves} products were computed by half" if halves else ""),
            numbers={
                "orthogonalized": done,
                "parameters": len(taken),
                "momentum": momentum,
                "graphs": graphs,
                "normalized": rows,
                "rows": there,
                "rows_updated": updated,
                "halves": halves,
            },
        )

    def _takes_a_part(self, optimizer: MuonOptimizer, updated: int) -> bool:
        """Return whether as many rows were updated as `fraction` asks for.

        A rank that orthogonalises no matrix, as there are more ranks than matrices, has no rows.
        """
        if self.fraction == 1:
            return optimizer.touched is None
        asked = sum(n * count_taken(self.fraction, side) for side, n in optimizer.sides.items())
        return optimizer.touched is not None and updated == asked


def _longest_side(plan: Plan) -> tuple[str, int]:
    """Return the key of what bounds the shorter side of every matrix that is trained, and it."""
    for name, other in plan.techniques.items():
        rank = getattr(other, "rank", None)
        if "frozen" in other.composes and isinstance(rank, int):
            return f"techniques.{name}.rank", rank
    return "model.dim", plan.model.dim


def cuts_of(config: ModelConfig, head_pairs: bool = False) -> dict[str, MatrixCut]:
    """Return how the fused matrices are taken apart, by the end of their name."""
    cuts = {}
    for end, fusion in fusions(config).items():
        if end == QKV:
            cuts[end] = _heads_cut(fusion.groups, config.heads, fusion.split[1], head_pairs)
        else:
            cuts[end] = MatrixCut(fusion.groups, ((len(fusion.split), fusion.split[0], 1),))
    return cuts


def _heads_cut(groups: int, heads: int, head_dim: int, pairs: bool) -> MatrixCut:
    """Return how queries, keys and values are taken apart, and by pairs of heads."""
    queries = heads // groups
    blocks = (heads // 2, groups // 2) if pairs else (1, 1)
    if queries == 1:
        return MatrixCut(groups, ((3, head_dim, blocks[0]),))
    return MatrixCut(groups, ((1, queries * head_dim, blocks[0]), (2, head_dim, blocks[1])))


def _takes(name: str, dimensions: int) -> bool:
    """Return whether a parameter is a block's matrix."""
    return dimensions == 2 and name.startswith("blocks.")
