"""Multiply in bf16 over fp32 weights (autocast).

bf16 has the range of fp32 and 8 significant bits. Matrix units multiply it at a multiple of fp32's
rate and add up in fp32, and activations take half the bytes. torch's autocast casts the operands of
products; the residual stream between blocks is bf16 too. Islands stay fp32: weights, gradients and
optimizer, the statistics of norms, softmax, the router's choice, logits and the loss. What a CPU
gains depends on its instructions (AMX, AVX512-BF16), which the evidence names; without them it is
slower than fp32. This rewrites `model.precision`, so everything else follows from it, the
prediction too; on a GPU `auto` has the same arithmetic. Source: arXiv 1905.12322.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.kernels.cpu_units import bf16_units
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

AMPERE = (8, 0)
"""Compute capability of the first GPUs that multiply bf16."""


class Bf16Autocast(Technique[Build]):
    """Multiply in bf16 over fp32 weights."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "precision"
    halves: ClassVar[bool] = True
    stage: ClassVar[Stage] = Stage.DESIGN
    claims: ClassVar[tuple[str, ...]] = ("config.precision",)
    equality: ClassVar = "approximate"
    rounds: ClassVar = "operands"
    band: ClassVar[float] = 0.05  # L2 of a gradient from fp32's, as the suite holds bf16 to
    symptoms: ClassVar[tuple[str, ...]] = ("computation:products", "memory capacity:activations")
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("bf16 autocast",)
    card: ClassVar[Card] = Card(
        buys=(
            "half the bytes of activations (derived)",
            "products at 16 times fp32's rate on an A100 (data sheet: 312 against 19.5 TFLOP/s)",
        ),
        costs=(
            "operands of 8 significant bits",
            "a cast of every weight, kept for the backward pass",
        ),
        helps="every GPU since Ampere; CPUs with AMX or AVX512-BF16",
        hurts="other CPUs, which emulate it slowly",
        source="arXiv 1905.12322; NVIDIA A100 data sheet",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.precision`."""
        return {"model.precision": "bf16"}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run on GPUs since Ampere, and on CPUs, if slowly."""
        capability = context.capability
        if context.device == "cuda" and (capability is None or capability < AMPERE):
            return Unsupported(
                f"{context.device_name} has compute capability {context.capability_text}, and bf16 "
                "products need 8.0",
                mend(f"-{self.name()}", "+fp16_loss_scaling", "model.precision=fp16"),
                RefusalKind.DEVICE,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger of the rewritten key, which it already is."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan's key is in force."""
        assert build.context.precision == "bf16"

    def active(self, build: Build) -> Evidence:
        """Report the dtype that a block's matrix gives back when multiplied as in the run."""
        blocks = build.model.blocks
        if not len(blocks):
            return Evidence(None, "this rank holds no block")
        weight = next(p for p in next(iter(blocks.values())).parameters() if p.ndim == 2).detach()
        local: Tensor = getattr(weight, "_local_tensor", weight)
        with torch.no_grad(), build.autocast():
            result = F.linear(torch.ones(1, local.size(-1), device=build.device), local)
        stream = build.model.residual_dtype
        return Evidence(
            active=result.dtype == stream == torch.bfloat16
            and build.plan.model.precision == "bf16",
            detail=f"a block's product of fp32 operands is {_name(result.dtype)}, and so is the "
            f"stream between blocks: {_name(stream)}; {_units(build)}",
            numbers={"product_bytes": result.dtype.itemsize},
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _units(build: Build) -> str:
    """Return what multiplies bf16 here."""
    if build.device.type != "cpu":
        return f"multiplied by {build.context.device_name}"
    if present := bf16_units():
        return f"this CPU has {' and '.join(present)}"
    return "this CPU emulates bf16, which is slower than fp32"
