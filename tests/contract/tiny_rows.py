"""Make a batch for a tiny model: rows with documents, ignored and uneven targets."""

import itertools
from collections.abc import Sequence

import numpy as np

from headrace.data.loader import Micro, collate
from headrace.data.rows import IGNORE, Row

ROWS, LENGTH = 6, 14


def make_rows(vocab: int, *, ignored: bool, seed: int = 0) -> list[Row]:
    """Make rows whose documents begin anywhere, one of them at a row's first token."""
    random = np.random.default_rng(seed)
    starts = [[0, 5], [], [1, 2, 12], [7], [4, 9], [LENGTH - 1, LENGTH]]
    rows = []
    for place, begins in enumerate(starts):
        ids = random.integers(0, vocab, LENGTH + 1)
        targets = ids[1:].copy()
        if ignored:  # rows 0 and 1 wholly, the others unevenly
            targets[random.random(LENGTH) < (1.0 if place < 2 else 0.15 * place)] = IGNORE
        rows.append(Row(ids, np.array(begins, dtype=np.int64), targets))
    return rows


def make_micros(rows: Sequence[Row], *, micro_rows: int, segments: bool) -> list[Micro]:
    """The rows as micro-batches, as the loader would hand them out."""
    size = micro_rows or len(rows)
    length = len(rows[0].ids) - 1
    return [
        collate(rows[i : i + size], segments=segments, first_token=i * length)
        for i in range(0, len(rows), size)
    ]


def documents_of(row: Row) -> list[slice]:
    """Return the row's documents as slices of its inputs."""
    inner = [int(s) for s in row.starts if 0 < s < LENGTH]
    return [slice(a, b) for a, b in itertools.pairwise([0, *inner, LENGTH])]
