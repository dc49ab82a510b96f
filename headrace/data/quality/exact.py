"""Find documents, and paragraphs, that are there already, byte for byte.

Texts are compared by the first 128 bits of their SHA-256: among 10 billion of them two different
ones are taken for equal with probability 1.5e-19. Nothing of a text is held.
"""

import hashlib
from array import array
from typing import get_args

import numpy as np

from headrace.data.quality.cleaner import EXAMPLES, CleanReport, PartState
from headrace.data.quality.passages import CutDocuments, passage_ends
from headrace.data.quality.register import DIGEST_BYTES, halves
from headrace.data.quality.whole import WholeDocuments
from headrace.plan.cleaning import Keep, Scope

LEAST_BYTES = 64
"""Bytes of the shortest paragraph that may fall: headings and short lines repeat by nature."""


class ExactDocuments(WholeDocuments):
    """Drop documents whose text is equal to that of one before, byte for byte.

    Args:
        scope: compare the documents of each source, or of all.
    """

    def __init__(self, scope: Scope = "all") -> None:
        super().__init__()
        assert scope in get_args(Scope)
        self.scope = scope

    def learn(self, source: int, index: int, text: str) -> None:
        """Learn a document: number `index` of source number `source`, both from 0."""
        self.register.add(source, index, text.encode())

    def learned(self) -> PartState:
        """Return what was learned of a part."""
        return PartState(self.register.state())

    def merge(self, state: PartState, source: int, begin: int) -> None:
        """Learn a part that another has learned; see `PartCleaner.merge`."""
        self.register.take(state.arrays, source, begin)

    def finish(self) -> CleanReport:
        """Decide what falls, after the last document."""
        upper, lower = self.register.digests()
        keys = [lower, upper]
        if self.scope == "source":
            keys.append(self.register.sources())
        order, begins = _groups(keys)
        fell_for = np.empty(order.size, np.uint32)
        fell_for[order] = order[begins]
        return self._settle(fell_for, memory_bytes=self.register.memory_bytes + 28 * order.size)


class ExactParagraphs(CutDocuments):
    """Drop paragraphs that stand elsewhere already, byte for byte but for white space around them.

    A paragraph that may fall takes 32 bytes while documents are learned.

    Args:
        scope: look in each source, or in all.
        keep: the document in which a paragraph stays; in it the first of several does.
        least_bytes: bytes of the shortest paragraph that may fall.
    """

    def __init__(
        self, *, scope: Scope = "all", keep: Keep = "first", least_bytes: int = LEAST_BYTES
    ) -> None:
        super().__init__()
        assert scope in get_args(Scope) and keep in get_args(Keep)
        self.scope, self.least_bytes = scope, least_bytes
        self.keep: Keep = keep
        self._digests, self._numbers, self._owners = bytearray(), array("Q"), array("I")
        self._sizes = array("I")
        self._duplicates = np.empty(0, np.int64)

    def learn(self, source: int, index: int, text: str) -> None:
        """Learn a document: number `index` of source number `source`, both from 0."""
        raw = text.encode()
        ends = passage_ends(raw)
        number, owner, begin = self._add(source, index, raw, len(ends)), len(self.register) - 1, 0
        for end in ends:
            passage = raw[begin:end].strip()
            if len(passage) >= self.least_bytes:
                self._digests += hashlib.sha256(passage).digest()[:DIGEST_BYTES]
                self._numbers.append(number)
                self._owners.append(owner)
                self._sizes.append(min(end - begin, 0xFFFFFFFF))
            begin = end
            number += 1

    def learned(self) -> PartState:
        """Return what was learned of a part."""
        arrays = {
            "passages": self._passage_counts(),
            "passage_digests": np.frombuffer(bytes(self._digests), np.uint8),
            "numbers": np.array(self._numbers, np.uint64),
            "owners": np.array(self._owners, np.uint32),
            "sizes": np.array(self._sizes, np.uint32),
        }
        return PartState({**self.register.state(), **arrays})

    def merge(self, state: PartState, source: int, begin: int) -> None:
        """Learn a part that another has learned; see `PartCleaner.merge`."""
        arrays, owner, number = state.arrays, len(self.register), self._passages
        self._take(state, source, begin)
        self._digests += arrays["passage_digests"].tobytes()
        self._numbers.extend((arrays["numbers"] + np.uint64(number)).tolist())
        self._owners.extend((arrays["owners"] + np.uint32(owner)).tolist())
        self._sizes.extend(arrays["sizes"].tolist())

    def finish(self) -> CleanReport:
        """Decide what falls, after the last document."""
        count = len(self.register)
        ranks = np.empty(count, np.uint32)
        ranks[self.register.order(self.keep)] = np.arange(count, dtype=np.uint32)
        upper, lower = halves(self._digests)
        owners, numbers = np.array(self._owners, np.uint32), np.array(self._numbers, np.uint64)
        keys = [lower, upper]
        if self.scope == "source":
            keys.append(self.register.sources()[owners])
        order, begins = _groups(keys, within=[numbers, ranks[owners]])
        fallen, stays = order[begins != np.arange(order.size)], order[begins]
        stays = stays[begins != np.arange(order.size)]
        self._duplicates = np.bincount(owners[stays], minlength=count)
        falls, sizes = np.zeros((2, self._passages), np.uint32)
        falls[numbers[fallen]] = 1
        sizes[numbers] = np.array(self._sizes, np.uint32)
        name, sources = self.register.name, self.register.sources()
        across = int((sources[owners[fallen]] != sources[owners[stays]]).sum())
        shown = [*zip(owners[fallen].tolist(), owners[stays].tolist(), strict=True)][:EXAMPLES]
        report = self._settle(
            falls.astype(np.uint8),
            sizes,
            across_sources=across,
            examples=tuple((name(fell), name(stayed)) for fell, stayed in shown),
            memory_bytes=self.register.memory_bytes + 60 * order.size + 9 * self._passages,
        )
        self._digests, self._numbers, self._owners = bytearray(), array("Q"), array("I")
        return report

    def duplicates(self, source: int, index: int) -> int:
        """Return how many paragraphs fell for those of this document."""
        return int(self._duplicates[self.register.find(source, index)])


def _groups(
    keys: list[np.ndarray], within: list[np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sort items by keys, the last one first, and return their order and where each group begins.

    Args:
        keys: items that agree in all of them are a group.
        within: what orders a group, the last one first; else the items' own order does.

    Returns:
        the items in their order, and for each place of that order the place where its group begins.
    """
    order = np.lexsort([*(within or []), *keys])
    new = np.zeros(order.size, bool)
    new[:1] = True
    for key in keys:
        ordered = key[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    return order, np.maximum.accumulate(np.where(new, np.arange(order.size), 0))
