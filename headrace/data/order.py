"""Which row comes next: a keyed permutation instead of a shuffle buffer.

A shuffle buffer mixes only its own window and loses its content on resume; an index array takes
eight bytes per row and a pause on rank 0. Here the place of row `k` is computed: a Feistel network
over the next power of two, walked until it lands inside (Black & Rogaway, "Ciphers with arbitrary
finite domains", 2002). That costs a few microseconds, no memory, and any row of any epoch can be
asked for first, so a resume is a multiplication.

Without weights every source counts by its size: one permutation over all units of all sources. With
a mixture (mixture.py), the rows of each of its stretches are dealt in periods of about a thousand.
The share of a source up to row n of a stretch is floor(n * cumulative share) less that of the
sources before it, in exact integers, so the mixture is right to one row at each period's end,
however long a stretch is, and to none at the stretch's; within a period the order is permuted too.
Each source then runs through its own units, epoch after epoch, each in a new order.

Eight half rounds of a 64-bit mixer (splitmix64's, Steele et al. 2014) are for order, not secrecy.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from headrace.data.mixture import Mixture, Stretch

_MASK = (1 << 64) - 1
_HALF_ROUNDS = 8
PERIOD = 1024
BLOCK_ROWS, BLOCKS = 1024, 8
"""Rows that are ordered together, and how many such blocks are kept."""


class Order(Protocol):
    """What the `order` socket holds: a pure function, called from several threads at once."""

    @property
    def end(self) -> int | None:
        """Return how many rows there are; None where they never end."""
        ...

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

    end = None

    def __init__(self, units: Sequence[int], *, seed: int) -> None:
        self._ends = np.cumsum(units)
        self._total, self._seed = int(self._ends[-1]), seed

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and units [count] of the global rows first, first + 1, ..."""
        place = _epochs(np.arange(first, first + count), self._total, (self._seed,))
        source = np.searchsorted(self._ends, place, side="right")
        begins = np.concatenate([[0], self._ends])
        return source, place - begins[source]


