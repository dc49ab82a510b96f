"""Give each token's embedding a learned share of the embedding of the token before.

Which token stands before is what the next one depends on most. Attention has to find it, and a
head of the first layers learns to. Here each feature of what the first block reads gets a share of
the same feature of the token before, from the first step on: one learned factor per feature, 0 at
first, which is a vector for the optimizer.

The first token of a row, and of a document where documents are masked, reads nothing. Sampling
keeps the last embedding. Ranks that share rows embed the token before each piece of a row too. It
rewrites `model.embedding_smear`. modded-nanogpt gates its smear by the token; this one is the same
for all tokens. Source: github.com/KellerJordan/modded-nanogpt.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.model.token_before import Smear
from headrace.plan.technique import Card, Evidence


class EmbeddingSmear(Keyed):
    """Give each token's embedding a learned share of the embedding of the token before."""

    claims: ClassVar[tuple[str, ...]] = ("config.embedding_smear",)
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="what a head of the first layers would have to learn: the token before",
        costs="some passes over the embedded tokens, and their copy in fp32 (derived)",
        helps="small models and short runs",
        hurts="export, and with it pruning and fine-tuning: no architecture here has it",
        source="github.com/KellerJordan/modded-nanogpt",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.embedding_smear`."""
        return {"model.embedding_smear": True}

    def active(self, build: Build) -> Evidence:
        """Count the tokens that were smeared in the last forward pass, and read the shares."""
        if build.model.embed is None:
            return Evidence(None, "the embedding is on another rank")
        smear = build.model.smear
        if not isinstance(smear, Smear):
            return Evidence(active=False, detail="embeddings are those of their tokens alone")
        whole = getattr(smear.weight, "full_tensor", lambda: smear.weight)()
        shares = whole.detach().float().abs()
        most, mean = float(shares.max()), float(shares.mean())
        return Evidence(
            active=smear.read > 0,
            detail=f"{smear.read:,} tokens read {shares.numel()} features of the token before, by "
            f"shares up to {most:.3g}, {mean:.3g} in the mean",
            numbers={"tokens": smear.read, "largest": most, "mean": mean},
        )
