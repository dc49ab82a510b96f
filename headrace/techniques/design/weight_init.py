"""Choose how weights start: normal, scaled by depth, with zero outputs, by He's rule, orthonormal.

- `normal`: every matrix is drawn with `model.init_std`.
- `depth_scaled`: so too, and what writes to the residual is divided by sqrt(2 x layers) (GPT-2). It
  is the baseline's.
- `zero_output`: so too, and what writes to the residual is zero: each block is the identity at
  first.
- `he`: matrices of blocks are drawn with sqrt(2 / inputs), which keeps the size of what passes a
  ReLU.
- `orthogonal`: matrices of blocks are orthonormal in rows or columns, so that no direction of their
  input is lost or preferred.

Embedding and output matrix are drawn with `model.init_std` in all of them; with `zero_head` the
output matrix is zero, so that the first loss is the logarithm of the vocabulary. Every value is a
pure function of seed and name, so every layout starts from the same weights without communication
(model/init). It rewrites `model.matrix_init`, `model.output_init` and, with `zero_head`,
`model.head_init`. Sources: arXiv 1502.01852 (he), arXiv 1312.6120 (orthogonal), GPT-2
(depth_scaled), arXiv 2203.03466 and modded-nanogpt (zero_output and zero_head).
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.count import block_linears
from headrace.plan.technique import Card, Context, Evidence, Supported, Unsupported

InitKind = Literal["normal", "depth_scaled", "zero_output", "he", "orthogonal"]
KEYS: Mapping[InitKind, tuple[str, str]] = {
    "normal": ("normal", "plain"),
    "depth_scaled": ("normal", "depth_scaled"),
    "zero_output": ("normal", "zero"),
    "he": ("he", "plain"),
    "orthogonal": ("orthogonal", "plain"),
}
"""InitKind -> model.matrix_init and model.output_init."""


class WeightInit(Keyed):
    """Choose how weights start: normal, scaled by depth, zero outputs, He's rule, orthonormal."""

    kind: InitKind = "zero_output"
    """How matrices of blocks start."""
    zero_head: bool = False
    """Whether the output matrix starts at zero."""

    claims: ClassVar[tuple[str, ...]] = (
        "config.matrix_init",
        "config.output_init",
        "config.head_init",
    )
    symptoms: ClassVar[tuple[str, ...]] = ("recipe", "instability")
    card: ClassVar[Card] = Card(
        buys="zero_output: blocks that begin as the identity, which muP (arXiv 2203.03466, "
        "appendix D.2) and the record runs of modded-nanogpt use; he and orthogonal: signals that "
        "keep their size through depth (arXiv 1502.01852; arXiv 1312.6120)",
        costs="orthogonal: a QR decomposition of every matrix before the first step, on one core "
        "of the host; nothing later",
        helps="short runs, deep models and high learning rates",
        hurts="he and orthogonal beside pre-norm blocks, whose norms undo the scale and whose "
        "residual grows with depth: rules for networks without norms",
        source="arXiv 1502.01852; arXiv 1312.6120; arXiv 2203.03466",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return the keys of the scheme; `supports` refuses a tied output matrix of zeros."""
        matrices, outputs = KEYS[self.kind]
        head = {"model.head_init": "zero"} if self.zero_head and not _is_tied(plan) else {}
        return {"model.matrix_init": matrices, "model.output_init": outputs, **head}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require random weights, and an output matrix of its own where that is to be zero."""
        if context.plan.model.pretrained:
            return Unsupported(
                "the weights of model.pretrained are not drawn", mend(f"-{self.name()}")
            )
        if self.zero_head and _is_tied(context.plan):
            return Unsupported(
                "zero_head makes the output matrix zero, and with tied_embeddings it is the "
                "embedding: a model of zeros learns nothing",
                mend(f"techniques.{self.name()}.zero_head=false"),
            )
        return Supported()

    def active(self, build: Build) -> Evidence:
        """Draw a block's first and last matrix and the head again from the run's source."""
        config, source = build.config, build.source
        sizes = block_linears(config)
        inner, writer = (
            source(f"blocks.0.{name}.weight", torch.Size(reversed(sizes[name])))
            for name in ("mixer.qkv", "mixer.out")
        )
        # Another technique, as muP, may have scaled all normal matrices of a block by one factor.
        scaled = any("source" in technique.claims for technique in build.techniques)
        std = float(inner.std()) if scaled else config.init_std
        outputs = {"depth_scaled": std / sqrt(2 * config.layers), "zero_output": 0.0}
        right = _has(writer, outputs.get(self.kind, std)) and _has(inner, std)
        if self.kind == "he":
            right = all(_has(matrix, sqrt(2 / matrix.size(1))) for matrix in (inner, writer))
        if self.kind == "orthogonal":
            right = _is_orthonormal(writer)
        head = source("head.weight", torch.Size((4, config.dim)))
        stds = {"output_std": float(writer.std()), "head_std": float(head.std())}
        return Evidence(
            active=right and bool(head.any()) == (config.head_init != "zero"),
            detail="outputs of blocks start with a standard deviation of "
            f"{stds['output_std']:.3g}, the head with {stds['head_std']:.3g}",
            numbers=stds,
        )


def _is_tied(plan: Any) -> bool:
    """Return whether the plan's output matrix is the embedding."""
    return plan.model.tied_embeddings


def _has(matrix: Tensor, std: float) -> bool:
    """Return whether a matrix's numbers scatter by `std`, within what so few numbers can tell."""
    error = 5 / sqrt(2 * matrix.numel())  # five standard errors of a standard deviation
    return abs(float(matrix.std()) - std) <= std * max(0.1, error)


def _is_orthonormal(matrix: Tensor) -> bool:
    """Return whether a matrix's rows, or its columns where these are fewer, are orthonormal."""
    tall = matrix if matrix.size(0) >= matrix.size(1) else matrix.t()
    return bool((tall.t() @ tall - torch.eye(tall.size(1))).abs().max() < 1e-3)
