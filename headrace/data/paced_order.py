"""Read easy rows first: a keyed order whose open part grows, as a pure function of the row.

Rows are sorted by difficulty once. At a place of the run the easiest n of N are open, and rows are
read in passes over what is open: in a pass every row comes at most once, a stage that opens more
rows adds them to the pass that runs, and a pass that has nothing left is followed by the next. So
no row comes a second time while an open one waits, and from the last stage on every pass is an
epoch: every row once.

A stage's pool is what the stage before left unread, and what is newly opened. The pool is read in
the order of a keyed permutation. What a stage leaves is then the rest of its permutation, and a
place in it is found by asking the stage before: a row costs one permutation for each stage since
the pass began, and nothing is kept but the sorted rows, whatever was read: 12 bytes each, the score
as float32 and the row's number in the order of difficulty.

`sorted` has one stage that reads rows strictly by difficulty. Where fewer rows are read than there
are, each part of equal size of the sorted rows gives one, picked by the key, so that easy and hard
are both met.

With a mixture each source is paced through its own rows, by as many of them as the mixture deals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from headrace.data.mixture import Mixture
from headrace.data.order import BLOCK_ROWS, MixtureOrder, for_each, permute_many

_PACED = -2
"""Part of the key that no other order's permutation has."""


@dataclass(frozen=True)
class Leg:
    """A leg is a stretch of the run in which one pool of rows is read in one order.

    Args:
        first: the first row of the stream (or of the source in it) that it reads.
        carried: rows of its pool that the leg before left unread; they come first in the pool.
        skip: the place in the order of the leg before at which those begin.
        low, high: ranks that are newly opened: they come behind the carried ones.
        read: rows that it reads of its order once; 0 repeats the whole pool, pass after pass.
        strict: whether it is read in the order of difficulty.
    """

    first: int
    carried: int
    skip: int
    low: int
    high: int
    read: int
    strict: bool = False

    @property
    def pool(self) -> int:
        """Return how many rows its pool has."""
        return self.carried + self.high - self.low


def plan_legs(units: int, stages: Sequence[tuple[int, int]], *, strict: bool) -> list[Leg]:
    """Return the legs of a run over `units` rows.

    Args:
        units: rows that there are.
        stages: (first row, open rows) of each stage, rising from row 0; the last has all rows.
        strict: whether the rows before the last stage are read in the order of difficulty.
    """
    legs: list[Leg] = []
    carried = skip = opened = 0
    ends: list[int | None] = [*(first for first, _ in stages[1:]), None]
    for number, ((at, open_rows), end) in enumerate(zip(stages, ends, strict=True)):
        sorts = strict and number < len(stages) - 1
        while end is None or at < end:
            pool = carried + open_rows - opened
            if not pool:  # the pass is over
                carried, skip, opened = 0, 0, 0
                continue
            left = None if end is None else end - at
            fresh = carried == opened == 0
            if fresh and (left is None or left >= pool):
                legs.append(Leg(at, 0, 0, 0, open_rows, 0, sorts))
                if left is None:
                    break
                at += left // pool * pool
                opened = open_rows
                continue
            read = pool if left is None else min(left, pool)
            legs.append(Leg(at, carried, skip, opened, open_rows, read, sorts))
            at += read
            carried, skip, opened = pool - read, read, open_rows
    return legs


