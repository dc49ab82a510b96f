"""What of a source did not become text, by reason: files that were not read, documents skipped.

A tally is kept while a source is listed and read. Its records lie beside the prepared shards, in
`left_out.json`, so that whoever trains on these is told as well.
"""

import json
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from headrace.core.errors import ConfigError
from headrace.core.files import printable, write_whole
from headrace.core.strict import Strict

FILE = "left_out.json"
EXAMPLES = 3
"""Names that are kept of each reason."""


class Reason(StrEnum):
    """Why something is no text to train on."""

    ENDING = "ending"
    EMPTY_FILE = "empty_file"
    HIDDEN = "hidden"
    CACHE = "cache"
    NO_PERMISSION = "no_permission"
    TEMPORARY = "temporary"
    BROKEN_LINK = "broken_link"
    CIRCLE = "circle"
    TWICE = "twice"
    READ_TWICE = "read_twice"
    COPY = "copy"
    SPECIAL = "special"
    FOLDER = "folder"
    NO_JSON = "no_json"
    NO_FIELD = "no_field"
    NO_ROWS = "no_rows"
    EMPTY_TEXT = "empty_text"
    NULL_TEXT = "null_text"
    BLANK_LINE = "blank_line"
    HALF_CHARACTER = "half_character"
    NOT_UTF_8 = "not_utf_8"

    @property
    def of_files(self) -> bool:
        """Return whether the reason is known before the file is read."""
        return self not in _OF_TEXTS

    @property
    def is_read(self) -> bool:
        """Return whether the text is read all the same: once more, or with U+FFFD in it."""
        if self in (Reason.HALF_CHARACTER, Reason.NOT_UTF_8):
            return True
        return self is Reason.READ_TWICE or self is Reason.COPY

    def words(self, count: int) -> str:
        """Return it as words behind a count."""
        one, many = _WORDS[self]
        return one if count == 1 else many


_OF_TEXTS = frozenset(
    {
        Reason.NO_JSON,
        Reason.NO_FIELD,
        Reason.NO_ROWS,
        Reason.EMPTY_TEXT,
        Reason.NULL_TEXT,
        Reason.BLANK_LINE,
        Reason.HALF_CHARACTER,
        Reason.NOT_UTF_8,
    }
)
_WORDS = {
    Reason.ENDING: ("file of a kind that is not read", "files of kinds that are not read"),
    Reason.EMPTY_FILE: ("empty file", "empty files"),
    Reason.HIDDEN: ("hidden file or folder", "hidden files or folders"),
    Reason.CACHE: ("folder of Python's caches", "folders of Python's caches"),
    Reason.NO_PERMISSION: (
        "file or folder that this user may not read",
        "files or folders that this user may not read",
    ),
    Reason.TEMPORARY: (
        "temporary file or folder of another program",
        "temporary files or folders of other programs",
    ),
    Reason.BROKEN_LINK: ("link that leads nowhere", "links that lead nowhere"),
    Reason.CIRCLE: ("link back to a folder above it", "links back to a folder above them"),
    Reason.TWICE: (
        "second name of a file or folder that is read",
        "second names of files or folders that are read",
    ),
    Reason.READ_TWICE: (
        "file that another of data.sources names too, and that is read twice",
        "files that another of data.sources names too, and that are read twice",
    ),
    Reason.COPY: (
        "file with the very bytes of another of its source, and both are read",
        "files with the very bytes of others of their source, and all are read",
    ),
    Reason.SPECIAL: ("pipe, socket or device", "pipes, sockets or devices"),
    Reason.FOLDER: (
        "folder that a glob matches, and not what is in it",
        "folders that a glob matches, and not what is in them",
    ),
    Reason.NO_JSON: ("file that is no JSON", "files that are no JSON"),
    Reason.NO_ROWS: ("file without rows", "files without rows"),
    Reason.NO_FIELD: (
        "file of JSON without the field data.text_key",
        "files of JSON without the field data.text_key",
    ),
    Reason.EMPTY_TEXT: ("document without text", "documents without text"),
    Reason.NULL_TEXT: ("row whose text is null", "rows whose text is null"),
    Reason.BLANK_LINE: ("blank line", "blank lines"),
    Reason.HALF_CHARACTER: (
        "text with half a surrogate pair, which became U+FFFD",
        "texts with half a surrogate pair, which became U+FFFD",
    ),
    Reason.NOT_UTF_8: (
        "place with bytes that are not UTF-8, which became U+FFFD",
        "places with bytes that are not UTF-8, each of which became U+FFFD",
    ),
}


