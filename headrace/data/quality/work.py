"""Make what the compiled loops work on: their callers hold it, so the loops allocate nothing.

One thread works on one of these at a time. Nothing here needs Numba.
"""

from typing import Any

import numpy as np

from headrace.data.quality.bands import BINS

PIECE = 1 << 13
"""Bytes of a document that are looked at together, and letters of them at most: a character that is
three letters, itself between two breaks, has three bytes."""
MOST_NEW = PIECE // 2 + 8
"""Hashes that one piece gives at most: a word has a letter and a break."""
WORD, ROLLED, SEEN, HEAD = 0, 1, 2, 3
"""Places of a document's state: the hash of the word that is not finished, that of the last words
before it, and how many words were seen. From `HEAD` on stand the last words, as many as n-grams
have."""


def new_hashes(count: int) -> np.ndarray:
    """Return room for so many hashes, and for what a piece may write behind them."""
    return np.empty(count + MOST_NEW, np.uint64)


def new_work(n: int) -> tuple[np.ndarray, ...]:
    """Return what n-grams of `n` words are found with.

    It is the state of a document, and buffers for a piece of it: letters, hashes of words, and the
    last words in their order.
    """
    state, letters = np.zeros(HEAD + n, np.uint64), np.empty(PIECE + 8, np.uint32)
    return state, letters, np.empty(PIECE + 8, np.uint64), np.empty(n + MOST_NEW, np.uint64)


def new_sketch_work(n: int, values: int, longest: int) -> tuple[Any, ...]:
    """Return what documents are sketched with.

    Args:
        n: words of an n-gram.
        values: bins that the bands read.
        longest: bytes of the longest document that may be sampled.
    """
    sizes = (BINS, BINS + 1, values, longest + 2)
    return new_work(n), *(np.empty(size, np.uint64) for size in sizes)
