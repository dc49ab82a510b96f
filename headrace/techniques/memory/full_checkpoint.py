"""Keep only each block's input, and run the block again in the backward pass.

A block's forward pass leaves ten to twenty tensors of its input's size for the backward pass. This
keeps one, the input, and makes the others again when the backward pass comes to the block: memory
falls from all blocks' activations to one block's, for one more forward pass of the blocks. The last
product of a block is not run again, because nothing in the block needs its result.

What is left out: keeping every second product and attention, which costs less work for more memory
(`selective_checkpoint`), and the input's way to the host. Source: arXiv 1604.06174;
torch.utils.checkpoint without reentrance.

Shapes: B rows, T tokens, D features.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from headrace.assemble.sockets import Build, Forward
from headrace.costs.adapters import LAST, recomputed_adapter_flops
from headrace.costs.count import FP32, holds_casts
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import RERUN
from headrace.plan.symptoms import LoopChange
from headrace.plan.technique import Card, Context, Evidence, Stage, Supported, Technique

KEPT_LINE = "residual"
"""Name of the ledger line of a block's input."""


class FullCheckpoint(Technique[Build]):
    """Keep only each block's input, and run the block again in the backward pass."""

    every: int = Field(default=1, ge=1, le=100_000)
    """Checkpoint every n-th block, 1 is all; tuner range 1 to 4."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.CHECKPOINT
    composes: ClassVar[tuple[str, ...]] = ("block_forward",)
    excludes: ClassVar[Mapping[str, str]] = {
        "selective_checkpoint": "both say what a block keeps, everything but its input or a list "
        "of results, and the outer one would decide alone (torch.utils.checkpoint)",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:activations",)
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("recomputed blocks",)
    card: ClassVar[Card] = Card(
        buys=(
            "all of a block's activations but its input: memory by layers falls to one "
            "tensor of tokens x features each (derived)",
            "torchtune measured 42% off the peak (Llama-3.2-3B, one A100)",
        ),
        costs=(
            "one more forward pass of the blocks, a quarter of a step's work again (derived)",
            "torchtune measured 21% fewer tokens/s",
        ),
        helps="long rows and deep models that do not fit with selective_checkpoint",
        hurts=(
            "what fits without it: the work is paid at every step; eager steps that wait for "
            "launches"
        ),
        source="arXiv 1604.06174; torch.utils.checkpoint; torchtune, README",
    )

    def supports(self, context: Context) -> Supported:
        """Run everywhere."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep the input of each chosen block; one block at a time has the rest again."""
        layers = {line.layer for line in ledger.memory.values() if line.layer is not None}
        chosen = [layer for layer in layers if layer % self.every == 0]
        drop = [
            name
            for name, line in ledger.memory.items()
            if line.layer in chosen
            and name.split("/")[1] != KEPT_LINE
            and not (name.endswith("/weight_cast") and holds_casts(ledger))
        ]
        stream, sizes = ledger.sizes["residual"], ledger.sizes
        entered = stream * sizes["stream_bytes"] / sizes["activation_bytes"]
        recomputed = sum(ledger.memory[name].bytes for name in drop)
        if sizes["on_gpu"] and sizes["activation_bytes"] != FP32:
            recomputed += stream * len(
                chosen
            )  # the norm's fp32 copy does not stand for the input here
        for layer in chosen:
            kept = ledger.memory[f"{layer}/residual"]
            recomputed += kept.bytes - entered
            ledger = ledger.with_line(f"{layer}/residual", replace(kept, bytes=entered))
        one = Line(recomputed / max(1, len(chosen)), ("turn", "backward"))
        work = sizes["block_flops"] + sizes["attention_flops"] - sizes["down_flops"]
        work += recomputed_adapter_flops(ledger, "down", "up")
        part = len(chosen) / max(1, len(layers))
        # The last product and the addition after it: nothing needs their result, nor the last
        # piece of an MLP that runs in pieces.
        ledger = (
            ledger.without(drop)
            .with_line("recompute", one)
            .with_host("full_checkpoint/blocks", part * sizes["layers"], RERUN)
            .recompute(
                lambda piece: {"mlp.down/result": 0.0, LAST: 0.0, "residual_out/forward": 0.0}.get(
                    piece, 0.0 if piece.endswith("/last") else part
                )
            )
        )
        return ledger.with_flops("recompute", work * len(chosen) / max(1, len(layers)))

    def apply(self, build: Build) -> None:
        """Wrap the chosen blocks."""
        counts = {"forwards": 0, "runs": 0, "traced": 0}
        build.notes[self.name()] = counts

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            """Answer the compiler, which asks about every operation that it traces."""
            counts["traced"] += 1
            return CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)

        def wrap(forward: Forward, layer: int) -> Forward:
            if layer % self.every:
                return forward

            def counted(x_BTD: Tensor, shared: Any) -> Tensor:
                if not torch.compiler.is_compiling():
                    counts["runs"] += 1
                return forward(x_BTD, shared)

            def checkpointed(x_BTD: Tensor, shared: Any) -> Tensor:
                how: dict[str, Any] = {"use_reentrant": False}
                if torch.compiler.is_compiling():
                    how["context_fn"] = contexts
                else:
                    counts["forwards"] += 1
                return checkpoint(counted, x_BTD, shared, **how)  # type: ignore[return-value]

            return checkpointed

        build.wrap_blocks(self.name(), wrap)

    def active(self, build: Build) -> Evidence:
        """Report blocks that ran twice, or operations that the compiler was asked to rerun."""
        counts = build.notes[self.name()]
        if not any(int(name) % self.every == 0 for name in build.model.blocks):
            return Evidence(None, "this rank holds no block that is checkpointed")
        reruns = counts["runs"] - counts["forwards"]
        return Evidence(
            active=(counts["traced"] if build.compiled else reruns) > 0,
            detail=f"the compiler was told to run {counts['traced']} traced operations again"
            if build.compiled
            else f"kept the inputs of {counts['forwards']} blocks and ran {reruns} of them again",
            numbers={**counts, "recomputed_blocks": reruns},
        )
