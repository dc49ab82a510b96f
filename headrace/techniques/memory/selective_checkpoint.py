"""Keep the results of matrix products and attention, recompute the cheap rest in the backward pass.

Between two large products stand norms, rotations, activations and products by element: little work,
many bytes. This recomputes exactly those. The policy looks at each operation, not at modules, so it
holds for any part that fills a socket. Against full checkpointing it pays no second matrix product.

What is kept is a named policy (`save`) or a list of operations. `every_matmul` keeps every k-th
product of a block and runs the others again: half of their bytes with k = 2 for the work of the
output projection, since the last product of a block is never run again. torchtitan's default is 2.
`wide_every` does so with the products that widen, as gate and up: the largest of a block's results,
kept in every k-th block alone. So memory and time trade in steps of one block. An adapter's second
product, whose sum is short beside its result, always runs again: it is cheap and as large as what
it corrects.
Attention counts as one operation, whichever kernel computes it: torch's own, FlexAttention, or one
that says so in its name, as this project's do.
Source: PyTorch's selective activation checkpointing; arXiv 2205.05198 (section 5).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from headrace.assemble.sockets import Build, Forward
from headrace.core.remedy import mend
from headrace.core.strict import Wrong
from headrace.costs.adapters import LAST, recomputed_adapter_flops
from headrace.costs.count import block_linears, holds_casts
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import CHOSEN
from headrace.plan.plan import ATTENDS, Plan
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

KeptOperation = Literal["mm", "bmm", "addmm", "scaled_mm", "grouped_mm", "convolution", "attention"]
OPERATIONS: dict[str, KeptOperation] = {
    "aten::mm": "mm",
    "aten::linear": "mm",
    "aten::bmm": "bmm",
    "aten::addmm": "addmm",
    "aten::_scaled_mm": "scaled_mm",
    "aten::_scaled_mm_v2": "scaled_mm",
    "aten::_grouped_mm": "grouped_mm",
    "aten::_scaled_grouped_mm": "grouped_mm",
    "aten::_scaled_grouped_mm_v2": "grouped_mm",
    "headrace::looped_linear": "grouped_mm",
    "aten::convolution": "convolution",
    "headrace::causal_convolution": "convolution",
}
"""torch's name of an operation -> ours; attention goes by its name, see `operation_of`."""
MATMULS: frozenset[KeptOperation] = frozenset(OPERATIONS.values())
LINEAR: frozenset[KeptOperation] = frozenset({"mm", "addmm"})
ATTENTION: frozenset[KeptOperation] = frozenset({"attention"})
SAVED = {"matmul+attention": MATMULS | ATTENTION, "matmul": MATMULS, "attention": ATTENTION}
BLOCK_MATMULS = ("qkv", "out", "gate_up", "down")
"""A block's matmuls in order; the second and the last are added to the residual."""
MATMUL_LINES = ("qkv", "gate_up")
RECOMPUTED_LINES = (
    "norm",
    "attention_input",
    "qk_norm",
    "value",
    "stream",
    "activation",
    "mask_copy",
)
"""Ledger lines of a block that are neither a matmul's nor attention's output."""


WIDE = 2
"""Ratio of a matmul's output width to its input width above which the matmul is wide."""
NEGLIGIBLE = 16
"""Ratio of two widths of a matmul above which it is not counted as one of a block's matmuls. With
an output so much wider than its input, its sum is so short that running it again costs next to
nothing. With one so much narrower, its result is so small that keeping it costs next to nothing."""
MIXES = "parts.mixer"
"""The socket whose owner mixes tokens; one that owns `ATTENDS` too does without attention."""
CAPS = "logit_soft_cap"
"""The technique under which torch's own attention, which has no cap, is done by plain matmuls."""
PARTS = frozenset({MIXES, "parts.mlp", "linear"})
"""Sockets whose fillers replace a block's matmuls by others."""


def widening(op: Any, args: tuple[Any, ...]) -> float:
    """Return how many times as wide as its input a matmul's result is."""
    name = str(op.name())
    factors = args[1:] if "aten::addmm" in name else args  # the first is what it is added to
    x, weight = [a for a in factors if isinstance(a, Tensor) and a.ndim > 1][:2]
    width = weight.size(0 if "aten::linear" in name else -1)
    return width / x.size(-1)