class LeftOut(Strict):
    """One reason, how often it was met, and the first names."""

    reason: Reason
    count: int = Field(ge=1)
    examples: tuple[str, ...] = Field(min_length=1, max_length=EXAMPLES)

    def line(self) -> str:
        """Return it as one line for a person."""
        how = "not left out" if self.reason.is_read else "left out"
        return f"{how}: {self.format()}"

    def format(self) -> str:
        """Return its count, its reason and its examples."""
        more = ", ..." if self.count > len(self.examples) else ""
        return f"{self.count:,} {self.what()} ({', '.join(self.examples)}{more})"

    def what(self) -> str:
        """Return its reason in words that fit its count."""
        return self.reason.words(self.count)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it, with its reason in words too."""
        return {**self.model_dump(mode="json"), "words": self.what()}


class LeftOutTally:
    """Counts what is left out, by reason, with the first few names of each."""

    def __init__(self) -> None:
        self._counts: dict[Reason, int] = {}
        self._examples: dict[Reason, list[str]] = {}

    def add(self, reason: Reason, name: str | Path, count: int = 1) -> None:
        """Count one, or several under one name."""
        self._counts[reason] = self._counts.get(reason, 0) + count
        examples = self._examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(printable(name))

    def take(self, other: "LeftOutTally", *reasons: Reason) -> None:
        """Add what another tally has of these reasons."""
        for reason in reasons:
            if count := other._counts.get(reason):
                self._counts[reason] = self._counts.get(reason, 0) + count
                mine = self._examples.setdefault(reason, [])
                mine += other._examples[reason][: EXAMPLES - len(mine)]

    def take_records(self, records: Iterable[LeftOut]) -> None:
        """Add what another tally had, by the records of it."""
        other = LeftOutTally()
        for record in records:
            other._counts[record.reason] = record.count
            other._examples[record.reason] = [*record.examples]
        self.take(other, *Reason)

    @property
    def total(self) -> int:
        """Return how many files or texts were counted, over all reasons."""
        return sum(self._counts.values())

    @property
    def records(self) -> tuple[LeftOut, ...]:
        """Return one record for each reason that was counted, in the order of the reasons."""
        return tuple(
            LeftOut(reason=r, count=self._counts[r], examples=tuple(self._examples[r]))
            for r in Reason
            if r in self._counts
        )


def without_text(source: str, tally: LeftOutTally, remedy: str) -> ConfigError:
    """Return the error of sources that give no text, with what of them was left out and why."""
    why = "; ".join(record.format() for record in tally.records)
    return ConfigError(f"{source} no text" + (why and f": {why}"), remedy)


def save(folder: Path, records: Iterable[LeftOut]) -> None:
    """Keep the records beside prepared shards."""
    write_whole(folder / FILE, json.dumps([r.model_dump(mode="json") for r in records], indent=1))


def load(folder: Path) -> tuple[LeftOut, ...]:
    """Return the records that lie beside prepared shards; shards of before have none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return ()
    try:
        return tuple(LeftOut.model_validate(row) for row in json.loads(path.read_bytes()))
    except (ValueError, TypeError, ValidationError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def current(kept: Iterable[LeftOut], listed: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Return what holds now: texts as they were read, and files as they are listed today."""
    texts = [record for record in kept if not record.reason.of_files]
    return (*(record for record in listed if record.reason.of_files), *texts)
