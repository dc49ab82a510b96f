"""Rows of whole documents: cut is only what is longer than a row.

A document of n tokens gives n // T rows of its own and a rest of n % T tokens, which shares a row
with other documents and rests (fit.py). Every token is an input exactly once, and the target of the
token before it; after a document's last token the target is the document token, by which the model
learns where texts end, as in the baseline's stream. What is left of a row is padding: a document
of its own whose targets no loss counts.

Documents are packed within windows of `WINDOW` of them. A row is a pure function of its number, so
nothing but the step is kept for a resume. What a window's rows are follows from the offsets of its
documents alone. At the start each window is counted, 8 bytes a document are read and the histogram
of lengths is packed. What a row reads is made when a window is first asked for, and the windows
used last are kept: at most `MOST_WINDOWS`, of about 4 bytes a document.

T: sequence length.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.data.packing.fit import Fitted, fit
from headrace.data.rows import IGNORE, Row, counted_targets
from headrace.data.shards import Shards

WINDOW = 1 << 20
"""Documents that are packed together. In so many of them a row that stays partly empty is rare."""
MOST_WINDOWS = 64
"""Windows whose rows are kept at a time: about 256 MiB for 67 million documents."""


def windows(shards: Shards) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first document of each window, and the bounds of its documents.

    Bounds are int64 [documents + 1]: where each begins in the stream, and where the last ends.
    """
    for first in range(0, shards.documents, WINDOW):
        yield first, _bounds(shards, first)


def _bounds(shards: Shards, first: int) -> np.ndarray:
    """Return the bounds of the documents of the window that begins with this one."""
    return shards.bounds(first, min(WINDOW, shards.documents - first))


@dataclass(frozen=True)
class _Window:
    """Hold what the rows of a window read."""

    fitted: Fitted
    rests: np.ndarray
    """uint32 [rests]: documents of the window that have a rest, by decreasing length of it."""
    long: np.ndarray
    """int64 [long documents]: those that are as long as a row at least."""
    long_ends: np.ndarray
    """int64 [long documents]: rows of their own up to the end of each."""


def _pack(bounds: np.ndarray, length: int) -> _Window:
    """Return the rows of a window of documents with these bounds."""
    sizes = np.diff(bounds)
    whole, rest = np.divmod(sizes, length)
    # Narrow keys: numpy sorts those of 16 bits by radix.
    keys = (length - rest).astype(np.uint16 if length < 1 << 16 else np.uint32)
    order = np.argsort(keys, kind="stable")
    long = np.flatnonzero(whole)
    return _Window(
        fit(np.bincount(rest, minlength=length)),
        order[: np.count_nonzero(rest)].astype(np.uint32),
        long,
        np.cumsum(whole[long]),
    )