@cache
def operation_of(op: Any) -> KeptOperation | None:
    """Return which operation of the save list torch's `op` is; None for all others.

    Attention is every forward operation that is called so: torch's `_scaled_dot_product_*` and
    `_*_attention_forward`, the higher-order `flex_attention`, `_varlen_attn`, kernels of other
    packages and of this project (`headrace::ring_attention`).
    """
    name = op.name() if callable(getattr(op, "name", None)) else str(op)
    if operation := OPERATIONS.get(name.split(".")[0]):
        return operation
    forward = "backward" not in name and "bwd" not in name
    return "attention" if forward and ("attention" in name or "attn" in name) else None


class SelectiveCheckpoint(Technique[Build]):
    """Keep matrix products and attention, recompute the cheap rest in the backward pass."""

    save: Literal["matmul+attention", "matmul", "attention"] = "matmul+attention"
    """Which operations' results are kept, by the policy's name."""
    operations: tuple[KeptOperation, ...] = ()
    """Or by a list of operations, over `save`; a linear is mm without a bias and addmm with one."""
    every_matmul: int = Field(default=1, ge=1, le=100_000)
    """Keep every k-th matrix product of a block; tuner range 1 to 2."""
    wide_every: int = Field(default=1, ge=1, le=100_000)
    """Keep wide products in every k-th block only; tuner range 1 to 4."""
    every: int = Field(default=1, ge=1, le=100_000)
    """Checkpoint every k-th block; tuner range 1 to 4."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.CHECKPOINT
    composes: ClassVar[tuple[str, ...]] = ("block_forward",)
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:activations",)
    card: ClassVar[Card] = Card(
        buys="the memory of what stands between matrix products in every block (derived)",
        costs=(
            "recomputing it: work by element, no matrix product",
            "more with save=attention",
        ),
        helps="when activations, not weights, fill the memory",
        hurts=(
            "when the run already fits: compiled code recomputes such work by itself; eager "
            "steps that wait for launches"
        ),
        source="arXiv 2205.05198; torch.utils.checkpoint",
    )

    @model_validator(mode="after")
    def _check(self) -> "SelectiveCheckpoint":
        if self.every_matmul > 1 and not self.kept() & MATMULS:
            raise Wrong(
                f"every_matmul = {self.every_matmul} is a share of the products that are kept, and "
                "this policy keeps none; the nearest is every_matmul=1",
                mend("techniques.selective_checkpoint.every_matmul=1"),
            )
        return self

    def kept(self) -> frozenset[KeptOperation]:
        """Return the save list."""
        return frozenset(self.operations) or SAVED[self.save]

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require that blocks have what is kept: attention, and wide matmuls for `wide_every`."""
        plan, me = context.plan, f"techniques.{self.name()}"
        if self.kept() == ATTENTION and (why := self._lacks_attention(plan)):
            return Unsupported(
                f"what it keeps is attention alone, and {why}",
                mend(
                    f"{me}.save=matmul+attention", f"{me}.operations=[]" if self.operations else ""
                ),
            )
        if self.wide_every > 1 and not self._keeps_wide(plan):
            return Unsupported(
                f"no product that it keeps of this model's blocks is over {WIDE} times as wide as "
                "its input",
                mend(f"{me}.wide_every=1"),
            )
        return Supported()

    def _lacks_attention(self, plan: Plan) -> str:
        """Return why no checkpointed block has an operation of attention, or ""."""
        for name, other in plan.techniques.items():
            if {MIXES, ATTENDS} <= {*other.claims}:
                return f"{name} has none"
            convolves = getattr(other, "convolves", None)
            if convolves and all(map(convolves, range(0, plan.model.layers, self.every))):
                return f"{name} has none in the blocks that every = {self.every} checkpoints"
        return f"{CAPS} makes plain products of it" if _is_plain_matmuls(plan) else ""

    def _keeps_wide(self, plan: Plan) -> bool:
        """Return whether it keeps a wide matmul, or what stands beside it leaves that open."""
        if plan.model.pretrained:  # whose shape is known later
            return True
        ends = list(block_linears(plan.model).values())
        beside = [t for t in plan.techniques.values() if t.equality != "exact"]
        if not _is_plain_matmuls(plan) and not any(
            PARTS & {*t.claims, *t.composes} for t in beside
        ):
            names = {"mm", "addmm"} if plan.model.bias or plan.model.qkv_bias else {"mm"}
            ends = ends[:: self.every_matmul] if self.kept() & names else []
        wide = any(outer > WIDE * inner for inner, outer in ends)
        return wide and bool(self.kept() & MATMULS)

    def predict(self, ledger: Ledger) -> Ledger:
        """Drop recomputed lines, but for one block at a time in the backward pass."""
        layers = {line.layer for line in ledger.memory.values() if line.layer is not None}
        chosen = sorted(layer for layer in layers if layer % self.every == 0)
        stream, dropped, recomputed = ledger.sizes["residual"], 0.0, 0.0
        entered = stream * ledger.sizes["stream_bytes"] / ledger.sizes["activation_bytes"]
        lost = ("up",) if self.kept() & LINEAR else ("down", "up")
        corrected = recomputed_adapter_flops(ledger, *lost)
        for layer in chosen:
            kept = self._kept_matmuls(ledger.sizes, layer)
            if layer == 0:
                ledger = _as_the_next(ledger, [*kept, *(self.kept() & ATTENTION)])
            gone = [*RECOMPUTED_LINES, *(name for name in MATMUL_LINES if name not in kept)]
            gone += ["attention"] if "attention" not in self.kept() else []
            gone += [] if holds_casts(ledger) else ["weight_cast"]
            gone += [] if self.kept() & LINEAR else ["adapters"]
            drop = [name for name in (f"{layer}/{g}" for g in gone) if name in ledger.memory]
            dropped += sum(ledger.memory[name].bytes for name in drop)
            recomputed += (self._rerun_flops(ledger.sizes, kept) + corrected) / len(layers)
            added = ledger.sizes.get("written", stream)
            line = ledger.memory[f"{layer}/residual"]
            ledger = ledger.without(drop)
            ledger = ledger.with_line(f"{layer}/residual", replace(line, bytes=entered))
            for name in sorted({"out", "down"} & kept):  # products that the residual adds up
                ledger = ledger.with_line(f"{layer}/{name}", replace(line, bytes=added))
        ledger = ledger.recompute(partial(self._rerun_share, ledger.sizes, chosen, len(layers)))
        one = dropped / max(1, len(chosen))
        ledger = ledger.with_line("recompute", Line(one, ("turn", "backward")))
        blocks = ledger.sizes["layers"] * len(chosen) / max(1, len(layers))  # not copies in flight
        ledger = ledger.with_host("selective_checkpoint/blocks", blocks, CHOSEN)
        return ledger.with_flops("recompute", recomputed)

    def _kept_matmuls(self, sizes: dict[str, float], layer: int) -> set[str]:
        """Return which of a dense block's four matmuls are kept; their linears are mm or addmm."""
        if not self.kept() & LINEAR:
            return set()
        kept = {name for place, name in enumerate(BLOCK_MATMULS) if place % self.every_matmul == 0}
        if layer % self.wide_every == 0:
            return kept
        ends = _ends(sizes)
        return {name for name in kept if ends[name][1] <= WIDE * ends[name][0]}

    def _rerun_share(
        self, sizes: dict[str, float], chosen: list[int], layers: int, piece: str
    ) -> float:
        """Return the share of a forward piece's kernels that run again: all but what is kept."""
        name, _, what = piece.partition("/")
        if name == "attention":
            return 0.0 if "attention" in self.kept() else len(chosen) / layers
        if name == "residual_out" or (what == "adapter_down" and self.kept() & LINEAR):
            return 0.0
        matmul = name.rpartition(".")[2].replace("up", "gate_up").replace("gate_gate", "gate")
        if matmul not in BLOCK_MATMULS or (what.startswith("adapter") and piece != LAST):
            return len(chosen) / layers
        lost = [layer for layer in chosen if matmul not in self._kept_matmuls(sizes, layer)]
        return len(lost) / layers if matmul != BLOCK_MATMULS[-1] else 0.0

    def _rerun_flops(self, sizes: dict[str, float], kept: set[str]) -> float:
        """Return FLOPs per token of what blocks recompute: not the last, which nothing needs."""
        flops = sizes["attention_flops"] if "attention" not in self.kept() else 0.0
        if not kept:
            return flops + sizes["block_flops"] - sizes["down_flops"]
        ends = _ends(sizes)
        lost = [ends[name] for name in BLOCK_MATMULS[:-1] if name not in kept]
        return flops + sum(2 * sizes["layers"] * inner * outer for inner, outer in lost)

    def apply(self, build: Build) -> None:
        """Wrap the chosen blocks."""
        counts = {"saved": 0, "not_saved": 0, "narrowed": 0, "forwards": 0, "runs": 0}
        build.notes[self.name()] = counts
        wide, narrow = (self._contexts(counts, narrow) for narrow in (False, True))

        def wrap(forward: Forward, layer: int) -> Forward:
            if layer % self.every:
                return forward
            # A number that the compiler sees: blocks that keep different things share no graph.
            is_narrow = layer % self.wide_every > 0

            def counted(x_BTD: Tensor, shared: Any) -> Tensor:
                if not torch.compiler.is_compiling():
                    counts["runs"] += 1
                return forward(x_BTD, shared)

            def checkpointed(x_BTD: Tensor, shared: Any) -> Tensor:
                if not torch.compiler.is_compiling():
                    counts["forwards"] += 1
                contexts = narrow if is_narrow else wide
                return checkpoint(counted, x_BTD, shared, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

            return checkpointed

        build.wrap_blocks(self.name(), wrap)

    def _contexts(self, counts: dict[str, int], narrow: bool) -> Callable[[], Any]:
        """Return what torch enters around a block and around its recomputation."""
        kept = self.kept()

        def contexts() -> Any:
            matmuls = [0, 0]  # of this block: forward and, in torch 2.11, once more going back

            def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
                operation = operation_of(op)
                keep = operation in kept
                asked = operation in LINEAR or (narrow and operation in MATMULS)
                wider = widening(op, args) if asked else 1.0
                beside = operation in LINEAR and not 1 / NEGLIGIBLE <= wider <= NEGLIGIBLE
                if beside:
                    keep = keep and wider < 1
                elif operation in MATMULS:
                    keep = keep and matmuls[ctx.is_recompute] % self.every_matmul == 0
                    if keep and narrow and wider > WIDE:
                        keep = False
                        counts["narrowed"] += not ctx.is_recompute
                    matmuls[ctx.is_recompute] += 1
                counts["saved" if keep else "not_saved"] += not ctx.is_recompute
                return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

            return create_selective_checkpoint_contexts(policy)

        return contexts

    def active(self, build: Build) -> Evidence:
        """Report what the policy kept, and blocks that ran a second time in the backward pass."""
        counts = build.notes[self.name()]
        reruns = counts["runs"] - counts["forwards"]
        ran = "in compiled code" if build.compiled else f"ran {reruns} blocks again"
        layers = [int(name) for name in build.model.blocks if int(name) % self.every == 0]
        narrow = any(layer % self.wide_every for layer in layers)
        return Evidence(
            active=counts["saved"] > 0
            and (reruns > 0 or bool(build.compiled))
            and (counts["narrowed"] > 0) == narrow,
            detail=f"kept {counts['saved']} results and not {counts['not_saved']} others, "
            f"{counts['narrowed']} of them for their width, {ran}",
            numbers={**counts, "recomputed_blocks": reruns},
        )


def _as_the_next(ledger: Ledger, names: Iterable[str]) -> Ledger:
    """Make lines of the first block as large as the next one's: what is listed is kept there too.

    Nothing before a first adapter is needed for a gradient.
    """
    for name in names:
        own, other = (ledger.memory.get(f"{layer}/{name}") for layer in (0, 1))
        if own is not None and other is not None and own.bytes < other.bytes:
            ledger = ledger.with_line(f"0/{name}", replace(own, bytes=other.bytes))
    return ledger


def _is_plain_matmuls(plan: Plan) -> bool:
    """Return whether attention is plain matmuls."""
    on = plan.techniques
    return CAPS in on and not any(ATTENDS in other.claims for other in on.values())


def _ends(sizes: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return the features in and out of each matmul of a block."""
    names = [name[:-3] for name in sizes if name.endswith("/in")]
    ends = {n.split(".")[1]: (sizes[f"{n}/in"], sizes[f"{n}/out"]) for n in names}
    return ends | {"gate_up": ends.get("gate_up") or ends["up"]}
