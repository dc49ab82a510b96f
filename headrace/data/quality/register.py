"""Know every document that was learned by its place, and check that it is still the same text.

What stays of several documents is chosen by their text, never by when they came: shuffled files
keep the same texts. A document takes 32 bytes here.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Mapping

import numpy as np

from headrace.core.errors import ConfigError
from headrace.plan.cleaning import Keep

DIGEST_BYTES = 16
SOURCE_BITS = 40
"""Bits of a place below its source's number, for the document's index there."""


class Register:
    """Documents are known by place, digest and length, numbered in the order in which they came."""

    def __init__(self) -> None:
        self._places, self._lengths, self._digests = array("Q"), array("Q"), bytearray()
        self._last, self._guess = -1, 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def memory_bytes(self) -> int:
        """Return what is held, in bytes."""
        return (16 + DIGEST_BYTES) * len(self)

    def add(self, source: int, index: int, raw: bytes) -> int:
        """Learn a document, whose place is behind all before it; return its number."""
        place = source << SOURCE_BITS | index
        assert place > self._last, "documents come in the fixed order"
        self._last = place
        self._places.append(place)
        self._lengths.append(len(raw))
        self._digests += _digest(raw)
        return len(self._places) - 1

    def state(self, begin: int = 0, end: int | None = None) -> dict[str, np.ndarray]:
        """Return the lengths and digests of the documents from number `begin` to below `end`."""
        digests = self._digests[DIGEST_BYTES * begin : None if end is None else DIGEST_BYTES * end]
        lengths = np.array(self._lengths[begin:end], np.uint64)
        return {"lengths": lengths, "digests": np.frombuffer(bytes(digests), np.uint8)}

    def take(self, state: Mapping[str, np.ndarray], source: int, begin: int) -> None:
        """Learn documents that another register has, as numbers from `begin` on of a source."""
        first = source << SOURCE_BITS | begin
        lengths = state["lengths"].tolist()
        assert not self._places or first > self._places[-1], "parts come in the fixed order"
        self._places.extend(range(first, first + len(lengths)))
        self._lengths.extend(lengths)
        self._digests += state["digests"].tobytes()

    def first(self, source: int, begin: int) -> int:
        """Return the number of the first document whose place is not before the given one."""
        return bisect_left(self._places, source << SOURCE_BITS | begin)

    def find(self, source: int, index: int, raw: bytes | None = None) -> int:
        """Return the number of a document that was learned.

        Args:
            source: number of its source.
            index: its number there.
            raw: its bytes; None where they are not at hand.

        Raises:
            ConfigError: its text is another than the one that was learned.
        """
        place = source << SOURCE_BITS | index
        number = self._guess  # documents mostly come in their order again
        if number >= len(self) or self._places[number] != place:
            number = bisect_left(self._places, place)
        known = number < len(self) and self._places[number] == place
        begin = number * DIGEST_BYTES
        if known and (raw is None or self._digests[begin : begin + DIGEST_BYTES] == _digest(raw)):
            self._guess = number + 1
            return number
        raise ConfigError(
            f"document {index:,} of source {source} is not the text that was there when duplicates "
            "were looked for: the source changed while it was read",
            "the same command again",
        )

    def name(self, number: int) -> str:
        """Return the place of a document in words."""
        place = self._places[number]
        return f"document {place & ((1 << SOURCE_BITS) - 1):,} of source {place >> SOURCE_BITS}"

    def sources(self) -> np.ndarray:
        """Return the number of each document's source, as uint32."""
        return (np.array(self._places, np.uint64) >> np.uint64(SOURCE_BITS)).astype(np.uint32)

    def lengths(self) -> np.ndarray:
        """Return the bytes of each document, as uint64."""
        return np.array(self._lengths, np.uint64)

    def digests(self) -> tuple[np.ndarray, np.ndarray]:
        """Return both halves of each document's digest, as uint64."""
        return halves(self._digests)

    def order(self, keep: Keep) -> np.ndarray:
        """Return the numbers of all documents as uint32, those that stay for others first."""
        upper, lower = self.digests()
        preferred = self.sources() if keep == "first" else ~self.lengths()
        return np.lexsort((lower, upper, preferred)).astype(np.uint32)  # stable: then by number


def halves(digests: bytearray) -> tuple[np.ndarray, np.ndarray]:
    """Return both halves of each of many digests, as uint64."""
    pairs = np.array(np.frombuffer(digests, ">u8"), np.uint64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()[:DIGEST_BYTES]
