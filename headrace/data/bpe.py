"""Count the words of texts for a byte-level BPE, and let rustbpe learn its merges.

rustbpe learns from texts, and merges.py from counted words; both give the same merges.

Counted words need memory for the different words and none for the text. At most `WORDS` of them are
kept: where a text has more, the rarest half is dropped and its occurrences are counted as left out
(lossy counting, Manku and Motwani, https://www.vldb.org/conf/2002/S10P03.pdf).
"""

import json
import re
import shlex
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import regex
from pydantic import Field

from headrace.core.errors import ConfigError
from headrace.core.limits import TokenizerPattern
from headrace.core.remedy import mend
from headrace.core.strict import Strict
from headrace.core.units import format_bytes
from headrace.data.document_token import END_OF_TEXT
from headrace.data.lossless import with_limited_runs

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_HEADS: dict[TokenizerPattern, str] = {
    "nanochat": rf"{_CASELESS}\p{{N}}{{1,2}}{_LINES}",
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+",
    "gpt4": rf"{_CASELESS}\p{{N}}{{1,3}}{_LINES}",
    "qwen": rf"{_CASELESS}\p{{N}}{_LINES}",
}
PATTERNS: dict[TokenizerPattern, str] = {
    name: rf"{head}|\s+(?!\S)|\s+" for name, head in _HEADS.items()
}
"""How text falls into the words inside which tokens are made, by name.

GPT-4's is that of cl100k_base and of Llama 3; Qwen's has one token a digit. nanochat's is GPT-4's
with numbers in twos: three cost too many entries of a small vocabulary.
"""
_BLANKS = " \t\v\f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Unicode's white space (White_Space=yes) but for the ends of lines, for a character class."""
_OTHER_BLANKS = tuple(chr(c) for c in range(0x3001) if c != 32 and re.match(f"[{_BLANKS}]", chr(c)))
_LAST_BLANK = re.compile(rf"(?<=[{_BLANKS}])[{_BLANKS}](?=[^{_BLANKS}\r\n])")
_SPACES = re.compile("  +")
_LAST_OF_ANY = re.compile(rf"(?<=[{_BLANKS}\r\n])[{_BLANKS}\r\n](?=[^{_BLANKS}\r\n])")
CUT_AHEAD = 8
"""Batches of texts that are cut before rustbpe asks for them."""
WORDS = 1 << 20
"""Most different words that are counted at once: some 200 bytes of memory each, and 600 while
merges are learned from them."""


class TrainedOn(Strict):
    """Say which text a tokenizer learned from: a sample of it, or counts of all its words."""

    counted: bool = False
    """Whether all words were counted; otherwise a sample was learned from."""
    text_bytes: int = Field(ge=0)
    """Bytes of UTF-8 that it learned from."""
    of_bytes: int = Field(ge=0)
    """Bytes of UTF-8 of the whole training side; for a sample those of both sides."""
    words: int = Field(default=0, ge=0)
    """Different words that were counted."""
    occurrences: int = Field(default=0, ge=0)
    """Words of the text, each as often as it stands there."""
    left_out: int = Field(default=0, ge=0)
    """Occurrences in no count, since their words were among the rarest of too many."""
    trainer: Literal["", "rustbpe", "counts"] = ""
    """What made the merges: rustbpe, or merges.py from counted words; "" in older records."""

    @staticmethod
    def from_counts(counts: "WordCounts") -> "TrainedOn":
        """Return the record of words that were counted."""
        return TrainedOn(
            counted=True,
            text_bytes=counts.text_bytes,
            of_bytes=counts.text_bytes,
            words=len(counts.words),
            occurrences=counts.occurrences,
            left_out=counts.left_out,
            trainer="counts",
        )

    def format(self) -> str:
        """Return it as one line for a reader."""
        if not self.counted:
            share = self.text_bytes / max(1, self.of_bytes)
            by = {"rustbpe": ", with rustbpe", "counts": ", without rustbpe", "": ""}[self.trainer]
            return (
                f"the tokenizer learned from a sample of {format_bytes(self.text_bytes)} of "
                f"{format_bytes(self.of_bytes)} of text ({share:.1%}){by}"
            )
        line = (
            f"the tokenizer learned from all {format_bytes(self.text_bytes)} of its text: "
            f"{self.words:,} different words counted in {self.occurrences:,}"
        )
        if self.left_out:
            line += f"; {self.left_out:,} of the rarest words were left out to bound the memory"
        return line


