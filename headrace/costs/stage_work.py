"""Count what one stage of a pipeline computes of the work of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.costs.decoder_work import LEARNED
from headrace.costs.work import Work


@dataclass(frozen=True)
class StageWork:
    """A stage is a rank's part of the pieces of a step.

    Args:
        first: it has the embedding.
        last: it has the head.
        here: its layers.
        layers: of the model.
        learned: its share of what learns.
        fewer: runs of a piece that the model's first block lacks, by the piece's name.
    """

    first: bool
    last: bool
    here: int
    layers: int
    learned: float
    fewer: Mapping[str, float]

    def part(self, name: str, piece: Work) -> Work | None:
        """Return its own of all pieces of that name; None where it has none."""
        if name.startswith("embedding"):
            return piece if self.first else None
        if name.startswith(("head", "loss")):
            return piece if self.last else None
        if name.startswith(LEARNED):
            return piece.with_bytes(lambda bytes: bytes * self.learned) if self.learned else None
        if name.startswith("count/"):
            return piece
        share = self.here / self.layers
        if name.startswith("norms/"):
            share = (2 * self.here + self.last) / (2 * self.layers + 1)
        if piece.phase == "optimizer":
            return piece.with_bytes(lambda bytes: bytes * share)
        lacks = self.fewer.get(name, 0.0)
        return replace(piece, count=(piece.count + lacks) * share - lacks * self.first)
