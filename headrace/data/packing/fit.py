"""Decide by best-fit decreasing which pieces share a row.

Pieces of documents are placed by decreasing length, each in the row whose free room is the smallest
that holds it. Placed one by one that is a search per piece; here pieces of one length and rows of
one history move together, so that the work grows with the number of different lengths and not with
the number of pieces. The rows are those that the plain algorithm makes: a piece that fits leaves
the tightest row tighter still, so the next of its length goes into the same row until none fits.

Cost, one core, measured by benchmarks/data_packing.py: a window of a million documents takes about
a tenth of a second, most of it for sorting. Source: Ding et al., "Fewer Truncations Improve
Language Modeling" (ICML 2024, arXiv 2404.10830), whose segment tree over free room is the bits of
an integer here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class _Taken(NamedTuple):
    """Hold what every row of a group took of one length."""

    first: int
    """The piece that the group's first row begins with, in decreasing order of length."""
    each: int
    """Pieces of that length in each row; the next row has the next ones."""


class _Group(NamedTuple):
    """A group is a number of rows that took pieces of the same lengths."""

    rows: int
    taken: tuple[_Taken, ...]

    def split(self, rows: int) -> "tuple[_Group, _Group]":
        """Return the first `rows` rows, and the others."""
        others = tuple(_Taken(t.first + rows * t.each, t.each) for t in self.taken)
        return _Group(rows, self.taken), _Group(self.rows - rows, others)


@dataclass(frozen=True)
class Fitted:
    """Hold which pieces stand in which row; pieces are numbered by decreasing length.

    A group of rows is a line of each array, and a row is found by a search: memory grows with the
    different lengths.
    """

    ends: np.ndarray
    """int64 [groups]: rows up to the end of each group."""
    free: np.ndarray
    """int64 [groups]: tokens that stay empty in each row of a group."""
    begins: np.ndarray
    """int64 [groups + 1]: where a group's entries begin."""
    first: np.ndarray
    """int64 [entries]: the piece that the group's first row begins with."""
    each: np.ndarray
    """int64 [entries]: pieces in each row."""

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def pieces(self, row: int) -> np.ndarray:
        """Return the pieces of a row, as int64, the longest first."""
        group = int(self.ends.searchsorted(row, side="right"))
        within = row - (int(self.ends[group - 1]) if group else 0)
        entries = slice(*self.begins[group : group + 2].tolist())
        pieces: list[int] = []  # few, and quicker so than by arrays
        for first, each in zip(
            self.first[entries].tolist(), self.each[entries].tolist(), strict=True
        ):
            pieces.extend(range(first + within * each, first + (within + 1) * each))
        return np.array(pieces, dtype=np.int64)

    def row_of_pieces(self) -> np.ndarray:
        """Return the row of each piece, int64 [pieces]."""
        rows = np.diff(self.ends, prepend=0)
        group = np.repeat(np.arange(len(rows)), np.diff(self.begins))
        out = np.empty(int((rows[group] * self.each).sum()), dtype=np.int64)
        begins = (self.ends - rows).tolist()
        for g, first, each in zip(
            group.tolist(), self.first.tolist(), self.each.tolist(), strict=True
        ):
            own = np.arange(begins[g], int(self.ends[g]))
            out[first : first + each * len(own)] = np.repeat(own, each)
        return out


def fit(histogram: np.ndarray) -> Fitted:
    """Place pieces in rows by best-fit decreasing.

    Args:
        histogram: int64 [T]; entry n is the number of pieces of n tokens, each shorter than a row
            of T. Pieces of no tokens are left out.
    """
    room = len(histogram)
    groups: dict[int, list[_Group]] = {}
    """By free room: groups of rows, the oldest last."""
    free = 0
    """Bit n is set where there is a row with room for n more tokens."""
    piece = 0
    full: list[_Group] = []

    def put(left: int, group: _Group) -> None:
        nonlocal free
        if not left:
            full.append(group)
            return
        groups.setdefault(left, []).append(group)
        free |= 1 << left

    lengths = np.flatnonzero(histogram[1:])[::-1] + 1
    for length, count in zip(lengths.tolist(), histogram[lengths].tolist(), strict=True):
        while count:
            above = free >> length
            if not above:  # no row has room for it: rows of its own
                each = min(room // length, count)
                rows = count // each
                put(room - each * length, _Group(rows, (_Taken(piece, each),)))
                placed = rows * each
            else:
                left = length + (above & -above).bit_length() - 1
                group = groups[left].pop()
                if not groups[left]:
                    free ^= 1 << left
                each = min(left // length, count)
                rows = min(count // each, group.rows)
                if rows < group.rows:
                    group, others = group.split(rows)
                    put(left, others)
                put(left - each * length, _Group(rows, (*group.taken, _Taken(piece, each))))
                placed = rows * each
            piece += placed
            count -= placed
    lefts = [0] * len(full)
    for left in sorted(groups):
        full.extend(groups[left])
        lefts += [left] * len(groups[left])
    sizes = np.array([len(group.taken) for group in full], dtype=np.int64)
    entries = [taken for group in full for taken in group.taken]
    return Fitted(
        ends=np.cumsum([group.rows for group in full], dtype=np.int64),
        free=np.array(lefts, dtype=np.int64),
        begins=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        first=np.array([taken.first for taken in entries], dtype=np.int64),
        each=np.array([taken.each for taken in entries], dtype=np.int64),
    )