class MixtureOrder:
    """This order draws sources by the shares of a mixture; each source has epochs of its own.

    A stretch of the mixture is dealt in periods. Its last period is as long as what is left, so
    that none is shorter than two rows of the smallest source.
    """

    def __init__(self, units: Sequence[int], mixture: Mixture, *, seed: int) -> None:
        self.mixture, self._units, self._seed = mixture, tuple(units), seed
        self._firsts = np.array([stretch.first for stretch in mixture.stretches])
        self._periods = [_period(stretch) for stretch in mixture.stretches]
        self._table = lru_cache(maxsize=8)(self._make_table)

    @property
    def end(self) -> int | None:
        """Return the row at which the sources of a stage are used up; None where none is."""
        return self.mixture.end

    def counts(self, rows: int) -> np.ndarray:
        """Return how many of the first `rows` global rows each source has [sources]."""
        if not rows:
            return np.zeros(len(self._units), dtype=np.int64)
        ((number, period, slot),) = self._places(rows - 1, 1)
        source, _ = self._table(number, period)
        before = self._dealt(number, period * self._periods[number])
        return before + np.bincount(source[: slot[0] + 1], minlength=len(before))

    def deal(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources of the global rows first, ..., and their places in these, int64 [count].

        The place of a row is the number of rows of its source that came before.
        """
        parts = [
            [column[slot] for column in self._table(number, period)]
            for number, period, slot in self._places(first, count)
        ]
        source, index = (np.concatenate(column) for column in zip(*parts, strict=True))
        return source, index

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and units [count] of the global rows first, first + 1, ..."""
        source, index = self.deal(first, count)
        return source, for_each(
            source, index, lambda s, mine: _epochs(mine, self._units[s], (self._seed, s))
        )

    def _places(self, first: int, count: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the stretch and the period of global rows, with the slots [rows] there, in order.

        Raises:
            IndexError: a row comes after the mixture's end.
        """
        row, end = first, first + count
        if self.end is not None and end > self.end:
            raise IndexError(f"row {end - 1} is outside a mixture of {self.end} rows")
        while row < end:
            number = int(np.searchsorted(self._firsts, row, side="right")) - 1
            begin, stop = self._bounds(number, row)
            upto = min(end, stop)
            period = (begin - self.mixture.stretches[number].first) // self._periods[number]
            yield number, period, np.arange(row - begin, upto - begin)
            row = upto

    def _bounds(self, number: int, row: int) -> tuple[int, int]:
        """Return the first row of the period that has a global row, and the first one after it."""
        stretch, size = self.mixture.stretches[number], self._periods[number]
        period = (row - stretch.first) // size
        if stretch.rows is None or period < (last := max(1, stretch.rows // size) - 1):
            begin = stretch.first + period * size
            return begin, begin + size
        return stretch.first + last * size, stretch.first + stretch.rows

    def _dealt(self, number: int, rows: int) -> np.ndarray:
        """Return the rows of each source before row `rows` of a stretch, a period's first one.

        Within the stretch that is floor(rows * cumulative share) less that of the sources before.
        """
        stretch = self.mixture.stretches[number]
        ends = [int(rows * cumulative) for cumulative in accumulate(stretch.shares)]
        return np.diff(ends, prepend=0) + np.array(stretch.before)

    def _make_table(self, number: int, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source and the index within the source of each row of a period [period]."""
        stretch, size = self.mixture.stretches[number], self._periods[number]
        begin, stop = self._bounds(number, stretch.first + period * size)
        before = self._dealt(number, begin - stretch.first)
        quota = self._dealt(number, stop - stretch.first) - before
        slots = np.arange(stop - begin)
        place = permute_many(slots, size=len(slots), key=(self._seed, -1 - number, period))
        source = np.searchsorted(np.cumsum(quota), place, side="right")
        index = np.empty_like(source)
        for s in range(len(quota)):
            mine = source == s
            index[mine] = before[s] + np.arange(quota[s])
        return source, index


def _period(stretch: Stretch) -> int:
    """Return the rows of a period: two of the smallest source at least.

    With fewer, rounding could hand a small source a negative quota.
    """
    smallest = min(share for share in stretch.shares if share)
    return max(PERIOD, -(-2 // smallest))


def _epochs(index: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Return the units of endless epochs over range(size), each in the order of (*key, epoch)."""
    epoch, within = np.divmod(index, size)
    return for_each(epoch, within, lambda e, mine: permute_many(mine, size=size, key=(*key, e)))


def for_each(
    groups: np.ndarray, values: np.ndarray, change: Callable[[int, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return `change(group, its values)` at the places of each group, of the type of `values`.

    Args:
        groups: int64 [N], such as the source or the epoch of each row.
        values: [N].
        change: is called once for each group.
    """
    out = np.empty_like(values)
    for group in np.unique(groups).tolist():
        mine = groups == group
        out[mine] = change(group, values[mine])
    return out


class BlockedOrder:
    """Ask an order for whole blocks of rows, and keep the last ones.

    A permutation of 32 rows takes numpy as long as one of 1,024: each call of it costs more than
    what it computes. A block is a pure function of its number, so it is no state.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self._block = lru_cache(maxsize=BLOCKS)(self._read)

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and units [count] of the global rows first, first + 1, ..."""
        last = self.order.end
        if last is not None and first + count > last:
            raise IndexError(f"row {first + count - 1} is outside an order of {last} rows")
        begin, end = first // BLOCK_ROWS, -(-(first + count) // BLOCK_ROWS)
        blocks = [self._block(number) for number in range(begin, end)]
        rows = slice(first - begin * BLOCK_ROWS, first - begin * BLOCK_ROWS + count)
        if len(blocks) == 1:
            return blocks[0][0][rows], blocks[0][1][rows]
        sources, units = (np.concatenate(part)[rows] for part in zip(*blocks, strict=True))
        return sources, units

    def _read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a block of rows; that in which the order ends is shorter."""
        first, last = number * BLOCK_ROWS, self.order.end
        return self.order(first, BLOCK_ROWS if last is None else min(BLOCK_ROWS, last - first))


def make_order(units: Sequence[int], *, seed: int, mixture: Mixture | None = None) -> Order:
    """Return the baseline's order over sources of so many units each."""
    if mixture is None:
        return UniformOrder(units, seed=seed)
    return MixtureOrder(units, mixture, seed=seed)
