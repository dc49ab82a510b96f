"""Cut documents into paragraphs, and what cleaners share that drop some of them.

A paragraph ends where a line without text follows it. It owns the empty lines behind it, the first
one also those before it, so that the paragraphs of a text joined again are the text, byte for byte,
each with its indentation; and none is empty but that of a text of white space alone.
"""

import re
from array import array

import numpy as np

from headrace.data.quality.cleaner import CleanReport, PartState
from headrace.data.quality.register import Register

BETWEEN = re.compile(rb"\n(?:[ \t\r\v\f]*\n)+(?:[ \t\r\v\f]+\Z)?")


def passage_ends(raw: bytes) -> list[int]:
    """Return where each paragraph of a text ends, with the empty lines behind it."""
    first = raw.find(b"\n")
    if first < 0 or raw.find(b"\n", first + 1) < 0:  # no line without text follows another
        return [len(raw)]
    ends = [match.end() for match in BETWEEN.finditer(raw)]
    if ends and not raw[: ends[0]].strip():
        del ends[0]
    if not ends or ends[-1] < len(raw):
        ends.append(len(raw))
    return ends


class CutDocuments:
    """Keep which paragraphs of documents fall."""

    def __init__(self) -> None:
        self.register = Register()
        self._firsts = array("Q")
        self._passages = 0
        self._falls = np.empty(0, np.uint8)

    def _add(self, source: int, index: int, raw: bytes, count: int) -> int:
        """Learn a document of so many paragraphs; return the number of the first one."""
        self.register.add(source, index, raw)
        first = self._passages
        self._firsts.append(first)
        self._passages += count
        return first

    def _passage_counts(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Return how many paragraphs the documents from number `begin` to below `end` have."""
        firsts = np.array([*self._firsts, self._passages], np.int64)
        return np.diff(firsts[begin : None if end is None else end + 1])

    def _take(self, state: PartState, source: int, begin: int) -> None:
        """Learn documents that another has; see `PartCleaner.merge`."""
        self.register.take(state.arrays, source, begin)
        ends = self._passages + state.arrays["passages"].cumsum()
        self._firsts.extend((ends - state.arrays["passages"]).tolist())
        self._passages += int(state.arrays["passages"].sum())

    def decided(self, source: int, begin: int, count: int) -> PartState:
        """Return which paragraphs fall of so many documents of a source, from `begin` on."""
        first = self.register.first(source, begin)
        passages = self._passage_counts(first, first + count)
        at = self._firsts[first] if count else 0
        arrays = {"passages": passages, "falls": self._falls[at : at + int(passages.sum())]}
        return PartState({**self.register.state(first, first + count), **arrays})

    @staticmethod
    def of_decided(state: PartState, source: int) -> "CutDocuments":
        """Return what applies to the documents of a part, numbered from 0, what was decided."""
        part = CutDocuments()
        part._take(state, source, 0)
        part._falls = state.arrays["falls"]
        return part

    def apply(self, source: int, index: int, text: str) -> str:
        """Return the paragraphs that stay, "" where all fall.

        Raises:
            ConfigError: it is another text than the one that was learned.
        """
        raw = text.encode()
        number = self.register.find(source, index, raw)
        following = number + 1 < len(self._firsts)
        last = self._firsts[number + 1] if following else self._passages
        falls = self._falls[self._firsts[number] : last]
        if not falls.any():
            return text
        ends = passage_ends(raw)
        pieces = zip([0, *ends[:-1]], ends, falls, strict=True)
        rest = b"".join(raw[begin:end] for begin, end, fallen in pieces if not fallen)
        return rest.decode()

    def _settle(self, falls: np.ndarray, sizes: np.ndarray, **known: object) -> CleanReport:
        """Keep which paragraphs fall, and report it.

        Args:
            falls: 1 for each that does, as uint8.
            sizes: bytes of each.
            known: further fields of the report.
        """
        self._falls = falls
        documents = np.repeat(
            np.arange(len(self.register)),
            np.diff(np.array([*self._firsts, self._passages], np.int64)),
        )
        count = len(self.register)
        cut = np.bincount(documents, weights=falls, minlength=count)
        whole = cut == np.bincount(documents, minlength=count)
        return CleanReport.model_validate(
            {
                "documents": count,
                "bytes": int(self.register.lengths().sum()),
                "dropped_documents": int((whole & (cut > 0)).sum()),
                "dropped_bytes": int(sizes[falls == 1].sum()),
                "cut_documents": int(((cut > 0) & ~whole).sum()),
                **known,
            }
        )
