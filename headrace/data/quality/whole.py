"""What cleaners share that drop whole documents, each for another one that stays."""

import numpy as np

from headrace.data.quality.cleaner import EXAMPLES, CleanReport, PartState
from headrace.data.quality.register import Register


class WholeDocuments:
    """Documents of which each stays, or falls for one that does."""

    def __init__(self) -> None:
        self.register = Register()
        self._fell_for = np.empty(0, np.uint32)
        self._duplicates = np.empty(0, np.int64)

    def apply(self, source: int, index: int, text: str) -> str:
        """Return the text of a document that stays, "" for one that fell.

        Raises:
            ConfigError: it is another text than the one that was learned.
        """
        number = self.register.find(source, index, text.encode())
        return text if self._fell_for[number] == number else ""

    def decided(self, source: int, begin: int, count: int) -> PartState:
        """Return which of so many documents of a source stay, from number `begin` on."""
        first = self.register.first(source, begin)
        numbers = np.arange(first, first + count, dtype=np.uint32)
        stays = (self._fell_for[first : first + count] == numbers).astype(np.uint8)
        return PartState({**self.register.state(first, first + count), "stays": stays})

    @staticmethod
    def of_decided(state: PartState, source: int) -> "WholeDocuments":
        """Return what applies to the documents of a part, numbered from 0, what was decided."""
        part, stays = WholeDocuments(), state.arrays["stays"].astype(bool)
        part.register.take(state.arrays, source, 0)
        numbers = np.arange(stays.size, dtype=np.uint32)
        part._fell_for = np.where(stays, numbers, np.uint32(stays.size))
        return part

    def duplicates(self, source: int, index: int) -> int:
        """Return how many other documents fell for this one."""
        return int(self._duplicates[self.register.find(source, index)])

    @property
    def fell_for(self) -> np.ndarray:
        """Return the number of the document for which each fell, itself where it stays, uint32."""
        return self._fell_for

    def _settle(self, fell_for: np.ndarray, **known: object) -> CleanReport:
        """Keep which document each fell for, itself where it stays, and report it.

        Args:
            fell_for: numbers, uint32.
            known: further fields of the report.
        """
        numbers = np.arange(fell_for.size, dtype=np.uint32)
        fallen = np.flatnonzero(fell_for != numbers)
        self._fell_for = fell_for
        self._duplicates = np.bincount(fell_for[fallen], minlength=fell_for.size)
        lengths, name = self.register.lengths(), self.register.name
        sources = self.register.sources()
        shown = fallen[:EXAMPLES].tolist()
        return CleanReport.model_validate(
            {
                "documents": fell_for.size,
                "bytes": int(lengths.sum()),
                "dropped_documents": fallen.size,
                "dropped_bytes": int(lengths[fallen].sum()),
                "across_sources": int((sources[fallen] != sources[fell_for[fallen]]).sum()),
                "examples": tuple((name(n), name(int(fell_for[n]))) for n in shown),
                "memory_bytes": self.register.memory_bytes,
                **known,
            }
        )
