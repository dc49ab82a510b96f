"""Compute the gated activation of the MLP in one kernel forward and one backward.

Between the two products of a gated MLP stand silu(gate) x up and, in the backward pass, the
gradients of both, written side by side for the fused product. This is memory traffic alone, and
one kernel for the backward pass moves 5 rows where two move 8 (kernels/swiglu). The kernel keeps
nothing but the fused product itself, where eager torch also keeps silu(gate); a compiler keeps no
more. Products of matrices stay where they are, so low-rank adapters, 8-bit products and tensor
parallelism find the same linears.

On an H200 every run gained by it whose device decides, eager or compiled, at both shapes
(results/techniques.jsonl), so the plans of benchmarks/ name it. No recipe of Headrace's own does:
they run on CPUs too, which refuse it. Source: arXiv 2002.05202; Liger (arXiv 2410.10989) has the
same fusion for separate gate and up.
"""

from typing import Any, ClassVar

from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.kernels.launches import since
from headrace.kernels.swiglu import swiglu
from headrace.model.mlp import SwiGLU
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

KERNELS = ("swiglu_forward", "swiglu_backward")


class FusedSwiGLUMLP(SwiGLU):
    """It puts the kernel between the default MLP's two linears."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the MLP, [B, T, D] to [B, T, D]."""
        return self.down(swiglu(self.gate_up(x_BTD).contiguous(), self.group))


class FusedSwiglu(Technique[Build]):
    """Compute the gated activation in one kernel forward and one backward."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "fusion"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.mlp",)
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory bandwidth:elementwise",
        "kernel efficiency:elementwise",
    )
    card: ClassVar[Card] = Card(
        buys=(
            "3/8 less memory traffic in the activation's backward pass than two kernels (derived)"
        ),
        costs="a kernel of Triton's that is compiled once per dtype and size",
        helps="gated MLPs, eager or compiled, narrow or wide (H200, results/techniques.jsonl); "
        "eager runs save memory too",
        hurts="eager steps that wait for launches",
        source="arXiv 2002.05202; arXiv 2410.10989",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support gated MLPs on an NVIDIA GPU with Triton."""
        activation = context.plan.model.activation
        if activation != "swiglu":
            return Unsupported(
                f"model.activation = {activation!r} has no gate of SiLU",
                mend("model.activation=swiglu"),
            )
        return context.lacks_triton() or Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep only the result of the activation, for the next matmul."""
        ledger = ledger.made_whole("activation", lambda bytes: bytes / 2)
        # Backward it reads three streams and writes two; a compiler's two kernels move twice that.
        return ledger.made_one("activation", backward=0.5)

    def apply(self, build: Build) -> None:
        """Fill the MLP."""
        build.notes[self.name()] = since({}, "swiglu")
        build.parts.mlp = _make

    def active(self, build: Build) -> Evidence:
        """Read the kernels' launches in this run, and how many MLPs are fused."""
        mlps: list[Any] = [block.mlp for block in build.model.blocks.values()]
        if not mlps:
            return Evidence(None, "this rank holds no block")
        fused = sum(isinstance(mlp, FusedSwiGLUMLP) for mlp in mlps)
        launched = since(build.notes[self.name()], "swiglu")
        counts = [launched.get(kernel, 0) for kernel in KERNELS]
        return Evidence(
            active=fused == len(mlps) and all(counts),
            detail=f"{fused} of {len(mlps)} MLPs; launched {counts[0]} kernels forward and "
            f"{counts[1]} backward",
            numbers={"mlps": fused, "forward": counts[0], "backward": counts[1]},
        )


def _make(config: ModelConfig, layer: int) -> FusedSwiGLUMLP:
    return FusedSwiGLUMLP(config, layer)
