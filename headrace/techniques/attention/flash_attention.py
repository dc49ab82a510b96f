"""Compute attention through torch's flash kernels, a backend of scaled_dot_product_attention.

FlashAttention computes scores in blocks that fit on the chip and never writes them to memory: time
falls with the bytes that are not moved, and memory grows with the row and not with its square.
torch chooses this kernel among several by rules of its own, which change between versions and GPUs;
this names it, so that a run says what it ran. It has the causal flag and no kernel for any other
mask: documents and windows would need a dense one, so a plan with them is refused.
Source: FlashAttention-2 (arXiv 2307.08691); torch.nn.attention.SDPBackend.FLASH_ATTENTION.

Shapes: B rows, T tokens, H query heads, G key-value heads, K features of a head.
"""

from typing import ClassVar

import torch
from torch.nn.attention import SDPBackend

from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.model.attention import OneKernelSdpa, equal_scores, in_ring, kernels_of
from headrace.model.backend_needs import check_plain, lacks
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

KERNEL = "pytorch_flash::"
"""The namespace of torch's own flash kernels."""


class FlashSdpa(OneKernelSdpa):
    """A backend that allows the flash kernel of scaled_dot_product_attention and no other."""

    kernel: ClassVar[SDPBackend] = SDPBackend.FLASH_ATTENTION

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> None:
        """Check that the causal flag says everything, or raise UnsupportedError."""
        check_plain(spec.within(length))


class FlashAttention(Technique[Build]):
    """Compute attention through torch's flash kernels."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.attend",)
    blocks: ClassVar[str] = "flash"
    symptoms: ClassVar[tuple[str, ...]] = ("kernel efficiency:attention",)
    card: ClassVar[Card] = Card(
        buys="a named kernel that keeps no scores, whatever torch would choose (derived)",
        costs=(
            "nothing in memory or quality",
            "half precision and plain causal rows only",
        ),
        helps="GPUs from Ampere on where cuDNN has no kernel or a slower one",
        hurts="Hopper, where cuDNN's kernels use the asynchronous matrix units better",
        source="arXiv 2307.08691; torch.nn.attention.SDPBackend.FLASH_ATTENTION",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support NVIDIA GPUs of capability 8.0 or later, in bf16 or fp16, with a causal mask."""
        return lacks(context, self.name()) or Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep memory and work, and price attention by flash kernels."""
        return ledger.attended("flash")

    def apply(self, build: Build) -> None:
        """Fill the backend."""
        build.parts.attend = FlashSdpa()

    def active(self, build: Build) -> Evidence:
        """Read which kernels the model's own backend launches, and that it allows no other."""
        if (seen := in_ring(build.model.attend, self.blocks)) is not None:
            return seen
        dtype = torch.float16 if build.context.precision == "fp16" else torch.bfloat16
        q, k = equal_scores(build.config, build.device, dtype)
        used = [n for n in kernels_of(build.model.attend, q, k, k) if KERNEL in n]
        return Evidence(
            active=bool(used) and isinstance(build.model.attend, FlashSdpa),
            detail=f"launched {', '.join(used[:3]) or 'none of them'}",
        )
