"""Measure into how many tokens tokenizers cut a text: per word, per character and per byte.

A tokenizer's fertility is the number of tokens per word (Rust et al.,
https://arxiv.org/abs/2012.15613). A high one means longer sequences for the same text, so more
steps and a shorter context in words.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import regex

from headrace.core.errors import ConfigError
from headrace.core.limits import TextGrouping
from headrace.core.progress import OnProgress
from headrace.data.fields import TextReading
from headrace.data.inspection.scripts import script_of
from headrace.data.left_out import LeftOutTally
from headrace.data.listing import Asked, list_files
from headrace.data.sources import read_documents
from headrace.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 20
MOST_BYTES = 16 << 20
"""Bytes of each source that are read."""
_WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+")
_UNSPACED = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]"
)
"""Letters of scripts that put no blank between words, so that a text does not show its words."""


class FertilityRates(TypedDict):
    """Hold a tokenizer's tokens per unit of a text; those per word are None without blanks."""

    tokens_per_word: float | None
    tokens_per_character: float
    tokens_per_byte: float


@dataclass
class TextGroup:
    """Hold what one group of texts has, and the tokens that each tokenizer makes of it.

    Args:
        name: the source, or the script.
        documents: texts that were read.
        text_bytes: their UTF-8 bytes.
        characters: their code points.
        words: runs of letters, marks and digits; in scripts without blanks between words it counts
            phrases.
        unspaced: letters of scripts without blanks between words.
        tokens: number of tokens, by tokenizer.
        is_whole: False where a source is longer than what was read of it.
    """

    name: str
    documents: int = 0
    text_bytes: int = 0
    characters: int = 0
    words: int = 0
    unspaced: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    is_whole: bool = True

    def add(self, text: str) -> None:
        """Count a text; its tokens are counted by who has the tokenizers."""
        self.documents += 1
        self.text_bytes += len(text.encode())
        self.characters += len(text)
        self.words += sum(1 for _ in _WORD.finditer(text))
        self.unspaced += sum(1 for _ in _UNSPACED.finditer(text))

    @property
    def has_words(self) -> bool:
        """Return whether blanks stand between the words, so that these can be counted."""
        return 2 * self.unspaced < self.characters

    def rates(self, tokenizer: str) -> FertilityRates:
        """Return a tokenizer's tokens per word (None without blanks), character and byte."""
        tokens = self.tokens[tokenizer]
        return {
            "tokens_per_word": tokens / max(1, self.words) if self.has_words else None,
            "tokens_per_character": tokens / max(1, self.characters),
            "tokens_per_byte": tokens / max(1, self.text_bytes),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values, with every tokenizer's rates."""
        words = self.words if self.has_words else None
        rates = {name: self.rates(name) for name in self.tokens}
        table = asdict(self) | {"words": words, "rates": rates}
        del table["unspaced"]
        return table


def total(groups: Sequence[TextGroup]) -> TextGroup:
    """Return the sum of groups, with the name "all"."""
    whole = TextGroup("all")
    for group in groups:
        for key in ("documents", "text_bytes", "characters", "words", "unspaced"):
            setattr(whole, key, getattr(whole, key) + getattr(group, key))
        for name, tokens in group.tokens.items():
            whole.tokens[name] = whole.tokens.get(name, 0) + tokens
        whole.is_whole &= group.is_whole
    return whole


def measure(
    tokenizers: Mapping[str, Tokenizer],
    sources: Sequence[str],
    *,
    by: TextGrouping = "source",
    reading: TextReading | None = None,
    most_bytes: int = MOST_BYTES,
    progress: OnProgress | None = None,
) -> list[TextGroup]:
    """Return every group of the sources' texts with the tokens that each tokenizer makes of it.

    Texts are streamed: memory holds one batch of documents.

    Args:
        tokenizers: each under its own name.
        sources: as `data.sources`; each file of a folder is a source of its own.
        by: how texts are grouped.
        reading: how rows and files become texts.
        most_bytes: bytes of each source that are read, in whole documents.
        progress: called with (source, bytes read, None).

    Raises:
        ConfigError: a source cannot be read, or gives no text.
    """
    groups: dict[str, TextGroup] = {}
    for name, source in _parts(sources):
        before = sum(group.documents for group in groups.values())
        read_bytes = 0
        is_whole = True
        for texts, is_whole in _batches(source, reading, most_bytes):
            for group in _add(groups, name, texts, by, tokenizers):
                group.is_whole &= is_whole
            read_bytes += sum(len(text.encode()) for text in texts)
            if progress is not None:
                progress(f"encoding {name}", read_bytes, None)
        if sum(group.documents for group in groups.values()) == before:
            raise ConfigError(f"--text {source} gives no text", "--text PATH")
    return [*groups.values()] if by == "source" else sorted(groups.values(), key=lambda g: g.name)


def _parts(sources: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the path of every file of the folders, and of every other source."""
    seen: set[str] = set()
    for source in sources:
        parts = [(source, source)]
        if not source.startswith("hf:") and Path(source).expanduser().is_dir():
            files = list_files(Asked(source, "--text"), LeftOutTally())
            parts = [(path.name, str(path)) for _, path in files]
        for name, path in parts:
            yield (path if name in seen else name), path
            seen.add(name)


def _batches(
    source: str, reading: TextReading | None, most_bytes: int
) -> Iterator[tuple[list[str], bool]]:
    """Yield texts of a source, and False with the last ones where the source has more."""
    texts: list[str] = []
    size = read_bytes = 0
    for document in read_documents(Asked(source, "--text"), reading=reading):
        if read_bytes >= most_bytes:
            yield texts, False
            return
        texts.append(document.text)
        size += len(document.text)
        read_bytes += len(document.text.encode())
        if size >= BATCH_CHARACTERS and read_bytes < most_bytes:
            yield texts, True
            texts, size = [], 0
    if texts:
        yield texts, True


def _add(
    groups: dict[str, TextGroup],
    source: str,
    texts: Sequence[str],
    by: TextGrouping,
    tokenizers: Mapping[str, Tokenizer],
) -> list[TextGroup]:
    """Count texts in their groups, and return these."""
    names = [source if by == "source" else script_of(text) for text in texts]
    for name in dict.fromkeys(names):
        groups.setdefault(name, TextGroup(name, tokens=dict.fromkeys(tokenizers, 0)))
    for name, text in zip(names, texts, strict=True):
        groups[name].add(text)
    for tokenizer_name, tokenizer in tokenizers.items():
        for name, ids in zip(names, tokenizer.encode_batch(texts), strict=True):
            groups[name].tokens[tokenizer_name] += len(ids)
    return [groups[name] for name in dict.fromkeys(names)]
