"""Normalise what the embedding gives before the first block reads it.

The residual stream then starts with features of size 1 for every token, whatever its row of the
table has grown to. The table may have a learning rate of its own, several times as high, without
drowning what the blocks write. The norm has no weights. nanochat and modded-nanogpt have it.

It rewrites `model.embedding_norm`. Source: github.com/KellerJordan/modded-nanogpt.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.plan.technique import Card, Evidence

FAR = 40.0
"""Factor by which the evidence makes features larger than they are; the norm takes it out."""


class EmbeddingNorm(Keyed):
    """Normalise what the embedding gives before the first block reads it."""

    claims: ClassVar[tuple[str, ...]] = ("config.embedding_norm",)
    symptoms: ClassVar[tuple[str, ...]] = ("instability", "recipe")
    card: ClassVar[Card] = Card(
        buys="tokens that enter the blocks at one size, so that the table can learn at a rate of "
        "its own (modded-nanogpt)",
        costs="one pass over the embedded tokens and their fp32 copy (derived)",
        helps="high rates of the embedding, and embedding_residual, which reads it in every block",
        hurts="export: no architecture here has it",
        source="github.com/KellerJordan/modded-nanogpt; github.com/karpathy/nanochat",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.embedding_norm`."""
        return {"model.embedding_norm": True}

    def active(self, build: Build) -> Evidence:
        """Measure the size of features that are far too large, after the norm."""
        model = build.model
        if model.embed is None:
            return Evidence(None, "the embedding is on another rank")
        place_D = torch.arange(build.config.dim, device=build.device, dtype=torch.float32)
        size = float(model.embed_norm(FAR * (place_D.sin() + 0.5)).square().mean().sqrt())
        return Evidence(
            active=abs(size - 1) < 1e-2,
            detail=f"features of size {FAR:g} enter the first block at {size:.3g}",
            numbers={"size": size},
        )
