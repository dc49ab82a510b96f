"""Round the operands of fp32 products to 10 mantissa bits, which matrix units multiply.

A GPU's matrix units have no fp32. TF32 is their format for it: the range of fp32, the mantissa of
fp16, sums in fp32. Weights, activations and everything that is not a matrix product stay fp32, so
no byte is saved: it is for runs that want fp32's memory layout and range, and not its last digits.
A run in half precision has few such products left (a router's scores, the delta rule of linear
attention): they are rounded too, and where there is none it is refused.
torch's float32 matmul precision is a flag of the process; it is set for the run and restored. An
operand has 3 mantissa bits more than bf16, so the band is an eighth of bf16's (derived). Left out:
TF32 in convolutions, a flag of its own. Source: NVIDIA's Ampere white paper;
torch.set_float32_matmul_precision.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.costs.work import Attention, Matmul
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

UNIT = 2.0**-10
"""Distance of neighbours among TF32 numbers between 1 and 2: TF32 has 10 bits of mantissa."""
SIZE = 256
"""Features of the probe: large enough that libraries choose the kernel that a run gets."""


@contextmanager
def tf32_matmuls() -> Iterator[None]:
    """Multiply fp32 in TF32 while it lasts."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Tf32(Technique[Build]):
    """Multiply fp32 matrices with 10 mantissa bits."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "precision"
    stage: ClassVar[Stage] = Stage.STEP
    images: ClassVar[bool] = True
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    equality: ClassVar = "approximate"
    rounds: ClassVar = "operands"
    band: ClassVar[float] = 0.05 / 2**3  # bf16's, with 3 more bits
    symptoms: ClassVar[tuple[str, ...]] = ("computation:products",)
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("tf32 matmuls",)
    card: ClassVar[Card] = Card(
        buys=(
            "fp32 products at 8 times the rate on an A100 (data sheet: 156 against 19.5 TFLOP/s)"
        ),
        costs=(
            "operands of products rounded to 11 significant bits",
            "no memory saved",
        ),
        helps="runs that need fp32 weights and activations, on Ampere or newer",
        hurts="where bf16 does: it is twice as fast again, in half the bytes (data sheet)",
        source="NVIDIA A100 data sheet; torch.set_float32_matmul_precision",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require matmuls in fp32, all or those left under autocast, on Ampere or newer."""
        if context.device != "cuda":
            return Unsupported(
                f"{context.device} has no TF32: it is a format of NVIDIA's matrix units",
                mend("device=cuda"),
                RefusalKind.DEVICE,
            )
        if context.capability is None or context.capability < (8, 0):
            return Unsupported(
                f"{context.device_name} has compute capability {context.capability_text}, and TF32 "
                "needs 8.0",
                "an Ampere GPU or newer",
                RefusalKind.DEVICE,
            )
        left = any(t.multiplies_fp32() for t in context.plan.techniques.values())
        if context.precision != "fp32" and not left:
            return Unsupported(
                f"the run multiplies in {context.precision} alone, and TF32 is for fp32 operands",
                mend("model.precision=fp32"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Price matmuls of fp32 numbers at TF32's rate; memory stays."""
        return ledger.reworked(
            lambda _, piece: (
                replace(piece, precision="tf32")
                if isinstance(piece, Matmul | Attention) and piece.precision == "fp32"
                else piece
            )
        )

    def apply(self, build: Build) -> None:
        """Add one flag of the process."""
        build.runtime.append(tf32_matmuls)

    def active(self, build: Build) -> Evidence:
        """Report a matmul in fp32, as the run makes it, of operands that need more than 10 bits."""
        with torch.no_grad(), torch.autocast(build.device.type, enabled=False):
            result = probe(build.device)
        wanted = float(SIZE)
        kept = float((result.double() / wanted - 1).abs().mean()) / UNIT
        return Evidence(
            active=result.dtype == torch.float32 and bool((result == wanted).all()),
            detail=f"ones times 1 + 2^-12 give sums that are {kept:.3g} units of TF32 above ones"
            + (": the operand was rounded" if kept == 0 else ": the operand was not rounded"),
            numbers={"units_off": kept},
        )


def probe(device: torch.device) -> Tensor:
    """Return `SIZE` sums of one times 1 + 2^-12: exactly `SIZE` where an operand is TF32."""
    matrix = torch.ones(SIZE, SIZE, device=device)
    return matrix @ (matrix + UNIT / 4)
