"""Which row comes next: a keyed permutation instead of a shuffle buffer.

A shuffle buffer mixes only its own window and loses its content on resume; an index array takes
eight bytes per row and a pause on rank 0. Here the place of row `k` is computed: a Feistel network
over the next power of two, walked until it lands inside (Black & Rogaway, "Ciphers with arbitrary
finite domains", 2002). That costs a few microseconds, no memory, and any row of any epoch can be
asked for first, so a resume is a multiplication.

Without weights every source counts by its size: one permutation over all units of all sources. With
weights, rows are dealt in periods of about a thousand. The share of a source up to row n is
floor(n * cumulative weight) less that of the sources before it, in exact integers, so the mixture
is right to one row for ever; within a period the order is permuted too. Each source then runs
through its own units, epoch after epoch, each in a new order.

Eight half rounds of a 64-bit mixer (splitmix64's, Steele et al. 2014) are for order, not secrecy.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend

_MASK = (1 << 64) - 1
_HALF_ROUNDS = 8
PERIOD = 1024
SMALLEST_SHARE = 1 / 65_536


class Order(Protocol):
    """What the `order` socket holds: a pure function, called from several threads at once."""

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and units [count] of the global rows first, first + 1, ..."""
        ...


@lru_cache(maxsize=4096)
def _round_keys(key: int | bytes | tuple[int, ...]) -> tuple[int, ...]:
    raw = key if isinstance(key, bytes) else repr(key).encode()
    digest = hashlib.blake2b(raw, digest_size=8 * _HALF_ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def _mix(x: Any) -> Any:
    """Return the finalizer of splitmix64, for a Python int or for a uint64 array."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _feistel(x: Any, bits: int, keys: tuple[int, ...]) -> Any:
    """Map range(2**bits) onto itself: each half is changed by a function of the other."""
    low_bits = (bits + 1) // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    low, high = x & low_mask, x >> low_bits
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        high = high ^ (_mix((low + even) & _MASK) & high_mask)
        low = low ^ (_mix((high + odd) & _MASK) & low_mask)
    return (high << low_bits) | low


def permute(index: int, *, size: int, key: int | bytes | tuple[int, ...]) -> int:
    """Return where `index` goes in the permutation of range(size) that `key` names."""
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside range({size})")
    keys, bits = _round_keys(key), (size - 1).bit_length()
    index = _feistel(index, bits, keys)
    while index >= size:
        index = _feistel(index, bits, keys)
    return index


def permute_many(index: np.ndarray, *, size: int, key: int | bytes | tuple[int, ...]) -> np.ndarray:
    """Return `permute` of an array of indices, as int64 of the same shape."""
    if len(index) and (index.min() < 0 or index.max() >= size):
        raise IndexError(f"an index is outside range({size})")
    keys, bits = _round_keys(key), (size - 1).bit_length()
    out = _feistel(index.astype(np.uint64), bits, keys)
    while (outside := out >= size).any():
        out[outside] = _feistel(out[outside], bits, keys)
    return out.astype(np.int64)


class UniformOrder:
    """This order has every unit of every source once per epoch, all sources shuffled together."""

    def __init__(self, units: Sequence[int], *, seed: int) -> None:
        self._ends = np.cumsum(units)
        self._total, self._seed = int(self._ends[-1]), seed

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and units [count] of the global rows first, first + 1, ..."""
        place = _epochs(np.arange(first, first + count), self._total, (self._seed,))
        source = np.searchsorted(self._ends, place, side="right")
        begins = np.concatenate([[0], self._ends])
        return source, place - begins[source]


def _raised(weights: Sequence[float]) -> list[float]:
    """Return the weights, with those that are too small raised to the least that is possible."""
    least = sum(weights) * SMALLEST_SHARE
    return [w if w >= 1.01 * least else float(f"{1.02 * least:.3g}") for w in weights]


class MixtureOrder:
    """This order draws sources by weight, exactly in the long run; each has epochs of its own.

    Raises:
        ConfigError: a source's share is below 1 in 65,536.
    """

    def __init__(self, units: Sequence[int], weights: Sequence[float], *, seed: int) -> None:
        shares = [Fraction(str(w)) for w in weights]
        total = sum(shares)
        smallest = min(shares) / total
        if smallest < SMALLEST_SHARE:
            raise ConfigError(
                f"data.weights gives one source a share of {float(smallest):.2g}, "
                f"the smallest possible is {SMALLEST_SHARE:.2g}",
                mend(f"data.weights={_raised(weights)}"),
            )
        self._cumulative = [sum(shares[: i + 1], Fraction(0)) / total for i in range(len(shares))]
        # Two rows a period at least, or rounding could hand a small source a negative quota.
        self._period = max(PERIOD, -(-2 // smallest))
        self._units, self._seed = tuple(units), seed
        self._table = lru_cache(maxsize=8)(self._make_table)

    def pick(self, row: int) -> tuple[int, int]:
        """Return the source of a global row, and how many rows of that source came before it."""
        period, slot = divmod(row, self._period)
        source, index = self._table(period)
        return int(source[slot]), int(index[slot])

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and units [count] of the global rows first, first + 1, ..."""
        period, slot = np.divmod(np.arange(first, first + count), self._period)
        source, index = np.empty_like(slot), np.empty_like(slot)
        for p in np.unique(period):
            mine = period == p
            all_sources, all_indices = self._table(int(p))
            source[mine], index[mine] = all_sources[slot[mine]], all_indices[slot[mine]]
        unit = np.empty_like(index)
        for s in np.unique(source):
            mine = source == s
            unit[mine] = _epochs(index[mine], self._units[s], (self._seed, int(s)))
        return source, unit

    def _dealt(self, rows: int) -> np.ndarray:
        """Return how many of the first `rows` global rows each source has [sources]."""
        ends = [rows * c.numerator // c.denominator for c in self._cumulative]
        return np.diff(ends, prepend=0)

    def _make_table(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source and the index within the source of each row of a period [period]."""
        before = self._dealt(period * self._period)
        quota = self._dealt((period + 1) * self._period) - before
        slots = np.arange(self._period)
        place = permute_many(slots, size=self._period, key=(self._seed, -1, period))
        source = np.searchsorted(np.cumsum(quota), place, side="right")
        index = np.empty_like(source)
        for s in range(len(quota)):
            mine = source == s
            index[mine] = before[s] + np.arange(quota[s])
        return source, index


def _epochs(index: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Return the units of endless epochs over range(size), each in the order of (*key, epoch)."""
    epoch, within = np.divmod(index, size)
    out = np.empty_like(within)
    for e in np.unique(epoch):
        mine = epoch == e
        out[mine] = permute_many(within[mine], size=size, key=(*key, int(e)))
    return out


def make_order(units: Sequence[int], *, seed: int, weights: Sequence[float] | None = None) -> Order:
    """Return the baseline's order over sources of so many units each."""
    if weights is None:
        return UniformOrder(units, seed=seed)
    return MixtureOrder(units, weights, seed=seed)