class BestFit:
    """Pack each source's documents into rows by best fit; nothing that fits a row is cut.

    Raises:
        ConfigError: a source is shorter than one row.
    """

    def __init__(self, shards: Sequence[Shards], sequence_length: int) -> None:
        self.shards, self.sequence_length = tuple(shards), sequence_length
        self._ends = tuple(self._count(part) for part in self.shards)
        self.units = tuple(ends[-1] for ends in self._ends)
        self._window = lru_cache(maxsize=MOST_WINDOWS)(self._make_window)
        self.padding = 1 - sum(part.tokens for part in self.shards) / (
            sum(self.units) * sequence_length
        )
        """Share of all inputs of an epoch that are padding."""

    def row(self, source: int, unit: int) -> Row:
        """Return row `unit` of a source: its pieces, and padding."""
        part, length, ends = self.shards[source], self.sequence_length, self._ends[source]
        number = bisect_right(ends, unit)
        within = unit - (ends[number - 1] if number else 0)
        window = self._window(source, number)
        if within >= window.fitted.rows:
            return self._long_row(source, number, window, within - window.fitted.rows)
        documents = window.rests[window.fitted.pieces(within)].astype(np.int64) + number * WINDOW
        begins, stops = part.bounds_of(documents)
        sizes = (stops - begins) % length
        token = part.manifest.document_token
        piece_ends = np.cumsum(sizes)
        filled = int(piece_ends[-1])
        ids = np.empty(length + 1, dtype=np.int64)
        ids[filled:] = token
        part.read_pieces(stops - sizes, sizes, ids)
        targets = np.empty(length, dtype=np.int64)
        targets[: filled - 1] = ids[1:filled]
        targets[filled:] = IGNORE
        targets[piece_ends - 1] = token  # a document ends here, whatever stands beside it
        if part.has_answers:
            ends = zip((stops - sizes).tolist(), sizes.tolist(), piece_ends.tolist(), strict=True)
            for begin, size, end in ends:
                counted = counted_targets(part, begin, ids[end - size : end])
                assert counted is not None  # the shards have answers
                targets[end - size : end - 1] = counted
            targets[piece_ends - 1] = IGNORE  # the last token of a conversation predicts nothing
        starts = np.zeros(len(piece_ends) + 1, dtype=np.int64)
        starts[1:] = piece_ends
        return Row(ids, starts, targets)

    def means(self, source: int, scores: np.ndarray) -> np.ndarray:
        """Return the token-weighted mean of the documents' scores in each row, float32 [units].

        Padding counts for nothing.
        """
        parts = []
        for number, (first, bounds) in enumerate(windows(self.shards[source])):
            window, own = self._window(source, number), scores[first : first + len(bounds) - 1]
            rests = window.rests
            sizes = (np.diff(bounds) % self.sequence_length)[rests]
            rows, count = window.fitted.row_of_pieces(), window.fitted.rows
            sums = np.bincount(rows, weights=own[rests] * sizes.astype(np.float64), minlength=count)
            parts.append(sums / np.bincount(rows, weights=sizes, minlength=count))
            parts.append(np.repeat(own[window.long], np.diff(window.long_ends, prepend=0)))
        return np.concatenate(parts).astype(np.float32)

    def _long_row(self, source: int, number: int, window: _Window, row: int) -> Row:
        """Return a row that a part of one long document fills."""
        part, length = self.shards[source], self.sequence_length
        at = int(window.long_ends.searchsorted(row, side="right"))
        document = number * WINDOW + int(window.long[at])
        nth = row - (int(window.long_ends[at - 1]) if at else 0)
        begins, stops = part.bounds_of(np.array([document]))
        begin = int(begins[0]) + nth * length
        starts = np.zeros(1, dtype=np.int64)
        if begin + length < int(stops[0]):
            ids = part.read(begin, length + 1)
            return Row(ids, starts, counted_targets(part, begin, ids))
        ids = np.empty(length + 1, dtype=np.int64)
        ids[:length], ids[length] = part.read(begin, length), part.manifest.document_token
        targets = counted_targets(part, begin, ids[:length])
        return Row(ids, starts, None if targets is None else np.append(targets, IGNORE))

    def _count(self, part: Shards) -> list[int]:
        """Return the rows up to the end of each window of a source [windows].

        Raises:
            ConfigError: it is shorter than one row.
        """
        length = self.sequence_length
        if part.tokens < length:
            fits = 1 << max(2, part.tokens).bit_length() - 1
            raise ConfigError(
                f"{part.source or part.directory} has {part.tokens} tokens, fewer than one row "
                f"of data.sequence_length = {length} tokens",
                mend(f"data.sequence_length={fits}") | "more text",
            )
        rows = []
        for _, bounds in windows(part):
            whole, rest = np.divmod(np.diff(bounds), length)
            rows.append(int(whole.sum()) + fit(np.bincount(rest, minlength=length)).rows)
        return [*accumulate(rows)]

    def _make_window(self, source: int, number: int) -> _Window:
        return _pack(_bounds(self.shards[source], number * WINDOW), self.sequence_length)
