"""Run the MLP on pieces of tokens, and each piece again in the backward pass.

The hidden features of an MLP are several times as wide as the residual stream, and it keeps them
twice: before and after the activation. On very long rows they are the largest of all activations,
though no token's depends on another's. Here a piece of `chunk_tokens` tokens at a time goes through
the MLP and only its input is kept; the backward pass runs a piece again, takes its gradient and
forgets it. So one piece of hidden features is all that is ever held, in both directions, and it is
what full checkpointing lacks on long rows: there one block's hidden features still stand whole.

It costs the first product again (the last of a piece is not run again, since nothing in the piece
needs its result), smaller products, and a gradient of the weights for each piece, which are added
up: equal to the whole MLP's but for the order of the sum. The wrap stands inside of tensor
parallelism's collectives and outside of what fills or replaces the MLP's linears.

Left out: pieces that exchange tokens (sequence parallelism's part of ALST), and the host's memory.
Source: arXiv 2506.13996 (ALST, section 3.1); the blockwise MLP of arXiv 2305.19370.

Shapes: N tokens, n tokens of a piece, D features.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.adapters import PIECES
from headrace.costs.count import holds_casts
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import Matmul, Phase, Stream, Work
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

RECOMPUTED_LINES = ("gate_up", "activation")
"""Ledger lines of a block that are as wide as the hidden features."""


class ChunkedMLP(Technique[Build]):
    """Run the MLP on pieces of tokens, and each piece again in the backward pass."""

    chunk_tokens: int = Field(default=8192, gt=0, le=1 << 24)
    """Tokens of a piece, over all rows of the micro-batch; tuner range 1024 to 65536. With fp8
    products on a GPU a multiple of 16."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.MODEL
    composes: ClassVar[tuple[str, ...]] = ("block_forward",)
    excludes: ClassVar[Mapping[str, str]] = {
        "mixture_of_experts": "a router balances whole rows, and an expert's group of a piece is a "
        "thin product (arXiv 2412.19437, eq. 17)",
        "selective_checkpoint": "it would keep the products of every piece, which are what the "
        "pieces are there to forget; full_checkpoint goes beside it",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:activations",)
    card: ClassVar[Card] = Card(
        buys=(
            "the memory of hidden features in all blocks but one piece: for a gated one 4 x "
            "ffn numbers per token and layer (derived)"
        ),
        costs=(
            "the MLP's first product once more",
            "smaller products",
        ),
        helps="rows of 100,000 tokens and more, also beside full_checkpoint, whose one block "
        "still has whole hidden features",
        hurts="short rows: pieces too small to fill the device, and the product paid again",
        source="arXiv 2506.13996; arXiv 2305.19370",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere, on micro-batches that it cuts."""
        if (plan := context.plan) is None:
            return Supported()
        tokens = plan.micro_rows * plan.data.sequence_length // plan.mesh.context
        if self.chunk_tokens < tokens:
            return Supported()
        return Unsupported(
            f"chunk_tokens = {self.chunk_tokens} cuts nothing of a micro-batch of {tokens} tokens: "
            "one piece has all hidden features at once",
            mend(f"techniques.{self.name()}.chunk_tokens={-(-tokens // 2)}"),
        )

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep the hidden features of one piece alone; run the first matmul a second time."""
        sizes = ledger.sizes
        drop = [n for n in ledger.memory if n.split("/")[-1] in RECOMPUTED_LINES]
        share = min(1.0, self.chunk_tokens / sizes["tokens"])
        hidden = sum(ledger.memory[name].bytes for name in drop) / max(1.0, sizes["layers"])
        first = "mlp.gate_up" if "mlp.gate_up/in" in sizes else "mlp.up"
        up = 2.0 * sizes["layers"] * sizes[f"{first}/in"] * sizes[f"{first}/out"]
        # A block that is run again has to give all pieces their inputs, and no more of the last.
        last = (sizes["tokens"] - 1) % self.chunk_tokens + 1
        unneeded = (up + sizes["down_flops"]) * last / sizes["tokens"]
        piece = hidden * share
        casts = (up + sizes["down_flops"]) / sizes["layers"]  # 2 FLOPs of a weight, and 2 bytes
        ledger = ledger.without(drop)
        if not holds_casts(ledger):
            for name, line in ledger.memory.items():
                if name.endswith("/weight_cast"):
                    less = replace(line, bytes=max(0.0, line.bytes - casts))
                    ledger = ledger.with_line(name, less)
        ledger = ledger.with_line("mlp_piece", Line(piece, ("turn", "backward")))
        if work := ledger.memory.get("work"):
            # Pieces come one after the other, and then the norm: the stream's gradient, and its own
            # in both precisions with the parts that it was joined of.
            stream = sizes["residual"]
            pieces = 2 * stream + share * (work.bytes - stream)
            most = max(pieces, 5 * stream - piece)
            ledger = ledger.with_line("work", replace(work, bytes=most))
        ledger = self._worked(ledger.with_flops("recompute", up), first)
        pieces = float(ceil(sizes["tokens"] / self.chunk_tokens))
        return replace(ledger, sizes={**sizes, "down_flops": unneeded, PIECES: pieces})

    def _worked(self, ledger: Ledger, first: str) -> Ledger:
        """Price smaller matmuls, the first one and the activation twice, and what joins the pieces.

        Autograd adds up the pieces' gradients of a weight's cast, and joins and parts the stream.
        """
        sizes, size = ledger.sizes, ledger.sizes["activation_bytes"]
        piece_tokens = int(min(sizes["tokens"], self.chunk_tokens))
        pieces, layers = sizes["tokens"] / piece_tokens, sizes["layers"]
        around, more = 2 * size * sizes["tokens"] * sizes["dim"], dict[str, Work]()
        phases: tuple[Phase, ...] = ("forward", "backward")
        for phase in phases:
            more[f"mlp_pieces/{phase}"] = Stream(phase, layers, around, fused=around)
        for name, piece in ledger.work.items():
            linear, _, what = name.partition("/")
            if linear in (first, "mlp.down"):
                inner, outer = sizes[f"{linear}/in"], sizes[f"{linear}/out"]
                ends = int(inner), int(outer)
                shapes = {
                    "result": (piece_tokens, ends[1], ends[0]),
                    "input": (piece_tokens, *ends),
                    "weight": (ends[1], ends[0], piece_tokens),
                }
                assert isinstance(piece, Matmul)
                more[name] = replace(piece, count=piece.count * pieces, sizes=shapes[what])
                if name == f"{first}/result":
                    more[f"{first}/again"] = replace(more[name], phase="recompute")
                if what == "result":  # the last piece of a block that runs again does not
                    last = replace(more[name], count=piece.count)
                    earlier = replace(last, count=piece.count * (pieces - 1))
                    if linear == first:
                        more[name], more[f"{linear}/last"] = earlier, last
                    else:
                        more[name], more[f"{linear}/earlier"] = last, earlier
                if what == "weight" and pieces > 1:
                    added = 3 * size * inner * outer
                    more[f"{linear}/sum"] = Stream(
                        "backward", layers * (pieces - 1), added, fused=added
                    )
            elif name == "activation/forward":
                more["activation/again"] = replace(piece, phase="recompute")
        return replace(ledger, work={**ledger.work, **more})

    def apply(self, build: Build) -> None:
        """Wrap every block's MLP; parameters keep their names."""
        pieces = build.notes[self.name()] = Pieces(self.chunk_tokens)
        for block in build.model.blocks.values():
            mlp: Any = block.mlp
            mlp.forward = pieces.around(mlp.forward)
        build.block_forward.append(self.name())

    def active(self, build: Build) -> Evidence:
        """Report the largest piece that a linear saw, that one was cut, and what was rerun."""
        if not len(build.model.blocks):
            return Evidence(None, "this rank holds no block")
        pieces: Pieces = build.notes[self.name()]
        reruns = pieces.runs - pieces.forwards
        if build.compiled:
            ran = f"the compiler traced {pieces.traced} products of at most {pieces.most} tokens, "
            ran += "to be run again"
        else:
            ran = f"{pieces.forwards} pieces of at most {pieces.most} of {pieces.tokens} tokens, "
            ran += f"and {reruns} of them again"
        return Evidence(
            active=0 < pieces.most <= self.chunk_tokens
            and pieces.cut > 0
            and (reruns > 0 or pieces.traced > 0),
            detail=ran if pieces.cut else f"{ran}; no micro-batch was cut",
            numbers={
                "largest_piece_tokens": pieces.most,
                "micro_batch_tokens": pieces.tokens,
                "calls_in_pieces": pieces.cut,
                "pieces": pieces.forwards,
                "traced_products": pieces.traced,
                "recomputed_pieces": reruns,
            },
        )


class Pieces:
    """Runs MLPs on pieces of tokens, and counts what ran.

    Args:
        size: tokens of a piece.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens = self.most = 0
        self.forwards = self.runs = self.traced = self.cut = 0
        self.contexts = {
            cut: partial(create_selective_checkpoint_contexts, partial(self._policy, cut))
            for cut in (False, True)
        }

    def around(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `forward`, [B, T, D] to [B, T, D], on pieces of tokens."""

        def run(x_nD: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                self.runs += torch.is_grad_enabled()
                self.most = max(self.most, len(x_nD))
            return forward(x_nD)

        def in_pieces(x_BTD: Tensor) -> Tensor:
            x_ND = x_BTD.flatten(0, -2)
            pieces = x_ND.split(self.size)
            if not torch.compiler.is_compiling():
                self.tokens = max(self.tokens, len(x_ND))
                self.cut += len(pieces) > 1
            out = [self._piece(run, x_nD, len(pieces) > 1) for x_nD in pieces]
            return torch.cat(out).view_as(x_BTD)

        return in_pieces

    def _piece(self, run: Callable[[Tensor], Tensor], x_nD: Tensor, cut: bool) -> Tensor:
        """Run one piece, of which the input is kept. No part of an MLP draws random numbers."""
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if torch.compiler.is_compiling():
            how["context_fn"] = self.contexts[cut]
        elif not torch.is_grad_enabled():
            return run(x_nD)
        elif torch._C._current_graph_task_id() == -1:  # not inside of a backward pass
            self.forwards += 1
        return checkpoint(run, x_nD, **how)  # type: ignore[return-value]

    def _policy(self, cut: bool, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Answer the compiler, which asks about every operation of a piece that it traces."""
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.most = max(self.most, len(args[-2]))  # the factor with a row for each token
            self.traced += 1
            self.cut += cut
        return CheckpointPolicy.PREFER_RECOMPUTE
