"""The gated activation of the MLP as one kernel forward and one backward.

Between the two products of a gated MLP stand silu(gate) x up and, in the backward pass, the
gradients of both, written side by side for the fused product. This is memory traffic alone: in the
step of a 1B model inductor's kernels for it took 21 ms of 508 on an H200, about twice what the
bytes need (kernels/swiglu says why). The kernel keeps nothing but the fused product itself, where
eager torch also keeps silu(gate). Products of matrices stay where they are, so low-rank adapters,
8-bit products and tensor parallelism find the same linears. Source: arXiv 2002.05202; Liger
(arXiv 2410.10989) has the same fusion for separate gate and up.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.core.ledger import Ledger
from headrace.core.model_config import ModelConfig
from headrace.core.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.kernels.swiglu import swiglu
from headrace.model.mlp import SwiGLU
from headrace.sockets import Build


class FusedSwiGLUMLP(SwiGLU):
    """The trunk's MLP with the kernel between its two linears."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.down(swiglu(self.gate_up(x_BTD).contiguous(), self.group))


class FusedSwiglu(Technique[Build]):
    """Compute the gated activation in one kernel forward and one backward."""

    room: ClassVar[str] = "fusion"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.mlp",)
    symptoms: ClassVar[tuple[str, ...]] = ("memory bandwidth", "kernel efficiency:elementwise")
    card: ClassVar[Card] = Card(
        buys="3/8 less memory traffic in the activation's backward pass than two kernels (derived)",
        costs="a kernel of Triton's that is compiled once per dtype and size",
        helps="wide MLPs, whose activation is a visible share of the step",
        hurts="nothing known; narrow MLPs gain little",
        source="arXiv 2002.05202; arXiv 2410.10989",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """A gated MLP on an NVIDIA GPU with Triton."""
        found = context.plan.model.activation
        if found != "swiglu":
            return Unsupported(
                f"model.activation = {found!r} has no gate", 'model.activation="swiglu"'
            )
        if context.device != "cuda":
            return Unsupported(
                f"its kernels need an NVIDIA GPU, not {context.device}", "device=cuda"
            )
        if not context.has_triton:
            return Unsupported("its kernels are compiled by Triton", "pip install triton")
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Of the activation only the result is kept, for the next product."""
        return ledger.scaled(lambda name: name.endswith("/activation"), 0.5)

    def apply(self, build: Build) -> None:
        """Fill the MLP."""
        build.parts.mlp = _make

    def active(self, build: Build) -> Evidence:
        """The kernels that a block's MLP launches forward and backward."""
        mlps: list[Any] = [b.mlp for b in build.model.blocks.values()]
        mlps = [m for m in mlps if isinstance(m, FusedSwiGLUMLP)]
        if not len(build.model.blocks):
            return Evidence(None, "this rank holds no block")
        if not mlps:
            return Evidence(False, "no block has its MLP")
        dtype = torch.bfloat16 if build.context.precision == "bf16" else torch.float32
        hidden = torch.zeros(1, 2 * mlps[0].group, device=build.device, dtype=dtype)
        with torch.profiler.profile(acc_events=True) as profile:
            swiglu(hidden.requires_grad_(), mlps[0].group).sum().backward()
            torch.cuda.synchronize()
        names = {event.key for event in profile.key_averages()}
        found = {"swiglu_forward", "swiglu_backward"} & names
        return Evidence(
            active=len(found) == 2 and len(mlps) == len(build.model.blocks),
            detail=f"{len(mlps)} of {len(build.model.blocks)} blocks; a call launched "
            f"{', '.join(sorted(found)) or 'none of its kernels'}",
            numbers={"blocks": len(mlps)},
        )


def _make(config: ModelConfig, layer: int) -> FusedSwiGLUMLP:
    return FusedSwiGLUMLP(config, layer)
