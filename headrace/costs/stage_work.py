"""Count what of a step is a pipeline stage's: its memory outside of blocks, its work, its sends."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.costs.count import FP32
from headrace.costs.decoder_work import LEARNED
from headrace.costs.ledger import Instant, Ledger, Line
from headrace.costs.work import Stream, Work, collective

AXIS = "pipeline"
END_LINES = ("final_norm", "logits", "head_cast", "head_gradients", "head_weight_gradient")
"""Lines outside of blocks that the last stage alone has."""
FIRST_LINES = ("pairs", "embedding_smear", "embedding_norm")
"""Lines outside of blocks that the first stage alone has, once for each micro-batch in flight."""
THROUGH: tuple[Instant, ...] = ("loss", "turn", "backward")


@dataclass(frozen=True)
class StageShare:
    """It says which part of the pieces of a step is a rank's.

    Args:
        first: it has the embedding.
        last: it has the head.
        here: its layers.
        layers: of the model.
        learned: its share of what learns.
        fewer: runs of a piece that the model's first block lacks, by the piece's name.
        mixing: its share of the layers that mix value embeddings in.
    """

    first: bool
    last: bool
    here: int
    layers: int
    learned: float
    fewer: Mapping[str, float]
    mixing: float = 0.0

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
        if name.startswith("value/"):
            share = self.mixing
        if piece.phase == "optimizer":
            return piece.with_bytes(lambda bytes: bytes * share)
        lacks = self.fewer.get(name, 0.0)
        return replace(piece, count=(piece.count + lacks) * share - lacks * self.first)


def mixing_share(ledger: Ledger, mine: set[int]) -> float:
    """Return the share that layers have of those which mix value embeddings in; 0 if none does."""
    mixing = [line.layer for name, line in ledger.memory.items() if name.endswith("/value")]
    return sum(layer in mine for layer in mixing) / max(1, len(mixing))


def outside_lines(
    ledger: Ledger, *, first: bool, last: bool, visits: int, chunks: int
) -> dict[str, Line]:
    """Return a rank's lines outside of blocks.

    Args:
        ledger: of the whole model.
        first: the rank has the embedding.
        last: it has the head.
        visits: the most (stage, micro-batch) pairs whose activations it keeps at once.
        chunks: stages of it.
    """
    memory = {n: v for n, v in ledger.memory.items() if v.layer is None}
    began = -(-visits // chunks) if first else 0  # micro-batches in flight in the first stage
    for names, times in ((FIRST_LINES, began), (("values",), visits)):
        for name in names:
            if line := memory.pop(name, None):
                memory |= {name: replace(line, bytes=line.bytes * times)} if times else {}
    if _reads_embedding(ledger) and visits > began:  # the first stage's is its first block's input
        memory["embedded"] = Line(_stream_bytes(ledger.sizes) * (visits - began), THROUGH)
    for name in END_LINES if not last else ():
        memory.pop(name, None)
    return memory


def border_work(ledger: Ledger, *, ahead: int, back: int) -> dict[str, Work]:
    """Return what a rank sends to its neighbours; as much comes, and it waits for that.

    Where blocks read the embedding, that is copied behind the stream, and its gradient likewise.

    Args:
        ledger: of the whole model.
        ahead: borders over which the rank sends states.
        back: borders over which it sends gradients.
    """
    sizes, bytes = ledger.sizes, _stream_bytes(ledger.sizes)
    read = bytes * _reads_embedding(ledger)
    if values := ledger.memory.get("values"):
        read += values.bytes * sizes["stream_bytes"] / sizes["activation_bytes"]
    bytes += read
    pieces: dict[str, Work] = {
        "border/forward": collective(sizes, AXIS, "forward", "send", bytes, ahead),
        "border/backward": collective(sizes, AXIS, "backward", "send", bytes, back),
    }
    if read:
        pieces["border/joined_forward"] = Stream("forward", ahead, 2 * bytes)
        pieces["border/joined_backward"] = Stream("backward", back, 2 * bytes)
    return pieces


def ends_work(sizes: Mapping[str, float]) -> dict[str, Work]:
    """Return the sum of both ends' gradients of a tied embedding."""
    of_two = {f"{AXIS}_ranks": 2.0, f"{AXIS}_reach": sizes[f"{AXIS}_reach"]}
    table = FP32 * sizes["embedding"]  # which two ranks have
    return {"reduce/ends": collective(of_two, AXIS, "optimizer", "all_reduce", table)}


def _reads_embedding(ledger: Ledger) -> bool:
    """Return whether blocks begin with a sum of the stream and the embedding."""
    return any(name.endswith("/stream") for name in ledger.memory)


def _stream_bytes(sizes: Mapping[str, float]) -> float:
    """Return the bytes of the states between two blocks."""
    return sizes["residual"] * sizes["stream_bytes"] / sizes["activation_bytes"]
