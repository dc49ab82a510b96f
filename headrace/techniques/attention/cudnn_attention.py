"""Compute attention through cuDNN's fused kernels, by a backend of scaled_dot_product_attention.

On Hopper cuDNN's kernels use the asynchronous matrix units better than the flash kernels that torch
chooses by default. The call, its numerics and its memory stay the same.
Source: torch.nn.attention.SDPBackend.CUDNN_ATTENTION; cuDNN frontend's fused attention.
"""

from typing import ClassVar

import torch
from torch.nn.attention import SDPBackend

from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.model.attention import OneKernelSdpa, equal_scores, in_ring, kernels_of
from headrace.model.backend_needs import lacks
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)


class CudnnSdpa(OneKernelSdpa):
    """A backend that allows cuDNN's kernel of scaled_dot_product_attention and no other."""

    kernel: ClassVar[SDPBackend] = SDPBackend.CUDNN_ATTENTION


class CudnnAttention(Technique[Build]):
    """Compute attention through cuDNN's fused kernels."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.attend",)
    blocks: ClassVar[str] = "cudnn"
    symptoms: ClassVar[tuple[str, ...]] = ("kernel efficiency:attention",)
    card: ClassVar[Card] = Card(
        buys="time in attention where torch chooses another",
        costs=(
            "nothing in memory or quality",
            "half precision only",
        ),
        helps="long rows, and wherever attention takes a visible share of the step, on a GPU where "
        "torch does not choose it by itself",
        hurts="GPUs where the flash kernels are as fast",
        source="torch.nn.attention.SDPBackend.CUDNN_ATTENTION",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support NVIDIA GPUs of compute capability 8.0 or later, in bf16."""
        return lacks(context, self.name()) or Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep memory and work, and price attention by cuDNN's kernels."""
        return ledger.attended("cudnn")

    def apply(self, build: Build) -> None:
        """Fill the backend."""
        build.parts.attend = CudnnSdpa()

    def active(self, build: Build) -> Evidence:
        """Read which kernels the model's own backend launches, and that it allows no other."""
        if (seen := in_ring(build.model.attend, self.blocks)) is not None:
            return seen
        q, k = equal_scores(build.config, build.device, torch.bfloat16)
        used = [n for n in kernels_of(build.model.attend, q, k, k) if "cudnn" in n.lower()]
        return Evidence(
            active=bool(used) and isinstance(build.model.attend, CudnnSdpa),
            detail=f"launched {', '.join(used[:3]) or 'none of it'}",
        )
