"""Compute norms and gated activations by Liger's Triton kernels.

Liger is a published, widely used set of the same fusions (arXiv 2410.10989): a norm that keeps its
input and one number per row, and silu(gate) x up in one kernel that keeps its input alone.
It fills the two sockets that `fused_rms_norm` and `fused_swiglu` fill, so a plan takes these or
those, and one can be measured against the other. Parameters keep their names and the fused layout:
Liger's kernel for gate and up side by side reads our alternating groups as they are, one group a
row (kernels/liger says how each kernel is called).

Liger adds up a norm's weight gradient in as many parts as the GPU has processors, so its last bits
differ between GPUs. Left out: its rotation, which wants another layout of heads, and its fused
losses. Its fused linear cross-entropy gave wrong losses with ignored targets when compiled
(Liger-Kernel issue 1338), and `chunked_cross_entropy` does that work here.
"""

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger
from headrace.costs.work import EAGER
from headrace.kernels.launches import since
from headrace.kernels.liger import rms_norm, silu_mul
from headrace.model.mlp import SwiGLU
from headrace.model.norm import RMSNorm
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

OLDEST = (0, 8, 5)
"""The release that these calls were written for."""
INSTALL = "pip install 'headrace[kernels]'"
KERNELS = (
    "liger_rms_norm",
    "liger_rms_norm_backward",
    "liger_silu_mul",
    "liger_silu_mul_backward",
)

NORM_ROW = 22e3
"""Bytes of traffic that take as long as a row of a norm's backward pass: each processor goes
through its rows one after the other. Fitted to one row of techniques.jsonl, 160m in the recipe."""


class LigerNorm(RMSNorm):
    """It computes the default norm by Liger's kernel; its parameter has the same name."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


class LigerMLP(SwiGLU):
    """It puts Liger's kernel between the default MLP's two linears."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the MLP, [B, T, D] to [B, T, D]."""
        return self.down(silu_mul(self.gate_up(x_BTD), self.group))


class LigerKernels(Technique[Build]):
    """Compute norms and gated activations by Liger's Triton kernels."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "fusion"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.norm", "parts.mlp")
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory bandwidth:elementwise",
        "kernel efficiency:elementwise",
    )
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("Liger kernels",)
    card: ClassVar[Card] = Card(
        buys=(
            "memory of norms and activations: the fp32 copies of norms' inputs and silu(gate) "
            "are not kept (derived)"
        ),
        costs=(
            "one more package",
            "kernels that are compiled once per dtype and size",
            "a compiler cannot fuse other work into them",
        ),
        helps="eager runs, and as a yardstick for other kernels",
        hurts="compiled narrow models: at 160m the compiler's own norms with fused_swiglu are "
        "faster; at 1b there is no difference (H200, results/techniques.jsonl)",
        source="arXiv 2410.10989; liger-kernel 0.8.5",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support RMS norms and a gated MLP on an NVIDIA GPU, with the package."""
        model = context.plan.model
        if model.norm != "rms_norm":
            return Unsupported(
                f"model.norm = {model.norm!r} is not an RMS norm", mend("model.norm=rms_norm")
            )
        if model.activation != "swiglu":
            return Unsupported(
                f"model.activation = {model.activation!r} has no gate of SiLU",
                mend("model.activation=swiglu"),
            )
        if (lacks := context.lacks_triton()) is not None:
            return lacks
        try:
            installed = version("liger-kernel")
        except PackageNotFoundError:
            return Unsupported("liger-kernel is not installed", INSTALL, RefusalKind.PACKAGE)
        if _release(installed) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            return Unsupported(
                f"liger-kernel {installed} is older than {oldest}", INSTALL, RefusalKind.VERSION
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep input, result and a number of norms, and only the result of the activation."""
        sizes = ledger.sizes
        kept = 2 * (sizes["residual"] + FP32 * sizes["tokens"])
        ledger = ledger.made_whole("norm", lambda _: kept)
        ledger = ledger.made_whole("activation", lambda bytes: bytes / 2)
        final = replace(ledger.memory["final_norm"], bytes=2 * sizes["residual"])
        ledger = ledger.with_line("final_norm", final)
        ledger = replace(ledger, sizes={**sizes, "norm_products": 0.0})
        ledger = ledger.made_one("norms").made_one("activation", backward=0.5)
        for name in ("residual", "residual_out"):
            ledger = ledger.made_one(name, launch=EAGER)
        rows = NORM_ROW * sizes["tokens"]
        return ledger.reworked(
            lambda name, piece: (
                piece.with_bytes(lambda bytes: max(bytes, rows))
                if name == "norms/backward"
                else piece
            )
        )

    def apply(self, build: Build) -> None:
        """Fill norm and MLP."""
        build.notes[self.name()] = since({}, "liger")
        build.parts.norm, build.parts.mlp = _norm, _mlp

    def active(self, build: Build) -> Evidence:
        """Read the kernels' launches in this run, and how many norms and MLPs are Liger's."""
        model = build.model
        blocks: list[Any] = list(model.blocks.values())
        parts = [part for b in blocks for part in (b.mixer_norm, b.mlp_norm, b.mlp)]
        parts += [] if model.norm is None else [model.norm]
        filled = sum(isinstance(part, LigerNorm | LigerMLP) for part in parts)
        launched = since(build.notes[self.name()], "liger")
        counts = {kernel: launched.get(kernel, 0) for kernel in KERNELS}
        wanted = KERNELS if blocks else KERNELS[:2]
        return Evidence(
            active=bool(parts) and filled == len(parts) and all(counts[k] for k in wanted),
            detail=f"{filled} of {len(parts)} norms and MLPs; launched "
            + ", ".join(f"{kernel} {count}" for kernel, count in counts.items()),
            numbers={"parts": filled, **counts},
        )


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _norm(config: ModelConfig) -> LigerNorm:
    return LigerNorm(config.dim, config.norm_eps)


def _mlp(config: ModelConfig, layer: int) -> LigerMLP:
    return LigerMLP(config, layer)
