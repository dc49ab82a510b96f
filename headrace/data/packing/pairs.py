"""Rows of preference pairs: a row holds whole pairs, the chosen conversation before the rejected.

Both of a pair stand in one row, as two documents next to each other, so that they are in one
micro-batch whatever its size, and one forward pass computes both. Documents do not see each other.
A document's number within its row says the rest: 2j is the chosen conversation of pair j, 2j + 1
the rejected one, and padding is a document of its own after them. Several pairs share a row where
they fit, by best-fit decreasing (fit.py), and a pair that is longer than a row is left out and
counted: half of an answer would be another answer.

A row is a pure function of its number, so order, ranks, workers and a resume are as with any rows.
Memory: 8 bytes a pair for the bounds of its source and 4 for its row.

T: sequence length.
"""

from collections.abc import Sequence

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.data.packing.fit import fit
from headrace.data.rows import IGNORE, Row
from headrace.data.shards import Shards

DOCUMENTS = "documents"
"""What a row says of its documents by this name: at place j the number of its document j, counted
over all sources."""


class _Packed:
    """Hold which pairs stand in which rows of a source.

    Args:
        part: the source.
        length: T.
    """

    def __init__(self, part: Shards, length: int) -> None:
        self.bounds = part.bounds(0, part.documents)[::2]
        """int64 [pairs + 1]: where each pair begins in the stream, and where the last ends."""
        sizes = np.diff(self.bounds)
        order = np.argsort(-sizes, kind="stable")
        self._whole = order[sizes[order] == length]
        self._others = order[sizes[order] < length]
        self._fitted = fit(np.bincount(sizes[self._others], minlength=length))
        self.rows = self._fitted.rows + len(self._whole)
        self.pairs = len(self._whole) + len(self._others)
        self.too_long, self.longest = len(sizes) - self.pairs, int(sizes.max(initial=0))
        self.tokens = int(sizes[sizes <= length].sum())

    def of_row(self, row: int) -> np.ndarray:
        """Return the numbers of the pairs of a row, int64."""
        if row >= self._fitted.rows:
            return self._whole[row - self._fitted.rows : row - self._fitted.rows + 1]
        return self._others[self._fitted.pieces(row)]


class PairRows:
    """Pack each source's preference pairs into rows; nothing is cut.

    Args:
        shards: the sources.
        sequence_length: T.
        first: documents that are counted before those of the first source.

    Raises:
        ConfigError: no pair of a source fits a row.
    """

    def __init__(self, shards: Sequence[Shards], sequence_length: int, *, first: int = 0) -> None:
        self.shards, self.sequence_length = tuple(shards), sequence_length
        self._packed = tuple(_Packed(part, sequence_length) for part in self.shards)
        self.units = tuple(packed.rows for packed in self._packed)
        counts = [part.documents for part in self.shards]
        self.first_documents = np.cumsum([first, *counts[:-1]])
        """Documents that are counted before those of each source."""
        self.pairs = sum(packed.pairs for packed in self._packed)
        """Pairs that are trained on in an epoch."""
        self.too_long = sum(packed.too_long for packed in self._packed)
        """Pairs that are left out, since they are longer than a row."""
        for part, packed in zip(self.shards, self._packed, strict=True):
            if not packed.rows:
                fits = 1 << (packed.longest - 1).bit_length()
                raise ConfigError(
                    f"no preference pair of {part.source or part.directory} fits a row of "
                    f"data.sequence_length = {sequence_length} tokens: the longest has "
                    f"{packed.longest} in both of its conversations",
                    mend(f"data.sequence_length={fits}"),
                )
        tokens = sum(packed.tokens for packed in self._packed)
        self.padding = 1 - tokens / (sum(self.units) * sequence_length)
        """Share of all inputs of an epoch that are padding."""

    def lines(self) -> list[str]:
        """Return what was packed as lines for a person."""
        longest = max(packed.longest for packed in self._packed)
        lines = [
            f"{self.pairs:,} preference pairs in {sum(self.units):,} rows an epoch, "
            f"{self.padding:.1%} of them padding"
        ]
        if self.too_long:
            lines.append(
                f"left out: {self.too_long:,} pairs longer than data.sequence_length = "
                f"{self.sequence_length} tokens, the longest of {longest:,}; "
                f"data.chat.max_tokens={self.sequence_length // 2} would cut them instead"
            )
        return lines

    def documents(self, source: int, unit: int) -> np.ndarray:
        """Return the numbers of a row's documents within its source, in their order, int64."""
        pairs = self._packed[source].of_row(unit)
        return (2 * pairs[:, None] + np.arange(2)).reshape(-1)

    def row(self, source: int, unit: int) -> Row:
        """Return row `unit` of a source: its pairs, and padding."""
        part, length = self.shards[source], self.sequence_length
        documents = self.documents(source, unit)
        begins, stops = part.bounds_of(documents)
        ends = np.cumsum(stops - begins)
        ids = np.full(length + 1, part.manifest.document_token, dtype=np.int64)
        part.read_pieces(begins, stops - begins, ids)
        targets = np.full(length, IGNORE, dtype=np.int64)
        for begin, stop, end in zip(begins.tolist(), stops.tolist(), ends.tolist(), strict=True):
            counted = part.counted(begin + 1, stop - begin - 1)
            assert counted is not None, "pairs are kept with their answers"
            first = end - (stop - begin)
            targets[first : end - 1] = np.where(counted > 0, ids[first + 1 : end], IGNORE)
        starts = np.zeros(len(ends) + 1, dtype=np.int64)
        starts[1:] = ends
        numbers = np.zeros(length, dtype=np.int64)
        numbers[: len(documents)] = documents + self.first_documents[source]
        return Row(ids, starts, targets, {DOCUMENTS: numbers})
