"""Find text of evaluation sets in the text that is trained on, and take it out.

Both are compared by runs of words (see words.py), 13 of them as in GPT-3 (arXiv 2005.14165,
appendix C). A document is contaminated where a given share of its words stands in such runs, or
where it holds that share of the runs of one evaluation document: a page that quotes a whole test
question is, however long it is, and a common quotation in both makes nothing of either.

An evaluation document that is shorter than a run is one run of its own words; one of fewer than 8
words is compared with whole documents only, for a few words are in many texts by accident.

What is kept is 13 bytes a word of the evaluation sets, 4 MiB a length of run, and the place of each
contaminated document with what falls of it. The text that is trained on is streamed:
`benchmarks/data_dedup.py memory` measures it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import ConfigError
from headrace.data.heldout import Overlap
from headrace.data.quality.cleaner import EXAMPLES, CleanReport, PartState, shortened
from headrace.data.quality.words import Numbers, WordTable, runs_of, words_of
from headrace.plan.cleaning import DecontaminationConfig

FEWEST_WORDS = 8
"""Words from which on an evaluation document is looked for inside of others: the least run that
GPT-3 compares (arXiv 2005.14165, appendix C)."""
NEAREST = 200
"""Characters within which a cut is moved to the end of a line or a sentence, as far as GPT-3 cuts
on both sides of a run."""
ENDS = ("\n", ". ", "! ", "? ", "\u3002")
"""What ends a sentence or a line."""
NEAR = 0.8
"""Share of an evaluation document's runs from which on it counts as trained on."""
PREFILTER_BITS = 22
"""A table of 2^22 bytes says of most runs at once that no evaluation set has them."""


