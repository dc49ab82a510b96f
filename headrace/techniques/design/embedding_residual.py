"""Begin each block with a x + b x0: the residual stream, and what the first block reads.

The deeper a block, the less the stream tells of the token itself. Here each block can take it
again, by two learned factors that start at 1 and 0: at first nothing is changed. The factors are
vectors for the optimizer, without weight decay. x0 is normalised (`norm`), or a table that learns
fast would drown the stream.

What blocks read is made once and handed on with what all layers share (model/from_embedding).
Checkpointing keeps it once. In a pipeline it travels from stage to stage beside the stream. It
rewrites `model.embedding_residual`. Source: github.com/KellerJordan/modded-nanogpt.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.model.from_embedding import ResidualFromEmbedding
from headrace.plan.technique import Card, Evidence


class EmbeddingResidual(Keyed):
    """Begin each block with a x + b x0: the residual stream, and what the first block reads."""

    norm: bool = True
    """Whether x0 is normalised, as model.embedding_norm does it; off leaves that key alone."""

    claims: ClassVar[tuple[str, ...]] = ("config.embedding_residual",)
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="8.2 minutes in place of 10.8 to one loss in modded-nanogpt's record 9, together with "
        "shared values, momentum's warmup and capped logits",
        costs="a pass over two streams in each block, and the stream kept once more (derived)",
        helps="short runs of small models",
        hurts="pipelines, whose borders it crosses beside the stream; export: no architecture here "
        "has it",
        source="github.com/KellerJordan/modded-nanogpt",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.embedding_residual`, and `model.embedding_norm` where x0 is normalised."""
        norm = {"model.embedding_norm": True} if self.norm else {}
        return {"model.embedding_residual": True, **norm}

    def active(self, build: Build) -> Evidence:
        """Read the factors of this rank's blocks."""
        blocks = build.model.blocks.values()
        if not blocks:
            return Evidence(None, "this rank holds no block")
        streams = [
            block.stream for block in blocks if isinstance(block.stream, ResidualFromEmbedding)
        ]
        values = [_factors(stream) for stream in streams]
        most = max((abs(b) for _, b in values), default=0.0)
        return Evidence(
            active=len(streams) == len(blocks),
            detail=f"{len(streams)} of {len(blocks)} blocks read the embedding, by factors up to "
            f"{most:.3g}",
            numbers={"blocks": len(streams), "largest": most},
        )


def _factors(stream: ResidualFromEmbedding) -> tuple[float, float]:
    """Return the factors of the stream and of the embedding."""
    whole = getattr(stream.weight, "full_tensor", lambda: stream.weight)()
    first, second = whole.detach().float().tolist()
    return first, second
