"""Let the output matrix be the embedding.

Both matrices hold one vector per entry of the vocabulary, and in a small model they are most of the
parameters. Tied, one matrix with one gradient and one state serves both: vocabulary x dim fewer
parameters, at 16 bytes each with AdamW. It rewrites `model.tied_embeddings`, so everything else
follows from the config, the prediction too. Source: arXiv 1608.05859.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.plan.technique import Card, Context, Evidence, Stage, Supported, Technique


class TiedEmbeddings(Technique[Build]):
    """Let the output matrix be the embedding."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "design"
    stage: ClassVar[Stage] = Stage.DESIGN
    claims: ClassVar[tuple[str, ...]] = ("config.tied_embeddings",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory capacity:parameters",
        "memory capacity:optimizer",
    )
    card: ClassVar[Card] = Card(
        buys="vocabulary x dim parameters with their gradients and state: 16 bytes each (derived)",
        costs="the freedom of two matrices: larger models leave them apart (Llama, OLMo)",
        helps="small models with large vocabularies",
        hurts="large models, where the matrix is a small share; untying was a step of the record "
        "runs of modded-nanogpt",
        source="arXiv 1608.05859",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.tied_embeddings`."""
        return {"model.tied_embeddings": True}

    def supports(self, context: Context) -> Supported:
        """Run everywhere."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger of the rewritten config, which it already is."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan's key is in force."""
        assert build.config.tied_embeddings

    def active(self, build: Build) -> Evidence:
        """Report that the head has no own matrix and multiplies with the embedding's memory."""
        model = build.model
        if model.head is None:
            return Evidence(None, "the head is on another rank")
        own = model.head.weight is not None
        shared = not own and model.unembedding is model.embed.weight
        return Evidence(
            active=shared,
            detail="the head uses the embedding's memory" if shared else "the head has a matrix",
            numbers={"own_matrix": float(own)},
        )
