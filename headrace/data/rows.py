"""Turn documents into rows: the baseline cuts the token stream at the sequence length.

Unit `i` reads tokens [i*T, i*T + T + 1): T inputs and T targets, the last token of one cut being
the first of the next, so every token but the very first is a target once an epoch and none is
padding. Each document begins with the document token; a target across a border is therefore always
that token, which is how the model learns where texts end.

T: sequence length.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.data.shards import Shards

CHOSEN, REJECTED = 1, 2
"""The byte of a token that the loss counts, and that of one in a rejected answer: a preference loss
counts both, every other loss the first."""
IGNORE = -100
"""Target that no loss counts; the value that torch's cross entropy skips by default."""


class Row(NamedTuple):
    """One row of training: T + 1 tokens, of which the first T are inputs."""

    ids: np.ndarray
    """int64 [T + 1]."""
    starts: np.ndarray
    """Places in the row [0, T] at which a document begins, ascending."""
    targets: np.ndarray | None = None
    """int64 [T] where targets are not simply the next tokens; IGNORE where none counts."""
    numbers: Mapping[str, np.ndarray] | None = None
    """What a loss needs to know beside tokens, by name: [T, ...] each."""


def counted_targets(shards: Shards, start: int, ids: np.ndarray) -> np.ndarray | None:
    """Return the targets of the tokens from place `start` on, or None where all next tokens count.

    Args:
        shards: that the tokens were read from.
        start: their place in the stream.
        ids: int64 [n + 1], the tokens.

    Returns:
        int64 [n]: the next token of each, or IGNORE where the loss does not count it.
    """
    counted = shards.counted(start + 1, len(ids) - 1)
    return None if counted is None else np.where(counted == CHOSEN, ids[1:], IGNORE)


class Packer(Protocol):
    """What the `pack` socket holds: numbered rows of every source, called from several threads."""

    @property
    def sequence_length(self) -> int:
        """Return T, the tokens of a row."""
        ...

    @property
    def units(self) -> tuple[int, ...]:
        """Return how many rows each source has."""
        ...

    def row(self, source: int, unit: int) -> Row:
        """Return row `unit` of a source."""
        ...


@runtime_checkable
class Weighing(Protocol):
    """A packer that knows which documents each of its rows holds."""

    def means(self, source: int, scores: np.ndarray) -> np.ndarray:
        """Return the score of each row of a source, float32 [units].

        It is the mean of its documents' scores, weighted by their tokens in the row.

        Args:
            source: number of the source.
            scores: float32 [documents].
        """
        ...


class Cut:
    """The baseline's packer makes fixed cuts of each source's token stream.

    Raises:
        ConfigError: a source is shorter than one row.
    """

    def __init__(self, shards: Sequence[Shards], sequence_length: int) -> None:
        self.shards, self.sequence_length = tuple(shards), sequence_length
        self.units = tuple((s.tokens - 1) // sequence_length for s in self.shards)
        for part, units in zip(self.shards, self.units, strict=True):
            if units < 1:
                fits = max(2, part.tokens - 1)  # a power of two divides most batches
                raise ConfigError(
                    f"{part.source or part.directory} has {part.tokens} tokens, fewer than one row "
                    f"of data.sequence_length + 1 = {sequence_length + 1} tokens",
                    mend(f"data.sequence_length={1 << fits.bit_length() - 1}") | "more text",
                )

    def row(self, source: int, unit: int) -> Row:
        """Return tokens [unit*T, unit*T + T + 1) of a source."""
        start, count = unit * self.sequence_length, self.sequence_length + 1
        part = self.shards[source]
        ids, starts = part.read(start, count), part.document_starts(start, start + count) - start
        return Row(ids, starts, counted_targets(part, start, ids))

    def means(self, source: int, scores: np.ndarray) -> np.ndarray:
        """Return the token-weighted mean of the documents' scores in each row, float32 [units]."""
        part = self.shards[source]
        bounds = part.bounds(0, part.documents)
        starts, sizes = bounds[:-1], np.diff(bounds)
        before = np.concatenate([[0.0], np.cumsum(scores * sizes.astype(np.float64))])
        cuts = np.arange(self.units[source] + 1) * self.sequence_length
        document = np.searchsorted(starts, cuts, side="right") - 1
        sums = before[document] + (cuts - starts[document]) * scores[document].astype(np.float64)
        return (np.diff(sums) / self.sequence_length).astype(np.float32)