class _Index(NamedTuple):
    """The runs of one length of all evaluation documents."""

    runs_R: Numbers
    """Sorted, each once."""
    documents_R: NDArray[np.int32]
    """The first evaluation document that each stands in."""
    maybe: NDArray[np.bool_]
    """Whether a run with these low bits may be one of them."""

    def find(self, runs_N: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the places of those runs that are here, and their places here."""
        low = runs_N & np.uint64((1 << PREFILTER_BITS) - 1)
        places = np.flatnonzero(self.maybe[low])
        rows = np.minimum(np.searchsorted(self.runs_R, runs_N[places]), len(self.runs_R) - 1)
        there = self.runs_R[rows] == runs_N[places]
        return places[there], rows[there]


@dataclass(slots=True)
class _Evaluated:
    """Count equal evaluation documents."""

    bytes: int = 0
    documents: int = 0
    is_validation: bool = False


class Decontaminator:
    """Take passages of evaluation sets out of documents, or contaminated documents, or tell only.

    Args:
        config: what counts as contaminated, and what falls of it.
    """

    def __init__(self, config: DecontaminationConfig) -> None:
        self._config = config
        self._evaluated: list[_Evaluated] = []
        self._numbers: dict[int, int] = {}
        self._given: dict[int, list[tuple[Numbers, int]]] = {}
        self._whole: dict[int, int] = {}
        self._indices: dict[int, _Index] | None = None
        self._totals_D = np.zeros(0, dtype=np.int64)
        self._remains: dict[int, NDArray[np.bool_]] = {}
        self._whole_remains: set[int] = set()
        self._cuts: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        self._documents = self._bytes = self._dropped = self._dropped_bytes = self._cut = 0
        self._examples: list[tuple[str, str]] = []

    def evaluate(self, text: str, *, is_validation: bool = False) -> None:
        """Add a document of an evaluation set; all come before the first that is learned."""
        assert self._indices is None
        numbers = words_of(text).numbers_N
        key, length = _whole(text, numbers), min(self._config.words, len(numbers))
        number = self._numbers.setdefault(key, len(self._evaluated))
        if is_new := number == len(self._evaluated):
            self._evaluated.append(_Evaluated())
        one = self._evaluated[number]
        one.documents += 1
        one.bytes += len(text.encode())
        one.is_validation |= is_validation
        if not is_new:
            return
        if length < min(FEWEST_WORDS, self._config.words):
            self._whole[key] = number
        else:
            self._given.setdefault(length, []).append((runs_of(numbers, length), number))

    def _sealed(self) -> dict[int, _Index]:
        """Return the index of every length of run; made with the first document."""
        if self._indices is not None:
            return self._indices
        self._indices = {}
        self._totals_D = np.zeros(len(self._evaluated), dtype=np.int64)
        for length, given in sorted(self._given.items()):
            every = np.concatenate([runs for runs, _ in given])
            owners = np.repeat([number for _, number in given], [len(runs) for runs, _ in given])
            runs, first = np.unique(every, return_index=True)
            maybe = np.zeros(1 << PREFILTER_BITS, dtype=np.bool_)
            maybe[runs & np.uint64((1 << PREFILTER_BITS) - 1)] = True
            documents = owners[first].astype(np.int32)
            self._totals_D += np.bincount(documents, minlength=len(self._evaluated))
            self._indices[length] = _Index(runs, documents, maybe)
            self._remains[length] = np.zeros(len(runs), dtype=np.bool_)
        self._given = {}
        return self._indices

    def learn(self, source: int, index: int, text: str) -> None:
        """Compare a document, and decide what of it falls."""
        indices, words, size = self._sealed(), words_of(text), len(text.encode())
        self._documents += 1
        self._bytes += size
        covered = np.zeros(len(words.numbers_N), dtype=np.bool_)
        rows_by_length: dict[int, NDArray[np.int64]] = {}
        for length, of_length in indices.items():
            places, rows = of_length.find(runs_of(words.numbers_N, length))
            if len(places):
                rows_by_length[length] = np.unique(rows)
                for offset in range(length):
                    covered[places + offset] = True
        whole = self._whole.get(_whole(text, words.numbers_N)) if self._whole else None
        if whole is None and not rows_by_length:
            return
        if whole is None and not self._is_contaminated(covered, rows_by_length):
            self._note_remaining(rows_by_length, None)
        elif self._config.remove == "nothing":
            self._note_remaining(rows_by_length, whole)
            self._example(text, words, covered)
        else:
            self._drop((source, index), text, words, covered, is_whole=whole is not None)

    def _is_contaminated(
        self, covered: NDArray[np.bool_], rows_by_length: dict[int, NDArray[np.int64]]
    ) -> bool:
        """Return whether enough of a document, or of an evaluation document, is in both."""
        if covered.sum() >= self._config.share * len(covered):
            return True
        indices = self._sealed()
        named = [indices[length].documents_R[rows] for length, rows in rows_by_length.items()]
        numbers, counts = np.unique(np.concatenate(named), return_counts=True)
        return bool((counts >= self._config.share * self._totals_D[numbers]).any())

    def _note_remaining(
        self, rows_by_length: dict[int, NDArray[np.int64]], whole: int | None
    ) -> None:
        for length, rows in rows_by_length.items():
            self._remains[length][rows] = True
        if whole is not None:
            self._whole_remains.add(whole)

    def _drop(
        self,
        place: tuple[int, int],
        text: str,
        words: WordTable,
        covered: NDArray[np.bool_],
        *,
        is_whole: bool,
    ) -> None:
        """Decide what of a contaminated document falls."""
        self._example(text, words, covered)
        cuts = () if is_whole or self._config.remove == "document" else _cuts(text, words, covered)
        rest = _without(text, cuts) if cuts else ""
        self._cuts[place] = cuts if rest else ()
        self._dropped += not rest
        self._cut += bool(rest)
        self._dropped_bytes += len(text.encode()) - len(rest.encode())

    def _example(self, text: str, words: WordTable, covered: NDArray[np.bool_]) -> None:
        if len(self._examples) < EXAMPLES:
            begin = int(words.starts_N[covered.argmax()]) if covered.any() else 0
            self._examples.append((shortened(text), shortened(text[begin:])))

    def finish(self) -> CleanReport:
        """Return what falls."""
        indices = self._sealed().values()
        kept = sum(i.runs_R.nbytes + i.documents_R.nbytes + i.maybe.nbytes for i in indices)
        return CleanReport(
            documents=self._documents,
            bytes=self._bytes,
            dropped_documents=self._dropped,
            dropped_bytes=self._dropped_bytes,
            cut_documents=self._cut,
            examples=tuple(self._examples),
            memory_bytes=kept + sum(remains.nbytes for remains in self._remains.values()),
        )

    def learned(self) -> PartState:
        """Return what was learned of a part."""
        self._sealed()
        arrays = {str(length): np.flatnonzero(runs) for length, runs in self._remains.items()}
        values = {
            "evaluation": self._evaluation(),
            "documents": self._documents,
            "bytes": self._bytes,
            "dropped": self._dropped,
            "dropped_bytes": self._dropped_bytes,
            "cut": self._cut,
            "examples": self._examples,
            "whole": sorted(self._whole_remains),
            "cuts": [[index, cuts] for (_, index), cuts in self._cuts.items()],
        }
        return PartState(arrays, values)

    def merge(self, state: PartState, source: int, begin: int) -> None:
        """Learn a part that another has learned; see `PartCleaner.merge`.

        Raises:
            ConfigError: that one was given other evaluation sets.
        """
        self._sealed()
        known = state.values
        if known["evaluation"] != self._evaluation():
            message = "an evaluation set changed while text was compared with it"
            raise ConfigError(message, "the same command again")
        self._documents += known["documents"]
        self._bytes += known["bytes"]
        self._dropped += known["dropped"]
        self._dropped_bytes += known["dropped_bytes"]
        self._cut += known["cut"]
        self._examples = [*self._examples, *map(tuple, known["examples"])][:EXAMPLES]
        self._whole_remains.update(known["whole"])
        for length, rows in state.arrays.items():
            self._remains[int(length)][rows] = True
        for index, cuts in known["cuts"]:
            self._cuts[source, begin + index] = tuple(map(tuple, cuts))

    def _evaluation(self) -> str:
        """Return a digest of all evaluation documents."""
        digest = hashlib.sha256(repr(self._evaluated).encode())
        for length, of_length in self._sealed().items():
            digest.update(b"%d" % length + of_length.runs_R.tobytes())
            digest.update(of_length.documents_R.tobytes())
        digest.update(repr(sorted(self._whole.items())).encode())
        return digest.hexdigest()

    def decided(self, source: int, begin: int, count: int) -> PartState:
        """Return what falls of so many documents of a source, from number `begin` on."""
        places = ((index, self._cuts.get((source, begin + index))) for index in range(count))
        cuts = [[index, cuts] for index, cuts in places if cuts is not None]
        return PartState({}, {"cuts": cuts})

    @staticmethod
    def of_decided(state: PartState, source: int) -> "Decontaminator":
        """Return what applies to the documents of a part, numbered from 0, what was decided."""
        part = Decontaminator(DecontaminationConfig())
        for index, cuts in state.values["cuts"]:
            part._cuts[source, index] = tuple(map(tuple, cuts))
        return part

    def apply(self, source: int, index: int, text: str) -> str:
        """Return a document without what fell of it."""
        cuts = self._cuts.get((source, index))
        return text if cuts is None else _without(text, cuts) if cuts else ""

    def overlap(self) -> Overlap:
        """Return how much of the validation text stands in what remains, after `finish`."""
        indices, count = self._sealed(), len(self._evaluated)
        seen_D, totals_D = np.zeros(count, dtype=np.int64), self._totals_D
        for length, of_length in indices.items():
            remains = self._remains[length]
            seen_D += np.bincount(of_length.documents_R[remains], minlength=count)
        is_trained_D = (totals_D > 0) & (seen_D >= NEAR * totals_D)
        for number in self._whole_remains:
            is_trained_D[number] = True
        own = [(one, number) for number, one in enumerate(self._evaluated) if one.is_validation]
        trained = [one for one, number in own if is_trained_D[number]]
        numbers = [number for _, number in own]
        return Overlap(
            documents=sum(one.documents for one in trained),
            of_documents=sum(one.documents for one, _ in own),
            bytes=sum(one.bytes for one in trained),
            of_bytes=sum(one.bytes for one, _ in own),
            passages=int(seen_D[numbers].sum()),
            of_passages=int(totals_D[numbers].sum()),
        )


def _whole(text: str, numbers_N: Numbers) -> int:
    """Return a number of all words of a text; of the text itself where it has none."""
    raw = numbers_N.tobytes() or text.strip().encode()
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "big")


def _cuts(text: str, words: WordTable, covered: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return the characters that fall, as (begin, end), in order and apart."""
    edges = np.diff(covered.view(np.int8), prepend=np.int8(0), append=np.int8(0))
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    cuts: list[tuple[int, int]] = []
    for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
        begin, end = _widened(text, int(words.starts_N[first]), int(words.ends_N[last]))
        if cuts and begin <= cuts[-1][1]:
            before = cuts.pop()
            begin, end = before[0], max(before[1], end)
        cuts.append((begin, end))
    return tuple(cuts)


def _widened(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return a passage up to the nearest ends of its sentences or lines, if they are near."""
    low, high = max(0, begin - NEAREST), min(len(text), end + NEAREST)
    before = [at + len(mark) for mark in ENDS if (at := text.rfind(mark, low, begin)) >= 0]
    after = [at + len(mark) for mark in ENDS if (at := text.find(mark, end, high)) >= 0]
    return (
        max(before) if before else 0 if low == 0 else begin,
        min(after) if after else len(text) if high == len(text) else end,
    )


def _without(text: str, cuts: tuple[tuple[int, int], ...]) -> str:
    """Return a text without what is cut; "" where no letter or digit is left."""
    rest = "".join(_kept(text, cuts))
    return rest if any(map(str.isalnum, rest)) else ""


def _kept(text: str, cuts: tuple[tuple[int, int], ...]) -> Iterator[str]:
    at = 0
    for begin, end in cuts:
        yield text[at:begin]
        at = end
    yield text[at:]
