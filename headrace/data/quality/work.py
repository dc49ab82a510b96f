"""Make what the compiled loops work on: their callers hold it, so the loops allocate nothing.

One thread works on one of these at a time. Nothing here needs Numba.
"""

from typing import Any

import numpy as np

from headrace.data.quality.bands import BINS

PIECE = 1 << 13
"""Bytes of a document that are looked at together."""
MOST_NEW = PIECE // 2 + 8
"""Hashes that one piece gives at most: a word has a letter and a break."""
SPELLED = 2 * PIECE + 128
"""Bytes that its letters take at most, with what goes on from the piece before and the breaks
behind: a character of 3 bytes is one of 3 between two breaks, and one of 2 becomes 3."""
WORD, KEPT, ROLLED, SEEN, HEAD = 0, 1, 2, 3, 4
"""Places of a document's state: the hash of the word that is not finished, how many bytes of it are
not in that hash, the hash of the last words before it, and how many words were seen. From `HEAD` on
stand the last words, as many as n-grams have."""


def new_hashes(count: int) -> np.ndarray:
    """Return room for so many hashes, and for what a piece may write behind them."""
    return np.empty(count + MOST_NEW, np.uint64)


def new_work(n: int) -> tuple[np.ndarray, ...]:
    """Return what n-grams of `n` words are found with.

    It is the state of a document, and buffers for a piece of it: letters, and hashes of the last
    words in their order.
    """
    state, spelled = np.zeros(HEAD + n, np.uint64), np.empty(SPELLED, np.uint8)
    return state, spelled, np.empty(n + MOST_NEW, np.uint64)


def new_sketch_work(n: int, values: int, longest: int) -> tuple[Any, ...]:
    """Return what documents are sketched with.

    Args:
        n: words of an n-gram.
        values: bins that the bands read.
        longest: bytes of the longest document that may be sampled.
    """
    sizes = (BINS, BINS + 1, values, longest + 2)
    return new_work(n), *(np.empty(size, np.uint64) for size in sizes)
