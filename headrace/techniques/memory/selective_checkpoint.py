"""Keep the results of matrix products and attention, recompute the cheap rest in the backward pass.

Between two large products stand norms, rotations, activations and products by element: little work,
many bytes. This recomputes exactly those. The policy looks at each operation, not at modules, so it
holds for any part that fills a socket. Against full checkpointing it pays no second matrix product.
Source: PyTorch's selective activation checkpointing; arXiv 2205.05198 (section 5).
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from headrace.core.ledger import Ledger, Line
from headrace.core.technique import Card, Context, Evidence, Stage, Supported, Technique
from headrace.parallel import ring  # noqa: F401  # registers its operation
from headrace.sockets import Build, Forward

_ATEN = torch.ops.aten
MATMULS = frozenset({
    _ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.linear.default,
    _ATEN._scaled_mm.default, _ATEN._grouped_mm.default, _ATEN.convolution.default,
})  # fmt: skip
ATTENTIONS = frozenset({
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_attention_math.default,
    _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.headrace.ring_attention.default,
})  # fmt: skip
SAVED = {"matmul+attention": MATMULS | ATTENTIONS, "matmul": MATMULS, "attention": ATTENTIONS}
PRODUCT_LINES = ("qkv", "gate_up")
RECOMPUTED_LINES = ("norm", "attention_input", "qk_norm", "activation", "mask_copy")
"""Ledger lines of a block that are neither a product's nor attention's output."""


class SelectiveCheckpoint(Technique[Build]):
    """Keep matrix products and attention, recompute the cheap rest in the backward pass."""

    save: Literal["matmul+attention", "matmul", "attention"] = "matmul+attention"
    """Which operations' results are kept."""
    every: int = Field(default=1, ge=1)
    """Checkpoint every k-th block; tuner range 1 to 4."""

    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.CHECKPOINT
    composes: ClassVar[tuple[str, ...]] = ("block_forward",)
    symptoms: ClassVar[tuple[str, ...]] = ("memory:activations",)
    card: ClassVar[Card] = Card(
        buys="the memory of what stands between matrix products in every block (derived)",
        costs="recomputing it: work by element, no matrix product; more with save=attention",
        helps="when activations, not weights, fill the memory",
        hurts="when the run already fits: compiled code recomputes such work by itself",
        source="arXiv 2205.05198; torch.utils.checkpoint",
    )

    def supports(self, context: Context) -> Supported:
        """Runs everywhere."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Recomputed lines go, but for one block at a time in the backward pass."""
        gone = [*RECOMPUTED_LINES]
        gone += PRODUCT_LINES if "matmul" not in self.save else []
        gone += ["attention"] if "attention" not in self.save else []
        layers = {line.layer for line in ledger.memory.values() if line.layer is not None}
        chosen = [layer for layer in layers if layer % self.every == 0]
        drop = [f"{layer}/{name}" for layer in chosen for name in gone]
        drop = [name for name in drop if name in ledger.memory]
        one = sum(ledger.memory[name].bytes for name in drop) / max(1, len(chosen))
        stream = ledger.sizes["residual"]
        for layer in chosen:
            kept = ledger.memory[f"{layer}/residual"]
            ledger = ledger.with_line(f"{layer}/residual", replace(kept, bytes=stream))
            if "matmul" in self.save:  # the products that are added to the residual
                added = 2 * ledger.sizes.get("written", stream)
                ledger = ledger.with_line(f"{layer}/added", replace(kept, bytes=added))
        sizes, again = ledger.sizes, 0.0
        if "matmul" not in self.save:  # all but the last: nothing in the block needs its result
            again += sizes["block_flops"] - sizes["down_flops"]
        if "attention" not in self.save:
            again += sizes["attention_flops"]
        ledger = ledger.without(drop).with_line("recompute", Line(one, ("backward",)))
        return ledger.with_flops("recompute", again * len(chosen) / max(1, len(layers)))

    def apply(self, build: Build) -> None:
        """Wrap the chosen blocks."""
        counts = {"saved": 0, "not_saved": 0, "forwards": 0, "runs": 0}
        build.notes[self.name()] = counts
        kept = SAVED[self.save]

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = op in kept
            counts["saved" if keep else "not_saved"] += 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)

        def wrap(forward: Forward, layer: int) -> Forward:
            if layer % self.every:
                return forward

            def counted(x_BTD: Tensor, shared: Any) -> Tensor:
                if not torch.compiler.is_compiling():
                    counts["runs"] += 1
                return forward(x_BTD, shared)

            def checkpointed(x_BTD: Tensor, shared: Any) -> Tensor:
                if not torch.compiler.is_compiling():
                    counts["forwards"] += 1
                return checkpoint(counted, x_BTD, shared, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

            return checkpointed

        build.wrap_blocks(self.name(), wrap)

    def active(self, build: Build) -> Evidence:
        """What the policy kept, and blocks that ran a second time in the backward pass."""
        counts = build.notes[self.name()]
        again = counts["runs"] - counts["forwards"]
        ran = "in compiled code" if build.compiled else f"ran {again} blocks again"
        return Evidence(
            active=counts["saved"] > 0 and (again > 0 or bool(build.compiled)),
            detail=f"kept {counts['saved']} results and not {counts['not_saved']} others, {ran}",
            numbers={**counts, "recomputed_blocks": again},
        )
