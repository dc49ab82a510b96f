"""The words of a text as numbers, and runs of them: what decides whether two texts share a passage.

What a word is, and which letters are the same, stands in letters.py: a run of letters, digits and
marks, or a character of a script without spaces. native.py finds the same words of near-duplicates
in compiled code; this needs no compiler, and says where in the text each word stands.

A word's number is a polynomial of its characters modulo 2^64, mixed; that of a run a polynomial of
its words'. Everything is computed by numpy over a million characters at a time, so it takes about
40 bytes a character of that block and 24 a word of the document. Nothing depends on Python's own
hashes, so the numbers are equal in every process.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.data.quality.letters import ALONE, LETTERS, SKIP, letters

Numbers = NDArray[np.uint64]
Places = NDArray[np.int64]

BLOCK = 1 << 20
"""Characters that are looked at together."""
BASE = 0x9E3779B97F4A7C15
"""Odd, so that it has an inverse modulo 2^64 (2^64 over the golden ratio)."""


class WordTable(NamedTuple):
    """Hold the words of a text, in order."""

    numbers_N: Numbers
    starts_N: Places
    """The character with which each begins."""
    ends_N: Places
    """The character behind each."""


def words_of(text: str) -> WordTable:
    """Return the words of a text."""
    parts = []
    begin = 0
    while begin < len(text):
        end = len(text)
        if end - begin > BLOCK:
            limit = begin + BLOCK
            end = 1 + max(text.rfind(" ", begin, limit), text.rfind("\n", begin, limit))
            end = end if end > begin else limit
        parts.append(_block(text[begin:end], begin))
        begin = end
    if not parts:
        parts = [_block("", 0)]
    return WordTable(*map(np.concatenate, zip(*parts, strict=True)))


def runs_of(numbers_N: Numbers, length: int) -> Numbers:
    """Return the number of every run of `length` words, by the place of its first word."""
    count = max(0, len(numbers_N) - length + 1)
    runs = np.full(count, length, dtype=np.uint64)
    for offset in range(length):
        runs *= np.uint64(BASE)
        runs += numbers_N[offset : offset + count]
    return _mixed(runs)


def _block(text: str, begin: int) -> WordTable:
    if text.isascii():
        letters_N = letters()[np.frombuffer(text.encode(), dtype=np.uint8)]
    else:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        known = letters()[np.minimum(codes, LETTERS - 1)]
        letters_N = np.where(codes < LETTERS, known, codes | np.uint32(ALONE))
    is_seen = letters_N != SKIP
    places_N = None if is_seen.all() else np.flatnonzero(is_seen)
    if places_N is not None:
        letters_N = letters_N[places_N]
    alone = letters_N >= ALONE
    joins = (letters_N > SKIP) & ~alone
    edges = np.diff(joins.view(np.int8), prepend=np.int8(0), append=np.int8(0))
    starts = np.flatnonzero((edges[:-1] == 1) | alone)
    ends = np.flatnonzero((edges[1:] == -1) | alone) + 1
    powers, inverses = _powers()
    sums = np.zeros(len(letters_N) + 1, dtype=np.uint64)
    np.cumsum(letters_N.astype(np.uint64) * powers[: len(letters_N)], out=sums[1:])
    numbers = _mixed((sums[ends] - sums[starts]) * inverses[starts])
    if places_N is not None:
        starts, ends = places_N[starts], places_N[ends - 1] + 1
    return WordTable(numbers, starts + begin, ends + begin)


def _mixed(numbers: Numbers) -> Numbers:
    """Return numbers whose bits all depend on all bits: the end of MurmurHash3, in place."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        numbers ^= numbers >> np.uint64(33)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(33)
    return numbers


@cache
def _powers() -> tuple[Numbers, Numbers]:
    """Return the powers of BASE modulo 2^64, and those of its inverse."""
    both = []
    for base in (BASE, pow(BASE, -1, 1 << 64)):
        powers = np.full(BLOCK, base, dtype=np.uint64)
        powers[0] = 1
        both.append(np.multiply.accumulate(powers))
    return both[0], both[1]
