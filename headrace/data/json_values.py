"""Read JSON as a stream of values: a file of one array, one object, or lines of objects.

Of an array one element is in memory, however long the array is.
"""

import codecs
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import IO, Any

from headrace.core.errors import ConfigError
from headrace.core.files import python
from headrace.data import text_file
from headrace.data.fields import lacks, once
from headrace.data.left_out import Reason
from headrace.data.listing import JSON, kind_of
from headrace.data.text_file import REPLACEMENT, TextAndOrigin, TextFile

CHUNK_BYTES = 1 << 20
NO_SPACE = re.compile(r"[^ \t\r\n]")


class NotJson(ConfigError):
    """A value that is not JSON."""


def json_values(file: TextFile, stream: IO[bytes]) -> Iterator[TextAndOrigin]:
    """Yield the rows of a JSON file: one array, one object, or lines of JSON.

    A .json file in a folder may be something else, as package.json: it is counted as left out where
    its first value is no row.
    """
    values = _Values(file, stream)
    rows = iter(values)
    by_chance = file.asked is None and kind_of(file.path)[0] in JSON
    try:
        first = next(rows)
    except StopIteration:
        return
    except NotJson:
        if not by_chance:
            raise
        file.tally.add(Reason.NO_JSON, file.name)
        return
    lacking = file.reading.lacking
    if not isinstance(first, str) and (key := lacking(first)) is not None:
        out = _without_value(file, values)
        try:
            follows = any(isinstance(row, str) or lacking(row) is None for row in rows)
        except NotJson:
            follows = False
        if follows:
            raise lacks(key, first, f"{file.name}:1", out, "behind")
        if by_chance:
            file.tally.add(Reason.NO_FIELD, file.name)
            return
        if inner := _inner(first):
            raise ConfigError(
                f"{file.name} has no field {key!r}; rows stand in its field {inner!r}",
                file.through(_script(f"r = r[{inner!r}]")),
            )
        file.text_of(first, f"{file.name}:1", lambda: out)  # which refuses it
    for row in chain([first], rows):
        origin = f"{file.name}:{values.number}"
        if values.number > 1 and isinstance(row, dict) and (key := lacking(row)) is not None:
            raise lacks(key, row, origin, _without_value(file, values))
        yield file.text_of(row, origin, lambda: _without_value(file, values)), origin


def fault(error: Exception) -> str:
    """Return why a text is no JSON: its syntax, or a number or a nesting without end."""
    return error.msg.removesuffix(" at") if isinstance(error, json.JSONDecodeError) else str(error)


def _inner(row: Any) -> str | None:
    """Return the name of the field of an object that holds rows."""
    fields = row.items() if isinstance(row, dict) else ()
    lists = {name: value for name, value in fields if isinstance(value, list) and value}
    return next((name for name, value in lists.items() if isinstance(value[0], dict)), None)


def _script(change: str) -> str:
    """Return the command that changes the value `r` of a JSON text."""
    script = f"import json, sys; r = json.load(sys.stdin); {change}; json.dump(r, sys.stdout)"
    return python(script)


class _Values:
    """Iterate over the values of a JSON file, and over the elements of an array among them."""

    def __init__(self, file: TextFile, stream: IO[bytes]) -> None:
        self._file, self._stream = file, stream
        self._json = json.JSONDecoder(object_pairs_hook=once(*file.reading.keys))
        errors = "replace" if file.reading.replace else "strict"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._tail = b""
        self._text, self._at, self._ended, self._read_bytes = "", 0, False, 0
        self.line = self.first_line = 1
        """The line that is being read, and the one where the value begins."""
        self.number = 0
        """The value that is being read, from 1."""
        self.in_array = False

    def __iter__(self) -> Iterator[Any]:
        while self._next():
            if self._text[self._at] != "[":
                yield self._value()
                continue
            self.in_array = True
            self._go(self._at + 1)
            yield from self._elements()
            self.in_array = False

    def _elements(self) -> Iterator[Any]:
        after = False
        while self._next():
            char = self._text[self._at]
            if char == "]":
                self._go(self._at + 1)
                return
            if after and char != ",":
                raise self._error(f"there is neither a comma nor a ] before {char!r}")
            if after:
                self._go(self._at + 1)
                self._next()
            yield self._value()
            after = True
        raise self._error("the file ends inside of its array")

    def _value(self) -> Any:
        self.number += 1
        self.first_line = self.line
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if self._ended or not isinstance(error, json.JSONDecodeError):
                    raise self._error(fault(error)) from None
                if len(self._text) - self._at > text_file.MOST_DOCUMENT_BYTES:
                    raise self._too_large() from None
                self._more()
            else:
                self._go(end)
                return value

    def _go(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at

    def _next(self) -> bool:
        """Go to the next character that is no space; return False at the end."""
        while True:
            if token := NO_SPACE.search(self._text, self._at):
                self._go(token.start())
                return True
            self._go(len(self._text))
            if self._ended:
                return False
            self._more()

    def _more(self) -> None:
        """Read as much again as is waiting, so that a long value is not parsed too often."""
        waiting = self._text[self._at :]
        raw = self._stream.read(max(CHUNK_BYTES, len(waiting)))
        self._ended = not raw
        try:
            text = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            before_bytes = self._read_bytes + len(raw) - len(error.object)
            self._file.decoded(error.object, self._file.name, before_bytes)
            raise
        if self._file.reading.replace:
            own = (self._tail + raw).count(REPLACEMENT)
            if replaced := text.count("\ufffd") - own:
                self._file.tally.add(Reason.NOT_UTF_8, self._file.name, replaced)
            self._tail = raw[-2:]
        self._text, self._at = waiting + text.removeprefix("\ufeff" * (not self._read_bytes)), 0
        self._read_bytes += len(raw)

    def _error(self, why: str) -> NotJson:
        return NotJson(
            f"{self._file.name}: value {self.number:,} is not JSON that can be read, at line "
            f"{self.line:,}: {why}; copy or download the file again, or train without it",
            self._file.without(),
        )

    def _too_large(self) -> ConfigError:
        where = f"{self._file.name}: value {self.number:,} at line {self.first_line:,}"
        return self._file.too_large(where, self._file.without())


def _without_value(file: TextFile, values: _Values) -> str:
    """Return the command that takes the value that was read last out of its file."""
    if values.in_array:
        return file.through(_script(f"del r[{values.number - 1}]"))
    return file.without_lines(values.first_line, values.line)
