"""Drop passages most of whose word n-grams came before: a Bloom filter that knows when it is full.

The filter holds n-grams, not texts, so it finds what was copied in parts. It reads in the order of
the sources, and what came first stays. It is made for a number of n-grams and a rate of false
positives, and stops when more come: a filter that is too full takes everything for repeated and
says nothing (the filter of mlfoundations/dclm dropped 98% of a corpus so, its issue 71).

All bits of an n-gram are in one cache line, for which the filter is made larger than a plain one
(see `bits_per_ngram`). Source of the rule for passages: bff of DCLM (arXiv 2406.11794, app. L).
"""

from array import array
from collections.abc import Iterable
from functools import cache
from math import ceil

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.units import format_bytes
from headrace.data.quality.bands import BLOCK_BITS, BLOCK_WORDS, bloom_rate
from headrace.data.quality.cleaner import CleanReport
from headrace.data.quality.compiled import compiled
from headrace.data.quality.letters import encode_composed, letters
from headrace.data.quality.passages import CutDocuments, passage_ends
from headrace.data.quality.work import new_hashes, new_work
from headrace.plan.cleaning import RATES

NGRAM_WORDS = 13
BATCH_BYTES = 1 << 20
ROOM = 1.1
"""What is advised after a filter was full: so much more than the corpus had in proportion."""


@cache
def bits_per_ngram(rate: float) -> int:
    """Return the fewest bits an n-gram that keep a rate of false positives.

    Args:
        rate: a share of the n-grams that never came, within `RATES`.
    """
    assert RATES[0] <= rate <= RATES[1]
    bits = 2
    while bloom_rate(bits) > rate:
        bits += 1
    return bits


def filter_bytes(ngrams: int, rate: float) -> int:
    """Return the memory of a filter for so many n-grams and this rate of false positives."""
    return ceil(ngrams * bits_per_ngram(rate) / BLOCK_BITS) * BLOCK_BITS // 8


def count_ngrams(texts: Iterable[str], words: int = NGRAM_WORDS) -> int:
    """Return how many n-grams texts have together, each as often as it stands there.

    Raises:
        UnsupportedError: Numba is not installed.
    """
    native, total, batch, starts = compiled(), 0, bytearray(), array("q", [0])
    given = (letters(), new_work(words), new_hashes(0))

    def count() -> int:
        return native.count_ngrams(
            np.frombuffer(batch, np.uint8), np.frombuffer(starts, np.int64), *given
        )

    for text in texts:
        batch += encode_composed(text, text.encode())
        starts.append(len(batch))
        if len(batch) >= BATCH_BYTES:
            total += count()
            batch, starts = bytearray(), array("q", [0])
    return total + count()


class RepeatedPassages(CutDocuments):
    """Drop paragraphs most of whose word n-grams came before.

    Args:
        ngrams: how many the corpus has, at most; `count_ngrams` counts them.
        rate: wanted share of new n-grams that are taken for old ones.
        words: words of an n-gram; a paragraph with fewer stays.
        share: share of a paragraph's n-grams that came before, from which it falls.

    Raises:
        UnsupportedError: Numba is not installed.
    """

    def __init__(
        self,
        *,
        ngrams: int,
        rate: float = 0.01,
        words: int = NGRAM_WORDS,
        share: float = 0.8,
    ) -> None:
        super().__init__()
        assert ngrams > 0 and words > 0 and 0 < share <= 1
        self.ngrams, self.words, self.share = ngrams, words, share
        self.inserted = 0
        self._native, self._letters = compiled(), letters()
        size = filter_bytes(ngrams, rate) // 8
        buffer = np.zeros(size + BLOCK_WORDS, np.uint64)
        skipped = -buffer.ctypes.data // 8 % BLOCK_WORDS
        self._blocks = buffer[skipped : skipped + size]
        self._text, self._starts = bytearray(), array("q", [0])
        self._flags, self._sizes = bytearray(), bytearray()

    @property
    def memory_bytes(self) -> int:
        """Return what is held now, in bytes."""
        return self._blocks.nbytes + self.register.memory_bytes + 9 * self._passages

    def learn(self, source: int, index: int, text: str) -> None:
        """Learn a document: number `index` of source number `source`, both from 0.

        Raises:
            ConfigError: the filter is full.
        """
        raw = text.encode()
        composed = encode_composed(text, raw)
        ends, begin = passage_ends(composed), len(self._text)
        self._add(source, index, raw, len(ends))
        self._text += composed
        for end in ends:
            self._starts.append(begin + end)
        if len(self._text) >= BATCH_BYTES:
            self._sift()

    def _sift(self) -> None:
        starts, native = np.frombuffer(self._starts, np.int64), self._native
        sizes, falls = np.diff(starts), np.empty(starts.size - 1, np.uint8)
        self.inserted = native.sift(
            self._blocks,
            np.frombuffer(self._text, np.uint8),
            starts,
            self._letters,
            new_work(self.words),
            new_hashes(int(sizes.max()) // 2 + 1),
            self.share,
            self.inserted,
            self.ngrams,
            falls,
        )
        if self.inserted > self.ngrams:
            raise self._full()
        self._flags += falls.tobytes()
        self._sizes += sizes.astype(np.uint64).tobytes()
        self._text, self._starts = bytearray(), array("q", [0])

    def _full(self) -> ConfigError:
        read = int(self.register.lengths().sum())
        return ConfigError(
            f"the filter is full: it was made for {self.ngrams:,} n-grams of {self.words} words "
            f"({format_bytes(self._blocks.nbytes)}), and {self.inserted:,} different ones came in "
            f"the first {format_bytes(read)} of text; from here on it would take new text for "
            "repeated",
            f"ngrams={ceil(ROOM * max(2 * self.ngrams, self.inserted))}, or as many as the "
            "whole corpus has",
        )

    def finish(self) -> CleanReport:
        """Report what fell, after the last document.

        Raises:
            ConfigError: the filter is full.
        """
        if len(self._starts) > 1:
            self._sift()
        memory = self.memory_bytes
        self._blocks = self._blocks[:0].copy()
        falls = np.array(np.frombuffer(self._flags, np.uint8))
        return self._settle(falls, np.frombuffer(self._sizes, np.uint64), memory_bytes=memory)
