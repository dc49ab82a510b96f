"""Compute every norm of the residual stream in one kernel, with the addition before it.

A norm is memory traffic and a sum. Eager torch copies a bf16 input to fp32, normalises the copy,
rounds the result, and keeps the copy for the backward pass. The kernel reads bf16, computes in fp32
inside of the processor and writes bf16; it keeps its input and one fp32 number per row, so a norm
holds 4 bytes per feature where eager torch holds 6. The backward pass reads input and gradient once
for both gradients (kernels/rms_norm says how the weight's is added up).

A block adds what its mixer wrote to the residual stream and normalises the sum. That norm gets both
(`model.norm.add_then`), and its kernel writes sum and result: the sum is read once less. Going
back, the gradient along the stream is added to the norm's own before either is written. So of a
block's two norms the second is joined to its addition. The other addition ends the block, and what
follows is the next block's: joined too, a block would hand on two tensors, and whatever wraps,
checkpoints or sends one would have to know. Left out too are the norms of queries and keys
(`fused_rope` has them).

A compiler sees operations without parts, where it joins its own norm to its neighbours. It was
expected to win by that and does not: on an H200 the compiled plans of both shapes gained a little
and kept their memory (results/techniques.jsonl; with `fused_rope`, peers.jsonl). It is on where a
plan names it. No recipe of Headrace's own does: they run on CPUs too, which refuse it. The tuner
keeps what it measures to gain more than its margin; beside a compiler it found no difference yet
that it could tell from none (tuner.jsonl).
Source: arXiv 1910.07467; arXiv 2410.10989.
"""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger
from headrace.kernels.launches import since
from headrace.kernels.rms_norm import rms_norm, rms_norm_add
from headrace.model.norm import RMSNorm
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

KERNELS = (
    "rms_norm_forward",
    "rms_norm_backward",
    "rms_norm_add_forward",
    "rms_norm_add_backward",
)


class FusedNorm(RMSNorm):
    """It computes the default norm in one kernel; its parameter has the same name."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + delta, and that sum normalised."""
        return rms_norm_add(x, delta, self.weight, self.eps)


class FusedRmsNorm(Technique[Build]):
    """Compute each norm of the residual stream in one kernel, with the addition before it."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "fusion"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.norm",)
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory bandwidth:elementwise",
        "kernel efficiency:elementwise",
    )
    card: ClassVar[Card] = Card(
        buys=(
            "a third of the memory that a norm keeps under bf16, the traffic of an fp32 copy, "
            "and in one norm of a block's two a read of the sum and a pass over two gradients "
            "(derived)"
        ),
        costs=(
            "a kernel of Triton's that is compiled once per dtype and size",
            "a compiler cannot fuse other work into it",
        ),
        helps="runs in half precision: eager ones plainly, compiled ones by little or nothing "
        "(H200, results/techniques.jsonl, tuner.jsonl)",
        hurts="eager steps that wait for launches",
        source="arXiv 1910.07467; arXiv 2410.10989",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support root-mean-square norms on an NVIDIA GPU with Triton."""
        norm = context.plan.model.norm
        if norm != "rms_norm":
            return Unsupported(
                f"model.norm = {norm!r} is not an RMS norm", mend("model.norm=rms_norm")
            )
        return context.lacks_triton() or Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep a norm's result and a number of each row, beside its input, the residual stream."""
        sizes = ledger.sizes
        kept = 2 * (sizes["residual"] + FP32 * sizes["tokens"])
        ledger = ledger.made_whole("norm", lambda _: kept)
        final = replace(ledger.memory["final_norm"], bytes=2 * sizes["residual"])
        ledger = ledger.with_line("final_norm", final)
        ledger = replace(ledger, sizes={**sizes, "norm_products": 0.0})
        return ledger.made_one("norms").made_one("residual", launch=0.0)

    def apply(self, build: Build) -> None:
        """Fill the norm."""
        build.notes[self.name()] = since({}, "rms_norm")
        build.parts.norm = _make

    def active(self, build: Build) -> Evidence:
        """Read the kernels' launches in this run, and how many norms are fused.

        A rank without blocks, the end of a pipeline, has no addition before its norm.
        """
        model = build.model
        norms: list[Any] = [n for b in model.blocks.values() for n in (b.mixer_norm, b.mlp_norm)]
        norms += [] if model.norm is None else [model.norm]
        fused = sum(isinstance(norm, FusedNorm) for norm in norms)
        launched = since(build.notes[self.name()], "rms_norm")
        counts = [launched.get(kernel, 0) for kernel in KERNELS]
        forward, backward = counts[0] + counts[2], counts[1] + counts[3]
        wanted = counts if len(model.blocks) else counts[:2]
        return Evidence(
            active=bool(norms) and fused == len(norms) and all(wanted),
            detail=f"{fused} of {len(norms)} norms; launched {forward} kernels forward and "
            f"{backward} backward, {counts[2]} and {counts[3]} of them with an addition",
            numbers={
                "norms": fused,
                "forward": forward,
                "backward": backward,
                "additions": counts[2],
                "additions_backward": counts[3],
            },
        )


def _make(config: ModelConfig) -> FusedNorm:
    return FusedNorm(config.dim, config.norm_eps)