@dataclass
class WordCounts:
    """Count the words of texts in bounded memory, the same for the same texts in the same order.

    Attributes:
        words: how often each word stands in the texts.
        occurrences: words that were read, each time that they stand there.
        left_out: occurrences that are in no count, as their words were among the rarest.
        text_bytes: UTF-8 bytes that were read.
    """

    pattern: TokenizerPattern
    most: int = WORDS
    words: Counter[str] = field(default_factory=Counter)
    occurrences: int = 0
    left_out: int = 0
    text_bytes: int = 0

    def __post_init__(self) -> None:
        self._split = regex.compile(PATTERNS[self.pattern])

    def add(self, text: str) -> None:
        """Count the words of one text."""
        self.text_bytes += len(text.encode())
        for piece in with_limited_runs([text]):
            words = self._split.findall(piece)
            self.occurrences += len(words)
            self.words.update(words)
            if len(self.words) > self.most:
                self._drop_rarest()

    def _drop_rarest(self) -> None:
        by_count = sorted(self.words.items(), key=lambda item: (-item[1], item[0]))
        self.left_out += sum(count for _, count in by_count[self.most // 2 :])
        self.words = Counter(dict(by_count[: self.most // 2]))


def learn_from_texts(
    texts: Iterable[str], merges: int, pattern: TokenizerPattern
) -> dict[bytes, int]:
    """Return the rank of every token that rustbpe learns: bytes first, then merges in order.

    Its regular expression engine is quicker without a look ahead. The only one of our patterns
    leaves the last blank of several to the word that follows, so texts are cut there instead.

    Raises:
        ImportError: rustbpe is not installed.
    """
    import rustbpe

    learner = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    pieces = _cut_ahead(texts, pattern)
    learner.train_from_iterator(pieces, 256 + merges, pattern=rf"{_HEADS[pattern]}|\s+")
    tokens = dict.fromkeys(bytes(token) for token, _ in learner.get_mergeable_ranks())
    return {token: rank for rank, token in enumerate(tokens)}


def _cut_ahead(texts: Iterable[str], pattern: TokenizerPattern) -> Iterator[str]:
    """Yield texts as rustbpe needs them; while it counts some, a thread cuts the next."""

    def cut(batch: list[str]) -> list[str]:
        return [*_cut_at_last_blanks(with_limited_runs(batch), pattern)]

    ahead: deque[Future[list[str]]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for batch in _batches(texts):
            ahead.append(pool.submit(cut, batch))
            if len(ahead) > CUT_AHEAD:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield texts in lists of about a million characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= 1 << 20:
            yield batch
            batch, size = [], 0
    yield batch


def _cut_at_last_blanks(texts: Iterable[str], pattern: TokenizerPattern) -> Iterator[str]:
    """Yield texts cut before the last of several blanks that a word follows."""
    for text in texts:
        begin = 0
        for cut in _cuts(text, pattern):
            yield text[begin:cut]
            begin = cut
        yield text[begin:] if begin else text


def _cuts(text: str, pattern: TokenizerPattern) -> Iterator[int]:
    """Yield the places of the last of several blanks that a word follows."""
    is_gpt2 = pattern == "gpt2"  # in which an end of a line is a blank as any other
    if not is_gpt2 and not any(blank in text for blank in _OTHER_BLANKS):
        yield from _last_spaces(text)
        return
    for match in (_LAST_OF_ANY if is_gpt2 else _LAST_BLANK).finditer(text):
        yield match.start()


def _last_spaces(text: str) -> Iterator[int]:
    """Yield the same where spaces and ends of lines are the only blanks.

    `str.find` looks for the first two of them faster than a pattern does.
    """
    begin = text.find("  ")
    while run := _SPACES.match(text, begin) if begin >= 0 else None:
        if run.end() < len(text) and text[run.end()] not in "\r\n":
            yield run.end() - 1
        begin = text.find("  ", run.end())


def check_entries(vocab: int, special_tokens: tuple[str, ...], *, of_verb: bool = False) -> None:
    """Refuse special tokens that cannot be told apart or spelled, and too small a vocabulary.

    Args:
        vocab: entries: 256 bytes, merges, `<|endoftext|>` and the special tokens.
        special_tokens: names of special tokens beside `<|endoftext|>`.
        of_verb: options of `headrace data tokenizer` said so, and not the keys of a plan.

    Raises:
        ConfigError: a name has less than two characters, is given twice, or has others than
            printable ASCII without blanks; or there is no room for 256 bytes and these.
    """
    for at, token in enumerate(special_tokens):
        why = ""
        if len(token) < 2 or not token.isascii() or not token.isprintable() or " " in token:
            why = "is not two or more printable ASCII characters without blanks"
        elif token == END_OF_TEXT or token in special_tokens[:at]:
            why = "is there already"
        if why:
            rest = [name for i, name in enumerate(special_tokens) if i != at] or ["<|user|>"]
            plan = mend(f"data.special_tokens={json.dumps(rest)}")
            options = " ".join(f"--special {shlex.quote(name)}" for name in rest)
            key = "--special" if of_verb else "data.special_tokens"
            raise ConfigError(f"{key} {token!a} {why}", options if of_verb else plan)
    least = 257 + len(special_tokens)
    if vocab < least:
        others = f" and {least - 256} special tokens" * bool(special_tokens)
        key = "--vocab" if of_verb else "data.vocab"
        raise ConfigError(
            f"{key} = {vocab} has no room for 256 bytes{others}",
            f"--vocab {least}" if of_verb else mend(f"data.vocab={least}"),
        )
