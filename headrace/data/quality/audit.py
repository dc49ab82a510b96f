"""Keep a sample of documents in which similar ones meet, and compare it exactly afterwards.

Of documents drawn by chance two similar ones are hardly ever both drawn. So each is drawn by the
least hash of its n-grams: two documents have the same one with the probability of their Jaccard
index. The hash is another than that of the sketches, so the sample does not know what they found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.data.quality.bands import NEVER
from headrace.data.quality.cleaner import PartState

SAMPLE_BYTES = 4 << 20
"""Bytes of the n-grams of a sample, 8 for each of them: 1,500 documents of 2 kB."""
MOST_ALIKE = 64
"""Documents of one least hash that are compared with each other."""


@dataclass(frozen=True)
class Audit:
    """What exact comparison of a sample says.

    Args:
        documents: of the sample.
        pairs: pairs of them that are as similar as wanted.
        met: those of which at most one stays.
        merged: pairs of which one fell for the other.
        wrong: of these, pairs whose Jaccard index is below `NEVER`.
    """

    documents: int
    pairs: int
    met: int
    merged: int
    wrong: int

    @property
    def recall(self) -> float | None:
        """Return the share of the wanted pairs that was found; None where there are none."""
        return self.met / self.pairs if self.pairs else None


class SamplePart(NamedTuple):
    """Documents that are drawn together."""

    least: np.ndarray
    """The least hash of each."""
    numbers: np.ndarray
    hashes: np.ndarray
    """The distinct hashes of the n-grams of all of them, one document behind the other."""
    sizes: np.ndarray
    """How many of these each has; one that has none is left out."""

    def below(self, bar: int) -> "SamplePart":
        """Return those of the documents whose least hash is below a bar."""
        stays = (self.least < np.uint64(bar)) & (self.sizes > 0)
        if stays.all():
            return self
        hashes = self.hashes[np.repeat(stays, self.sizes)]
        return SamplePart(self.least[stays], self.numbers[stays], hashes, self.sizes[stays])

    def items(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the least hash, number and hashes of each document."""
        begin = 0
        columns = (self.least.tolist(), self.numbers.tolist(), self.sizes.tolist())
        for least, number, size in zip(*columns, strict=True):
            yield least, number, self.hashes[begin : begin + size]
            begin += size


SAMPLE_ARRAYS = {
    "least": np.uint64,
    "numbers": np.int64,
    "hashes": np.uint64,
    "sizes": np.int64,
}
"""Fields of a `SamplePart` in their order, with the type of their numbers."""


class AuditSample:
    """Documents whose least hash is below a bar, which sinks as they become too many.

    Which ones they are in the end depends on the documents alone, in whichever order they come.
    """

    def __init__(self) -> None:
        self.bar = 1 << 64
        self.memory_bytes = 0
        self._parts: list[SamplePart] = []

    @property
    def highest(self) -> int:
        """Return the bar in 64 bits: a text without n-grams has all ones, and is never drawn."""
        return min(self.bar, (1 << 64) - 1)

    def add(self, part: "SamplePart") -> None:
        """Take documents; those that are not below the bar are left out."""
        self._parts.append(part.below(self.highest))
        self.memory_bytes += self._parts[-1].hashes.nbytes
        while self.memory_bytes > SAMPLE_BYTES:
            self._lower(self.bar // 2)

    def _lower(self, bar: int) -> None:
        self.bar = bar
        self._parts = [part.below(self.highest) for part in self._parts]
        self.memory_bytes = sum(part.hashes.nbytes for part in self._parts)

    def state(self) -> PartState:
        """Return the documents of the sample, and its bar."""
        arrays = {
            f"sample_{name}": np.concatenate(
                [np.empty(0, kind), *(getattr(part, name) for part in self._parts)]
            )
            for name, kind in SAMPLE_ARRAYS.items()
        }
        return PartState(arrays, {"bar": self.bar})

    def merge(self, state: PartState, first: int) -> None:
        """Take the sample of documents that follow, the first of which has the number `first`."""
        if state.values["bar"] < self.bar:
            self._lower(state.values["bar"])
        part = SamplePart(*(state.arrays[f"sample_{name}"] for name in SAMPLE_ARRAYS))
        self.add(part._replace(numbers=part.numbers + first))

    def audit(self, fell_for: np.ndarray, threshold: float, sources: np.ndarray | None) -> Audit:
        """Compare the documents of the sample that have the same least hash.

        Args:
            fell_for: the document for which each fell, itself where it stays.
            threshold: the wanted Jaccard index.
            sources: source of each document, where only those of one source are compared.
        """
        alike: dict[int, list[tuple[int, np.ndarray]]] = {}
        items = [item for part in self._parts for item in part.items()]
        for least, number, hashes in sorted(items, key=lambda item: item[:2]):
            members = alike.setdefault(least, [])
            if len(members) < MOST_ALIKE:
                members.append((number, hashes))
        pairs = met = merged = wrong = 0
        for members in alike.values():
            for place, (one, first) in enumerate(members):
                for two, second in members[:place]:
                    if sources is not None and sources[one] != sources[two]:
                        continue
                    index = jaccard(first, second)
                    if index >= threshold:
                        pairs += 1
                        met += fell_for[one] != one or fell_for[two] != two
                    if fell_for[one] == two or fell_for[two] == one:
                        merged += 1
                        wrong += index < NEVER
        return Audit(len(items), pairs, int(met), merged, int(wrong))


def jaccard(one: np.ndarray, two: np.ndarray) -> float:
    """Return the Jaccard index of two sets of distinct numbers."""
    every = np.concatenate([one, two])
    every.sort()
    both = int(np.count_nonzero(every[1:] == every[:-1]))
    return both / max(1, every.size - both)
