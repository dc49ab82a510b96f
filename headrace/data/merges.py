"""Learn the merges of a byte-level BPE from counted words, and find those of a vocabulary again.

Several merges are made at a time.

The pair that stands most often in all words, of equals the one whose first and then second token is
the older, becomes the next token, until there are enough or no pair is left (Sennrich et al.,
https://arxiv.org/abs/1508.07909).

A pair can only lose places once both its tokens are made. So its places are listed once, and
counted again when its turn seems to come. Pairs are merged together as long as that is the same as
merging them in turn: no token ends one of them and begins another, and no pair that they make
stands as often as the last of them.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

_SHIFT = 32
"""A pair is one int64: its first token from this bit on, its second below."""
_MOST = 1024
"""Pairs that are looked at together, at most; they are some more than twice as many as were merged
together the last time."""
Entry = tuple[int, int]
"""Minus the count of a pair, and the pair: the least entry is merged next."""


def learn_from_counts(words: dict[str, int], merges: int) -> dict[bytes, int]:
    """Return the rank of every token that counted words give: bytes first, then merges in order.

    Two pairs that spell the same are one token, the older.

    Args:
        words: how often each word stands in the text, in any order.
        merges: how many merges are made at most.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    chain = _Chain(words)
    most = 4
    while (left := 256 + merges - len(tokens)) > 0:
        pairs = chain.next_pairs(min(most, left))
        if not pairs:
            break
        chain.merge(pairs, len(tokens))
        tokens += [tokens[first] + tokens[second] for first, second in map(_parts, pairs)]
        most = min(_MOST, 4 + 2 * len(pairs))
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def learned_pairs(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the two tokens whose merge made each token, for ranks that BPE learned, by rank.

    There may be several ways to cut a token in two older ones. The right one is that in which no
    token across the cut is older than what it would break: merging the bytes in order stops there
    before it makes the token (`is_valid_token_pair` of https://github.com/github/rust-gems).
    """
    pair_of: dict[bytes, tuple[bytes, bytes]] = {}
    for token, rank in ranks.items():
        for cut in range(len(token) - 1, 0, -1):
            first, second = token[:cut], token[cut:]
            are_older = ranks.get(first, rank) < rank and ranks.get(second, rank) < rank
            if are_older and _stay_apart(first, second, ranks, pair_of):
                pair_of[token] = first, second
                break
    return [*pair_of.values()]


def _stay_apart(
    first: bytes,
    second: bytes,
    ranks: dict[bytes, int],
    pair_of: dict[bytes, tuple[bytes, bytes]],
) -> bool:
    """Return whether bytes of two neighbours are merged to these and not across their border.

    The younger of the two is taken apart again and again: a token of its part at the border and of
    the other would have been merged first if it were older.
    """
    while len(first) > 1 or len(second) > 1:
        if len(second) == 1 or (len(first) > 1 and ranks[first] > ranks[second]):
            limit = ranks[first]
            first = pair_of[first][1]
        else:
            limit = ranks[second] + 1  # of equals the left one is merged first
            second = pair_of[second][0]
        if ranks.get(first + second, limit) < limit:
            return False
    return True


def parents(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two tokens whose merge made this one: BPE of its bytes by lower ranks only."""
    own = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    made = [ranks.get(token[i : i + 2], own) for i in range(len(token) - 1)]
    while len(parts) > 2:
        lowest = min(made)
        if lowest >= own:
            return None
        i = made.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del made[i]
        for left in range(max(0, i - 1), min(i + 1, len(made))):
            made[left] = ranks.get(parts[left] + parts[left + 1], own)
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _parts(pair: int) -> tuple[int, int]:
    """Return the first and the second token of a pair."""
    return pair >> _SHIFT, pair & ((1 << _SHIFT) - 1)


def _sums(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each run of equal keys begins, and the sum of its counts."""
    begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    return begins, np.add.reduceat(counts, begins)


class _Chain:
    """Hold the tokens of all words, and know which pairs of neighbours are merged next.

    Every byte of every word has a place; between words, and at both ends, is an empty one. A token
    stands at the place of its first byte; the places of its other bytes are empty.
    """

    def __init__(self, words: dict[str, int]) -> None:
        joined = b"".join(b"\xff" + word.encode() for word in words) + b"\xff"
        raw = np.frombuffer(joined, np.uint8)
        is_empty = raw == 0xFF  # no byte of UTF-8
        counts = np.append(np.fromiter(words.values(), np.int64, len(words)), 0)
        self._count = counts[np.cumsum(is_empty) - 1]
        self._token = np.where(is_empty, -1, raw.astype(np.int32))
        self._before = np.arange(-1, len(raw) - 1, dtype=np.int32)
        self._behind = np.arange(1, len(raw) + 1, dtype=np.int32)
        self._queue = _Queue(3 * len(raw))  # a merge empties one place, and makes at most two pairs
        self._list(np.flatnonzero(~is_empty[:-1] & ~is_empty[1:]))

    def _list(self, places: np.ndarray) -> None:
        """Queue the pairs at some places; none of these pairs stood anywhere before."""
        if len(places):
            pairs = self._token[places].astype(np.int64) << _SHIFT
            pairs |= self._token[self._behind[places]]
            order = np.argsort(pairs, kind="stable")
            places = places[order]
            self._queue.add(pairs[order], places, self._count[places])

    def next_pairs(self, most: int) -> list[int]:
        """Return pairs that are merged next, in order, and can be merged together."""
        while pairs := self._queue.pop(most):
            places, owner = self._places_of(pairs)
            first, second = np.array([_parts(pair) for pair in pairs], np.int32).T
            is_there = self._token[places] == first[owner]
            is_there &= self._token[self._behind[places]] == second[owner]
            places, owner = places[is_there], owner[is_there]
            ends = np.searchsorted(owner, np.arange(len(pairs) + 1)).tolist()
            counts = np.diff(np.append(0, np.cumsum(self._count[places]))[ends]).tolist()
            for number, pair in enumerate(pairs):
                self._queue.places[pair] = places[ends[number] : ends[number + 1]]
            if ready := self._queue.put_back(pairs, counts):
                together = self._together(ready)
                self._queue.push(ready[together:])
                return [pair for _, pair in ready[:together]]
        return []

    def _places_of(self, pairs: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the listed places of pairs one after the other, and which pair each is of."""
        listed = [self._queue.places[pair] for pair in pairs]
        return np.concatenate(listed), np.repeat(np.arange(len(pairs)), [*map(len, listed)])

    def _together(self, ready: Sequence[Entry]) -> int:
        """Return how many of the pairs that are next can be merged together."""
        firsts: set[int] = set()
        seconds: set[int] = set()
        for number, (_, pair) in enumerate(ready):
            first, second = _parts(pair)
            firsts.add(first)
            seconds.add(second)
            if first in seconds or second in firsts:
                ready = ready[: max(1, number)]
                break
        if len(ready) == 1:
            return 1
        largest = self._largest_made([pair for _, pair in ready])
        counts = np.array([-count for count, _ in ready])
        overtaken = np.maximum.accumulate(largest)[:-1] >= counts[1:]
        return 1 + int(np.argmax(overtaken)) if overtaken.any() else len(ready)

    def _largest_made(self, pairs: Sequence[int]) -> np.ndarray:
        """Return a bound on how often any pair stands that the merge of each makes, int64 [n].

        What is made of a merge and its neighbour stands at most as often as that neighbour's last
        or first token now stands there.
        """
        places, owner = self._places_of(pairs)
        count = self._count[places]
        keys, counts = [], []
        for side, beside in enumerate((self._before[places], self._behind[self._behind[places]])):
            neighbour = self._token[beside]
            is_token = neighbour >= 0
            keys.append(((2 * owner + side) << _SHIFT | neighbour)[is_token])
            counts.append(count[is_token])
        made = np.concatenate(keys)
        largest = np.zeros(len(pairs), np.int64)
        if len(made):
            order = np.argsort(made)
            made = made[order]
            begins, sums = _sums(made, np.concatenate(counts)[order])
            np.maximum.at(largest, made[begins] >> (_SHIFT + 1), sums)
        return largest

    def merge(self, pairs: Sequence[int], token: int) -> None:
        """Put new tokens in the places of pairs, one for each, counted up from `token`."""
        places, owner = self._places_of(pairs)
        if len(set(_parts(pairs[0]))) == 1:
            places = self._every_other(np.sort(places))
            owner = owner[: len(places)]
        second = self._behind[places]
        behind = self._behind[second]
        self._token[places] = token + owner
        self._token[second] = -1
        self._behind[places] = behind
        self._before[behind] = places
        before, neighbour = self._before[places], self._token[behind]
        begins_pair = (neighbour >= 0) & (neighbour < token)  # beside a new one it is listed there
        self._list(np.concatenate([before[self._token[before] >= 0], places[begins_pair]]))
        self._queue.forget(pairs)

    def _every_other(self, places: np.ndarray) -> np.ndarray:
        """Return the places at which a pair of equal tokens is merged: "aaaaa" has two."""
        begins = np.flatnonzero(np.append(True, self._behind[places[:-1]] != places[1:]))
        lengths = np.diff(np.append(begins, len(places)))
        return places[(np.arange(len(places)) - np.repeat(begins, lengths)) % 2 == 0]


class _Queue:
    """Order pairs by the counts they had when last looked at; rare ones wait without an order.

    Attributes:
        places: where each pair stood then, of those that are in order or taken out.
    """

    def __init__(self, room: int) -> None:
        """Make room for as many places of pairs as will be added."""
        self.places: dict[int, np.ndarray] = {}
        self._stored = np.empty(room, np.int32)
        self._end = 0
        self._heap: list[Entry] = []
        self._waiting: list[Sequence[np.ndarray]] = []
        self._least = np.iinfo(np.int64).max
        """Count from which on pairs are in order."""

    def add(self, pairs: np.ndarray, places: np.ndarray, counts: np.ndarray) -> None:
        """Take new pairs, sorted: each place of each of them, and how often that stands."""
        begins, sums = _sums(pairs, counts)
        places_of_each = self._end + np.append(begins, len(places))
        self._stored[self._end : self._end + len(places)] = places
        self._end += len(places)
        self._sort_in(sums, pairs[begins], places_of_each[:-1], places_of_each[1:])

    def _sort_in(self, counts: np.ndarray, *rest: np.ndarray) -> None:
        is_often = counts >= self._least
        often = (column[is_often].tolist() for column in (counts, *rest))
        for count, pair, begin, end in zip(*often, strict=True):
            self.places[pair] = self._stored[begin:end]
            heappush(self._heap, (-count, pair))
        if not is_often.all():
            self._waiting.append([column[~is_often] for column in (counts, *rest)])

    def pop(self, most: int) -> list[int]:
        """Take out the pairs with the largest counts; none where no pair is left."""
        if self._waiting and (not self._heap or -self._heap[0][0] < self._least):
            columns = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
            self._waiting = []
            self._least = max(1, int(columns[0].max()) // 4)
            self._sort_in(*columns)
        return [heappop(self._heap)[1] for _ in range(min(most, len(self._heap)))]

    def put_back(self, pairs: Sequence[int], counts: Sequence[int]) -> list[Entry]:
        """Return, in order, those of the pairs that come before all others; queue the others.

        A pair that stands nowhere any more is forgotten.
        """
        others = self._heap[:1] + [(1 - self._least, -1)] * bool(self._waiting)
        entries = [(-count, pair) for pair, count in zip(pairs, counts, strict=True) if count]
        first_other = min(others) if others else (1, 0)
        self.push([entry for entry in entries if entry > first_other])
        self.forget([pair for pair, count in zip(pairs, counts, strict=True) if not count])
        return sorted(entry for entry in entries if entry < first_other)

    def push(self, entries: Sequence[Entry]) -> None:
        """Put pairs in order."""
        for entry in entries:
            heappush(self._heap, entry)

    def forget(self, pairs: Sequence[int]) -> None:
        """Drop the places of pairs that are merged, or stand nowhere."""
        for pair in pairs:
            del self.places[pair]
