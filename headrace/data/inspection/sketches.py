"""What is kept of a corpus while it goes by: sketches of a fixed size.

Each sees every document once. Samples are chosen by hash, so neither the order of files nor their
number changes them. Of texts of special tokens those that come first are kept.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace.data.inspection.record import RepeatedExample, RepeatedShare, SpecialTextCount
from headrace.data.sources import Document

OCTAVE = 8
"""Groups of lengths in an octave."""
GROUPS = 64 * OCTAVE
KEPT = 1 << 15
"""Different items of which a sketch of repeats knows how often each was met."""
ITEM_BYTES = 1200
"""Memory of an item that is kept: its hash, its counts, a beginning and two origins."""
SHOWN, SHOWN_CHARACTERS, ORIGIN_CHARACTERS = 5, 80, 200
PARAGRAPH_BYTES = 32
"""Shorter paragraphs, such as headings and numbers, are not compared."""
SAMPLE_CHARACTERS = 1 << 20
"""Characters of a script that are kept to measure tokenizers on."""
PIECE_CHARACTERS = 1 << 12
MOST_SPECIAL_TEXTS = 64
"""Different texts of special tokens that are counted."""
Z = 1.96
_SPECIAL = re.compile(
    r"<\|[A-Za-z][\w-]{1,40}\|>|</?s>|<(?:bos|eos|pad|unk|mask|cls|sep)>|"
    r"\[(?:CLS|SEP|PAD|UNK|MASK|/?INST)\]|<(?:start|end)_of_turn>"
)
"""How tokenizers in use spell special tokens: GPT, Llama, Mistral, Qwen, BERT, Gemma."""
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")

ComparedParts = Callable[[str], Iterable[str]]
"""What of a document is compared with others: its whole text, its paragraphs."""


def whole(text: str) -> tuple[str]:
    """Return a document as the only thing that is compared."""
    return (text,)


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a document that are long enough to be compared."""
    for part in _BLANK_LINE.split(text):
        if len(part := part.strip()) >= PARAGRAPH_BYTES:
            yield part


@dataclass
class ScriptLengths:
    """Count documents and bytes of one script, by length in bytes."""

    documents: np.ndarray = field(default_factory=lambda: np.zeros(GROUPS, dtype=np.int64))
    text_bytes: np.ndarray = field(default_factory=lambda: np.zeros(GROUPS, dtype=np.int64))

    def add(self, size: int) -> None:
        """Count a document of so many bytes, at least 1."""
        group = int(OCTAVE * math.log2(size))
        self.documents[group] += 1
        self.text_bytes[group] += size


@dataclass
class _Item:
    size: int
    begins: str
    origins: list[str]
    times: int = 1


class Repeats:
    """Estimate how much of a corpus repeats what came before.

    Items whose hash lies below a bar are kept with their count. The bar halves when there are more
    than `KEPT`, so each that is kept was kept from its first time on.

    Args:
        parts: what of a document is compared.
    """

    def __init__(self, parts: ComparedParts) -> None:
        self._parts = parts
        self._items: dict[int, _Item] = {}
        self._bar = 1 << 64
        self._seen = 0

    def add(self, document: Document) -> None:
        """Count the parts of a document."""
        for part in self._parts(document.text):
            raw = part.encode()
            digest = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")
            self._seen += 1
            if digest >= self._bar:
                continue
            if (item := self._items.get(digest)) is not None:
                item.times += 1
                if len(item.origins) < 2:
                    item.origins.append(document.origin[-ORIGIN_CHARACTERS:])
                continue
            begins, origin = part[:SHOWN_CHARACTERS], document.origin[-ORIGIN_CHARACTERS:]
            self._items[digest] = _Item(len(raw), begins, [origin])
            while len(self._items) > KEPT:
                self._bar //= 2
                self._items = {d: one for d, one in self._items.items() if d < self._bar}

    def result(self) -> RepeatedShare:
        """Return the shares with their interval: different items are a random sample of all."""
        items = sorted(self._items.items())
        times = np.array([item.times for _, item in items], dtype=np.float64)
        sizes = np.array([item.size for _, item in items], dtype=np.float64)
        exact, total = self._bar == 1 << 64, float(times.sum())
        share = 1 - len(items) / total if total else 0.0
        error = 0.0
        if not exact and len(items) > 1:  # a ratio of means, by the delta method
            off = 1 - (1 - share) * times
            error = Z * float(off.std(ddof=1)) / math.sqrt(len(items)) / float(times.mean())
        repeated = [pair for pair in items if pair[1].times > 1]
        repeated.sort(key=lambda pair: (-pair[1].times * pair[1].size, pair[0]))
        text_bytes = float((times * sizes).sum())
        return RepeatedShare(
            seen=self._seen,
            sampled=len(items),
            exact=exact,
            share=share,
            low=max(0.0, share - error),
            high=min(1.0, share + error),
            bytes_share=1 - float(sizes.sum()) / text_bytes if text_bytes else 0.0,
            examples=tuple(
                RepeatedExample(text=i.begins, times=i.times, origins=tuple(i.origins))
                for _, i in repeated[:SHOWN]
            ),
        )


class Sample:
    """Keep pieces of the texts of one script, chosen by hash from all of them."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, str]] = []
        self._bar = 1 << 64
        self._size = 0

    def add(self, text: str, digest: bytes) -> None:
        """Take pieces of a text into the sample, given a digest of the text."""
        for begin in range(0, len(text), PIECE_CHARACTERS):
            place = hashlib.blake2b(digest, digest_size=8, salt=begin.to_bytes(16, "little"))
            priority = int.from_bytes(place.digest(), "big")
            if priority >= self._bar:
                continue
            piece = text[begin : begin + PIECE_CHARACTERS]
            self._pieces.append((priority, piece))
            self._size += len(piece)
            while self._size > SAMPLE_CHARACTERS:
                self._bar //= 2
                self._pieces = [one for one in self._pieces if one[0] < self._bar]
                self._size = sum(len(piece) for _, piece in self._pieces)

    @property
    def texts(self) -> list[str]:
        """Return the pieces, in an order that files do not change."""
        return [piece for _, piece in sorted(self._pieces)]


class SpecialTexts:
    """Count text that spells a special token.

    Args:
        own: those of the tokenizer that will be used, beside the well known ones.
    """

    def __init__(self, own: Iterable[str] = ()) -> None:
        spelled = "|".join(re.escape(one) for one in sorted(own, key=len, reverse=True))
        self._pattern = re.compile(f"{spelled}|{_SPECIAL.pattern}") if spelled else _SPECIAL
        self._counts: dict[str, tuple[int, int, str]] = {}

    def add(self, document: Document) -> None:
        """Count what a document spells."""
        for text, times in Counter(self._pattern.findall(document.text)).items():
            if text not in self._counts and len(self._counts) >= MOST_SPECIAL_TEXTS:
                continue
            documents, before, first = self._counts.get(text, (0, 0, document.origin))
            self._counts[text] = documents + 1, before + times, first

    def result(self) -> tuple[SpecialTextCount, ...]:
        """Return what was found, the most frequent first."""
        rows = [
            SpecialTextCount(text=text, documents=documents, times=times, first=first)
            for text, (documents, times, first) in self._counts.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.documents, row.text)))
