"""Add a row of a table of pairs to each token's embedding: of the token and the one before it.

What often follows a pair of tokens can be looked up instead of computed. The table has `multiple`
times as many rows as the vocabulary, and pairs share them by a hash (model/token_before). Its rows
start as zeros and are embeddings for the optimizer. A look-up costs no matmul; what it costs is the
table's update.

The first token of a row, and of a document where documents are masked, reads a row as if an entry
behind the vocabulary stood before it. Sampling keeps the last id. Under tensor parallelism a rank
has a part of the rows, as of the embedding's. Ranks that share rows of tokens are given the id
before each piece of a row. It rewrites `model.bigram_multiple`. Sources:
github.com/KellerJordan/modded-nanogpt (pull request 201); arXiv 1709.03933 (hash embeddings);
2601.07372 (Engram, which adds a gate).
"""

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

from pydantic import Field

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.model.token_before import PairEmbedding
from headrace.plan.technique import Card, Evidence

TABLE = "pairs.embed.weight"
"""The name of the table."""


class BigramEmbeddings(Keyed):
    """Add a row of a table of pairs to each token's embedding: of the token and the one before."""

    multiple: int = Field(default=5, ge=1, le=100_000)
    """Rows of the table, in multiples of the vocabulary; tuner range 2 to 16."""

    claims: ClassVar[tuple[str, ...]] = ("config.bigram_multiple",)
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="frequent pairs looked up instead of computed, for no matmul",
        costs="`multiple` x vocabulary x features more parameters, at 16 bytes each with AdamW, "
        "and their update (derived)",
        helps="small models and short runs",
        hurts="large models: nanochat took it out again, since at 25 layers its gain was gone on "
        "the clock; export, and with it pruning and fine-tuning: no architecture here has it",
        source="github.com/KellerJordan/modded-nanogpt; arXiv 1709.03933; arXiv 2601.07372",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.bigram_multiple`."""
        return {"model.bigram_multiple": self.multiple}

    def active(self, build: Build) -> Evidence:
        """Count the tokens that read rows in the last forward pass, and the table's numbers."""
        if build.model.embed is None:
            return Evidence(None, "the embedding is on another rank")
        pairs = build.model.pairs
        if not isinstance(pairs, PairEmbedding):
            return Evidence(active=False, detail="there is no table of pairs")
        weight = pairs.embed.weight.detach()
        local = getattr(weight, "to_local", lambda: weight)()
        most = float(local.abs().max()) if local.numel() else 0.0
        return Evidence(
            active=pairs.rows == self.multiple * build.config.vocab and pairs.read > 0,
            detail=f"{pairs.read:,} tokens read {pairs.rows:,} rows that pairs share, of "
            f"{prod(build.layouts[TABLE].shape):,} numbers, up to {most:.3g} here",
            numbers={"tokens": pairs.read, "rows": pairs.rows, "largest": most},
        )
