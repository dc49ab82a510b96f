"""What the first pass over the text learns: how its bytes fall, and a sample for the tokenizer.

The tokenizer learns from at most 64 MiB of the training side, picked by hash from all of it, so its
memory does not grow with the data. Parts of the text are surveyed apart and merged: whatever the
parts, the sum is the same.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.data.heldout import PLACES, Split, Weights

SAMPLE_BYTES = 64 << 20
"""Most bytes of text that are sampled for a tokenizer."""
PIECE_CHARACTERS = 1 << 16
"""Characters of the pieces that a sample is made of."""


@dataclass
class Survey:
    """What the first pass learns of a part, or of all parts: a sum in any grouping of them."""

    weights: Weights
    text_bytes: int = 0
    sample: list[tuple[int, int, int, str]] = field(default_factory=list)
    """(priority, place of its document, characters before that one's held-out end, text)."""
    sample_bytes: int = 0
    bar: int = PLACES
    """Pieces with a priority below it are kept."""

    def add(self, text: str, *, keep_sample: bool, source: int = 0) -> None:
        """Learn of a document; `source` is the number of its source."""
        raw = text.encode()
        digest = hashlib.sha256(raw).digest()
        place = place_of(digest)
        self.text_bytes += len(raw)
        cut = self.weights.add(raw, place, source)
        if not keep_sample:
            return
        head = cut if len(raw) == len(text) else len(text) - len(raw[cut:].decode())
        for begin in range(0, len(text), PIECE_CHARACTERS):
            priority = place_of(hashlib.sha256(digest + begin.to_bytes(8, "little")).digest())
            if priority < self.bar:
                piece = text[begin : begin + PIECE_CHARACTERS]
                self.sample.append((priority, place, max(0, head - begin), piece))
                self.sample_bytes += len(piece.encode())
        self._bound_sample()

    def _bound_sample(self) -> None:
        """Lower the bar until the sample has its size: by as little as all that was met asks for.

        Every part lowers it no further than the whole would, so the order of merging is nothing.
        """
        while self.sample_bytes > SAMPLE_BYTES:
            self._lower(self.bar // 2)

    def _lower(self, bar: int) -> None:
        self.bar = bar
        self.sample = [item for item in self.sample if item[0] < bar]
        self.sample_bytes = sum(len(piece.encode()) for *_, piece in self.sample)

    def merge(self, other: "Survey") -> None:
        """Add what was learned of the parts that follow."""
        self.weights.merge(other.weights)
        self.text_bytes += other.text_bytes
        if other.bar < self.bar:
            self._lower(other.bar)
        for item in other.sample:
            if item[0] < self.bar:
                self.sample.append(item)
                self.sample_bytes += len(item[3].encode())
        self._bound_sample()

    def training_texts(self, split: Split | None) -> Iterator[str]:
        """Yield the sample without what is held out."""
        for _, place, head, piece in self.sample:
            if split is None or not (split.is_cut(place) or split.is_validation(place)):
                yield piece
            elif split.is_cut(place) and head:
                yield piece[:head]

    def state(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "weights": self.weights.state(),
            "text_bytes": self.text_bytes,
            "bar": self.bar,
            "sample": self.sample,
        }

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> "Survey":
        """Return the survey that `state` was taken of."""
        sample = [(priority, place, head, text) for priority, place, head, text in state["sample"]]
        weights = Weights.of_state(state["weights"])
        size = sum(len(text.encode()) for *_, text in sample)
        return Survey(weights, state["text_bytes"], sample, size, state["bar"])


def place_of(digest: bytes) -> int:
    """Return where a hash falls, in range(PLACES)."""
    return int.from_bytes(digest[:8], "big")


def sample_texts(texts: Iterable[str]) -> tuple[list[str], int]:
    """Return a sample of texts as a tokenizer learns from one, and the bytes of all of them."""
    survey = Survey(Weights(0.0))
    for text in texts:
        survey.add(text, keep_sample=True)
    return [*survey.training_texts(None)], survey.text_bytes