def _strata(place: np.ndarray, size: int, read: int, key: tuple[int, ...]) -> np.ndarray:
    """Return a permutation of range(size) whose first `read` places rise, over the whole range.

    The range is cut into `read` parts whose sizes differ by one at most. Place k is one of part k,
    picked by the key; the places behind are what is left of the parts, rising too.
    """
    rest = place - read
    part = np.where(rest < 0, place, -(-(rest + 1) * read // max(1, size - read)) - 1)
    begin, end = part * size // read, (part + 1) * size // read
    picked = permute_many(part, size=1 << 32, key=key) % (end - begin)
    within = rest - (part * (size - read) // read)
    return begin + np.where(rest < 0, picked, within + (within >= picked))


class Pacer:
    """Find the rank of each row that is read of one pool of rows, from its place alone.

    Args:
        scores: float [units], higher is harder; those that are to come first are lowest.
        stages: see `plan_legs`.
        seed, source: what names the order.
        strict: see `plan_legs`.
    """

    def __init__(
        self,
        scores: np.ndarray,
        stages: Sequence[tuple[int, int]],
        *,
        seed: int,
        source: int,
        strict: bool,
    ) -> None:
        self._key = (seed, source, _PACED)
        self.scores = scores.astype(np.float32)
        ties = permute_many(np.arange(len(scores)), size=len(scores), key=self._key)
        self.sorted = np.lexsort((ties, self.scores))
        self.stages = tuple(stages)
        self.legs = plan_legs(len(scores), stages, strict=strict)
        self._firsts = np.array([leg.first for leg in self.legs])

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Return the units that the rows at these places read, int64 of the same shape."""
        numbers = np.searchsorted(self._firsts, index, side="right") - 1
        ranks = for_each(numbers, index, lambda n, mine: self._ranks(n, mine - self._firsts[n]))
        return self.sorted[ranks]

    def open_at(self, place: int) -> int:
        """Return how many of the rows are open at a place of the stream."""
        return [rows for first, rows in self.stages if first <= place][-1]

    def passes(self, place: int) -> int:
        """Return how many passes have begun before a place: how often the first rows came."""
        count = 0
        for leg, behind in zip_longest(self.legs, self.legs[1:]):
            if leg.first < place and not (leg.carried or leg.low):
                until = min(place, behind.first) if behind else place
                count += -(-(until - leg.first) // leg.pool) if not leg.read else 1
        return count

    def _ranks(self, number: int, index: np.ndarray) -> np.ndarray:
        """Return the ranks at places `index` of a leg's own order."""
        leg = self.legs[number]
        epoch, within = np.divmod(index, leg.pool)
        place = for_each(epoch, within, lambda e, mine: self._within(number, e, mine))
        ranks = leg.low + place - leg.carried
        back = place < leg.carried
        if back.any():
            ranks[back] = self._ranks(number - 1, leg.skip + place[back])
        return ranks

    def _within(self, number: int, epoch: int, place: np.ndarray) -> np.ndarray:
        """Return the places in a leg's pool that one pass over it has in its order."""
        leg, key = self.legs[number], (*self._key, number, epoch)
        if not leg.strict:
            return permute_many(place, size=leg.pool, key=key)
        return _strata(place, leg.pool, leg.read or leg.pool, key)


class PacedOrder:
    """This order opens rows by their difficulty; see the text above.

    Args:
        scores: of each source, float [units].
        stages: (first row, open share) of each stage of the whole stream, rising from row 0.
        seed: names the order.
        mixture: what each source gives; without it all sources are one pool.
        hard_first: whether the highest scores come first.
        strict: whether rows are read in the order of difficulty.
        run_rows: rows of the whole run, of which `mean_scores` tells.
    """

    TENTHS = 10
    BLOCKS = 4
    """Blocks of rows, evenly spread, whose mean score stands for that of a tenth of a long run."""

    def __init__(
        self,
        scores: Sequence[np.ndarray],
        stages: Sequence[tuple[int, float]],
        *,
        seed: int,
        mixture: Mixture | None = None,
        hard_first: bool = False,
        strict: bool = False,
        run_rows: int,
    ) -> None:
        units = [len(part) for part in scores]
        self._ends = np.cumsum(units, dtype=np.int64)
        self._begins = np.array([0, *self._ends[:-1].tolist()], dtype=np.int64)
        self._sign = -1.0 if hard_first else 1.0
        self._mixture = None if mixture is None else MixtureOrder(units, mixture, seed=seed)
        self.end = None if mixture is None else mixture.end
        self._run_rows = max(1, run_rows)
        pools = [np.concatenate([*scores])] if self._mixture is None else [*scores]
        self.pacers: list[Pacer] = []
        for source, pool in enumerate(pools):
            rows = [(self._dealt(first, source), share) for first, share in stages]
            opens = {
                first: min(len(pool), int(np.ceil(share * len(pool)))) for first, share in rows
            }
            pacer = Pacer(
                self._sign * pool, sorted(opens.items()), seed=seed, source=source, strict=strict
            )
            self.pacers.append(pacer)

    def _dealt(self, row: int, source: int) -> int:
        """Return how many of the stream's rows before `row` are of a pool."""
        if self._mixture is None:
            return row
        behind = 0 if self.end is None else max(0, row - self.end)  # such rows never come
        return int(self._mixture.counts(row - behind)[source]) + behind

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and units [count] of the global rows first, first + 1, ..."""
        if self._mixture is None:
            unit = self.pacers[0](np.arange(first, first + count))
            source = np.searchsorted(self._ends, unit, side="right")
            return source, unit - self._begins[source]
        source, index = self._mixture.deal(first, count)
        return source, for_each(source, index, lambda s, mine: self.pacers[s](mine))

    def scores_of(self, source: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """Return the scores of rows, as they were given."""
        if self._mixture is None:
            return self._sign * self.pacers[0].scores[self._begins[source] + unit]
        out = np.empty(len(unit))
        for s in np.unique(source):
            mine = source == s
            out[mine] = self._sign * self.pacers[s].scores[unit[mine]]
        return out

    @property
    def mean_score(self) -> float:
        """Return the mean score of all rows."""
        total = sum(float(pacer.scores.sum(dtype=np.float64)) for pacer in self.pacers)
        return self._sign * total / int(self._ends[-1])

    def mean_scores(self, read: int) -> list[float]:
        """Return the mean score of the rows that come in each tenth of the run.

        Of more than `BLOCKS` * `BLOCK_ROWS` rows so many count. Rows behind the run's end are part
        of its last tenth.

        Args:
            read: rows of the stream that are read; tenths that begin behind them are left out.
        """
        begins = [tenth * self._run_rows // self.TENTHS for tenth in range(self.TENTHS)]
        means = []
        for begin, end in zip(begins, [*begins[1:], max(read, self._run_rows)], strict=True):
            if rows := max(0, min(end, read) - begin):
                means.append(self._mean(begin, rows))
        return means

    def _mean(self, begin: int, rows: int) -> float:
        """Return the mean score of the rows [begin, begin + rows), or of blocks of them."""
        blocks, size = [begin], rows
        if rows > self.BLOCKS * BLOCK_ROWS:
            blocks = [begin + n * rows // self.BLOCKS for n in range(self.BLOCKS)]
            size = BLOCK_ROWS
        scores = [self.scores_of(*self(first, size)) for first in blocks]
        return float(np.concatenate(scores).mean(dtype=np.float64))

    def closed(self, first: int, count: int) -> int:
        """Return how many of these rows lie beyond what is open, by their scores alone."""
        source, unit = self(first, count)
        scores = self._sign * self.scores_of(source, unit)
        wrong = 0
        for number, pacer in enumerate(self.pacers):
            mine = scores if self._mixture is None else scores[source == number]
            last = self._dealt(first + count, number) - 1
            border = pacer.scores[pacer.sorted[pacer.open_at(max(0, last)) - 1]]
            wrong += int((mine > border).sum())
        return wrong

    def open_share(self, row: int) -> float:
        """Return the share of all rows that is open at a row of the stream."""
        opens = [p.open_at(self._dealt(row, n)) for n, p in enumerate(self.pacers)]
        return sum(opens) / int(self._ends[-1])

    def passes(self, row: int) -> int:
        """Return how often the row that was read most came before a row of the stream, at most."""
        return max(self.passes_of(n, row) for n in range(len(self.pacers)))

    def passes_of(self, pool: int, row: int) -> int:
        """Return the same of one pool: a source's, where there is a mixture."""
        return self.pacers[pool].passes(self._dealt(row, pool))
