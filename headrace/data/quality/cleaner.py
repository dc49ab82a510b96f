"""What cleans text: it learns every document once, then says what remains of each.

A cleaner sees all documents in the fixed order of the sources, decides in `finish`, and from then
on gives what remains of a document by its place alone. So several cleaners follow each other, each
of them learning what the one before has left, and the passes after them read the same text.

Parts of the text may be learned apart, each by a cleaner of its own that sees the part's documents
as numbers 0, 1, ... of their source. Merged in their order they are what one cleaner learns of the
whole. What was decided of a part can be handed to who reads it, too.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

from headrace.core.strict import Strict

EXAMPLES = 5
"""Pairs that a report keeps."""
EXAMPLE_CHARACTERS = 120
"""Characters that a report keeps of a text."""
Count = Annotated[int, Field(ge=0)]
Recall = Annotated[float, Field(ge=0, le=1)]


class CleanReport(Strict):
    """What a cleaner learned of a text, and what of it falls."""

    documents: Count
    """Documents that were learned."""
    bytes: Count
    """Bytes of their text in UTF-8."""
    dropped_documents: Count = 0
    """Documents of which nothing remains."""
    dropped_bytes: Count = 0
    """Bytes that fall, of documents of which a part remains too."""
    cut_documents: Count = 0
    """Documents of which a part falls."""
    across_sources: Count | None = None
    """What fell for the text of another source: documents, or paragraphs where these fall; None
    where the method does not know for which text something falls."""
    examples: tuple[tuple[str, str], ...] = Field(default=(), max_length=EXAMPLES)
    """Pairs of origins or of short texts: what fell, and what it fell for."""
    predicted_recall: Recall | None = None
    """Share of the wanted pairs that the method is computed to find; None where it finds all."""
    audited_recall: Recall | None = None
    """Share of the wanted pairs of a sample that it found; None where no sample was compared."""
    memory_bytes: Count = 0
    """Most bytes that it kept while it learned, as it counts them."""


@dataclass(frozen=True)
class PartState:
    """What a cleaner knows of a part of the text, as arrays and JSON values."""

    arrays: dict[str, np.ndarray]
    values: dict[str, Any] = field(default_factory=dict)


class Remains(Protocol):
    """Says what remains of documents."""

    def apply(self, source: int, index: int, text: str) -> str:
        """Return what remains of a document that was learned; "" where it is dropped."""
        ...

    def decided(self, source: int, begin: int, count: int) -> PartState:
        """Return what was decided of so many documents of a source, from number `begin` on."""
        ...


class Cleaner(Remains, Protocol):
    """Learns every document once, in the fixed order, and then says what remains of each."""

    def learn(self, source: int, index: int, text: str) -> None:
        """Learn a document: number `index` of source number `source`, both from 0."""
        ...

    def finish(self) -> CleanReport:
        """Decide what falls, after the last document; deterministic."""
        ...


@runtime_checkable
class PartCleaner(Cleaner, Protocol):
    """Learns parts of the text apart from each other."""

    def learned(self) -> PartState:
        """Return what was learned of a part; nothing is learned after it."""
        ...

    def merge(self, state: PartState, source: int, begin: int) -> None:
        """Learn a part of a source that another cleaner has learned, behind all before it.

        Args:
            state: what that one has learned.
            source: number of the source.
            begin: number of the part's first document there.
        """
        ...


@runtime_checkable
class Deduplicator(Cleaner, Protocol):
    """Drops what is there already, and counts how often it was."""

    def duplicates(self, source: int, index: int) -> int:
        """Return how many other documents fell for this one, which remains."""
        ...


def shortened(text: str) -> str:
    """Return the beginning of a text on one line, as reports show it."""
    line = " ".join(text[: 4 * EXAMPLE_CHARACTERS].split())
    return line if len(line) <= EXAMPLE_CHARACTERS else line[: EXAMPLE_CHARACTERS - 3] + "..."
