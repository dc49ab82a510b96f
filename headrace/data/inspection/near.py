"""Estimate how much of a corpus nearly repeats other text, and what of it a split would part.

Two documents whose sets of word n-grams have the Jaccard index J have the same least hash of an
n-gram with probability J (Broder 1997). So documents are kept by their least hash, hashed once more
for a fair draw whatever their length: of a sample of a share f of all such hashes, a document that
is kept has a near copy beside it with probability J + (1 - J) f, and counts as one over that. While
everything fits, f is 1 and nothing is estimated. What is kept is compared as `data.deduplication`
compares with the method `minhash`; equal documents are kept once, with their number. Of a long
document its beginning is compared.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from headrace.core.native import call_native
from headrace.data.heldout import PLACES
from headrace.data.inspection.record import NearValidation, RepeatedExample, RepeatedShare
from headrace.data.inspection.sketches import (
    KEPT,
    ORIGIN_CHARACTERS,
    SHOWN,
    SHOWN_CHARACTERS,
    Z,
)
from headrace.data.quality.audit import jaccard
from headrace.data.quality.letters import encode_composed
from headrace.data.quality.minhash import NearDuplicates
from headrace.data.sources import Document
from headrace.data.survey import place_of

THRESHOLD = 0.8
"""Jaccard index from which on documents are near copies, the default of `data.deduplication`."""
SAMPLE_BYTES = 32 << 20
"""Bytes of text that are kept to be compared."""
MOST_CHARACTERS = 4 << 20
"""Characters of a document that are compared, from its beginning."""
BATCH_BYTES = 2 << 20
NEAR_BYTES = (
    2 * SAMPLE_BYTES + 4 * (BATCH_BYTES + 4 * MOST_CHARACTERS) + KEPT * (ORIGIN_CHARACTERS + 700)
)
"""Most memory of a sample, and of what compares it."""


@dataclass
class _Kept:
    """A text, where it stands, and how often it stands in the corpus."""

    raw: bytes
    size: int
    digest: bytes
    origin: str
    least: int = 0
    times: int = 1


class NearRepeats:
    """Keep a sample in which near copies meet.

    Args:
        validation: `data.validation`; the sides of a share are told apart by hash, as they are when
            data is prepared.

    Raises:
        UnsupportedError: Numba is not installed.
    """

    def __init__(self, validation: float | str = "") -> None:
        self._border = 0 if isinstance(validation, str) else int(validation * PLACES)
        self._validation = validation
        self._cleaner = NearDuplicates(threshold=THRESHOLD)
        self._batch: list[_Kept] = []
        self._batch_bytes = 0
        self._items: dict[bytes, _Kept] = {}
        self._bytes = self._seen = 0
        self._bar = 1 << 64

    def add(self, document: Document) -> None:
        """Take a document into the next batch."""
        raw = document.text.encode()
        digest, size = hashlib.sha256(raw).digest(), len(raw)
        if len(document.text) > MOST_CHARACTERS:
            raw = document.text[:MOST_CHARACTERS].encode()
        self._batch.append(_Kept(raw, size, digest, document.origin[-ORIGIN_CHARACTERS:]))
        self._batch_bytes += len(raw)
        if self._batch_bytes >= BATCH_BYTES:
            self._draw()

    def _draw(self) -> None:
        """Keep those of a batch whose least hash is drawn."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        texts = [_composed(one) for one in batch]
        sketches = call_native(lambda: self._cleaner.sketch(texts))
        self._seen += len(batch)
        for one, least in zip(batch, sketches.least.tolist(), strict=True):
            drawn = hashlib.blake2b(least.to_bytes(8, "little"), digest_size=8).digest()
            one.least = int.from_bytes(drawn, "big")
            if one.least < self._bar:
                self._keep(one)

    def _keep(self, one: _Kept) -> None:
        """Take a text into the sample, of which fewer are drawn when it is full."""
        if (known := self._items.get(one.digest)) is not None:
            known.times += 1
            return
        self._items[one.digest] = one
        self._bytes += len(one.raw)
        while len(self._items) > 1 and (len(self._items) > KEPT or self._bytes > SAMPLE_BYTES):
            self._bar //= 2
            self._items = {d: one for d, one in self._items.items() if one.least < self._bar}
            self._bytes = sum(len(one.raw) for one in self._items.values())

    def result(self) -> tuple[RepeatedShare, NearValidation | None]:
        """Return how much nearly repeats other text, and how much of a held-out share does.

        Without documents the shares are 0; the second is None where no share is held out.
        """
        if self._batch:
            self._draw()
        items = [one for _, one in sorted(self._items.items())]
        for number, one in enumerate(items):
            self._cleaner.learn(0, number, one.raw.decode())
        self._cleaner.finish()
        fell_for = self._cleaner.fell_for
        weights = self._weights(items, fell_for)
        split = None
        if not isinstance(self._validation, str):
            split = self._in_validation(items, fell_for, weights, self._validation)
        return self._share(items, fell_for, weights), split

    def _weights(self, items: list[_Kept], fell_for: np.ndarray) -> np.ndarray:
        """Return for how many near copies each that was found counts; 0 where it is none."""
        sampled, weights = self._bar / (1 << 64), np.zeros(len(items))
        for number, other in enumerate(fell_for.tolist()):
            if number != other:
                one, two = (
                    self._cleaner.hashes(encode_composed(items[n].raw.decode(), items[n].raw))
                    for n in (number, other)
                )
                index = jaccard(one, two) if sampled < 1 else 1.0
                weights[number] = 1 / (index + (1 - index) * sampled)
        return weights

    def _share(
        self, items: list[_Kept], fell_for: np.ndarray, weights: np.ndarray
    ) -> RepeatedShare:
        times = np.array([one.times for one in items], dtype=np.float64)
        sizes = np.array([one.size for one in items], dtype=np.float64)
        fallen = times - 1 + np.minimum(weights, times)
        total, text_bytes = float(times.sum()), float((times * sizes).sum())
        share = min(1.0, float(fallen.sum()) / total) if total else 0.0
        error = 0.0
        if self._bar < 1 << 64 and len(items) > 1:  # a ratio of means over what is drawn together
            _, draw = np.unique([one.least for one in items], return_inverse=True)
            off = np.bincount(draw, weights=fallen - share * times)
            error = Z * float(off.std(ddof=1)) * math.sqrt(len(off)) / total if len(off) > 1 else 1
        return RepeatedShare(
            seen=self._seen,
            sampled=len(items),
            exact=self._bar == 1 << 64,
            share=share,
            low=max(0.0, share - error),
            high=min(1.0, share + error),
            bytes_share=min(1.0, float((fallen * sizes).sum()) / text_bytes) if text_bytes else 0.0,
            examples=_examples(items, fell_for),
        )

    def _in_validation(
        self, items: list[_Kept], fell_for: np.ndarray, weights: np.ndarray, share: float
    ) -> NearValidation:
        """Return how many documents below the border have a near copy that is not."""
        below = np.array([place_of(one.digest) < self._border for one in items], dtype=bool)
        times = np.array([one.times for one in items], dtype=np.int64)
        near = np.zeros(len(items))
        for number, other in enumerate(fell_for.tolist()):
            if below[number] != below[other]:
                inside = number if below[number] else other
                near[inside] = max(near[inside], weights[number])
        count = int(times[below].sum())
        return NearValidation(
            asked=share,
            documents=count,
            near=int(times[near > 0].sum()),
            share=min(1.0, float((times * near).sum()) / count) if count else 0.0,
            exact=self._bar == 1 << 64,
        )


def _composed(one: _Kept) -> bytes:
    """Return a text as sketches are made of it."""
    return encode_composed(one.raw.decode(), one.raw)


def _examples(items: list[_Kept], fell_for: np.ndarray) -> tuple[RepeatedExample, ...]:
    """Return the texts of most near copies, with where they and one of these stand."""
    copies: dict[int, list[int]] = {}
    for number, other in enumerate(fell_for.tolist()):
        if number != other:
            copies.setdefault(other, []).append(number)

    def largest_first(number: int) -> tuple[int, int]:
        return -len(copies[number]) * items[number].size, number

    return tuple(
        RepeatedExample(
            text=items[number].raw.decode()[:SHOWN_CHARACTERS],
            times=items[number].times + sum(items[n].times for n in copies[number]),
            origins=(items[number].origin, items[copies[number][0]].origin),
        )
        for number in sorted(copies, key=largest_first)[:SHOWN]
    )
