"""Files to texts: .txt, .jsonl, .json, .csv, .parquet and what they are compressed with.

Every reader is a stream: of a large file one row is in memory, or one value of JSON. What cannot be
read is one error with its place, and a command that mends it: it keeps the file under another name,
which is then told as left out, and writes it again without the fault.
"""

import bz2
import codecs
import csv
import io
import json
import lzma
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from headrace.core.errors import ConfigError, is_out_of_memory
from headrace.core.files import python, shell
from headrace.data import text_file
from headrace.data.chat.conversation import plain
from headrace.data.columns import read_columns
from headrace.data.contents import PARQUET, is_text, other_kind, packed_as
from headrace.data.fields import lacks, no_field, once
from headrace.data.json_values import NO_SPACE, fault, json_values
from headrace.data.left_out import Reason
from headrace.data.listing import DECOMPRESS, JSON, LINES, TABLES, kind_of
from headrace.data.text_file import TextAndOrigin, TextFile

CHUNK_BYTES = 1 << 20
SNIFFED_BYTES = 1 << 12
LOOKED_BEHIND = 1000
"""Lines in which a field is looked for that the first row lacks."""
NUL_SHARE = 0.1
"""Share of zero bytes above which a file is no text; text in UTF-16 has about a half."""
MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""What a text begins with that is in another encoding, and iconv's name of it."""


def read_file(file: TextFile) -> Iterator[TextAndOrigin]:
    """Yield the texts of one file."""
    before, any_row = file.tally.total, False
    try:
        for text in _read(file):
            any_row = True
            yield text
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException, UnicodeDecodeError) as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, PermissionError):
            raise ConfigError(
                f"{file.name} cannot be read: {error.strerror}", f"chmod u+r {shell(file.path)}"
            ) from None
        raise ConfigError(
            f"{file.name} cannot be read: {error}; copy or download it again, or train without it",
            file.without(),
        ) from None
    if not any_row and file.tally.total == before:
        file.tally.add(Reason.NO_ROWS, file.name)


def _read(file: TextFile) -> Iterator[TextAndOrigin]:
    kind, compression = kind_of(file.path)
    _check_packing(file, kind, compression)
    if kind == ".parquet":
        yield from read_columns(file, compression)
        return
    with _open(file.path, compression) as stream:
        begins = _check_text(file, stream)
        if kind in JSON or (kind in LINES and _is_json(begins)):
            yield from json_values(file, stream)
        elif kind in LINES:
            yield from _json_lines(file, stream)
        elif kind in TABLES:
            yield from _table(file, stream, TABLES[kind])
        else:
            yield from _plain(file, stream)


class _Unpacked(io.RawIOBase):
    """A raw stream over the content of a .bz2 or .xz file that reports damage.

    Python's own readers end in silence at a damaged part.
    """

    def __init__(self, raw: IO[bytes], make: Callable[[], Any], padding: bytes = b"") -> None:
        self._raw, self._make, self._padding = raw, make, padding
        self._one: Any = None
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._one is None or self._one.eof:
                rest = (self._one.unused_data if self._one else b"").lstrip(self._padding)
                while not rest:
                    if not (chunk := self._raw.read(CHUNK_BYTES)):
                        return 0
                    rest = chunk.lstrip(self._padding) if self._one else chunk
                self._one = self._make()
            elif self._one.needs_input:
                if not (rest := self._raw.read(CHUNK_BYTES)):
                    raise EOFError("the compressed stream ends too early")
            else:
                rest = b""
            if data := self._one.decompress(rest, len(buffer)):
                buffer[: len(data)] = data
                return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _open(path: Path, compression: str | None) -> io.BufferedReader:
    """Open a file for reading, decompressed."""
    raw = path.open("rb")
    if compression is None:
        return raw
    if compression == "bz2":
        return io.BufferedReader(_Unpacked(raw, bz2.BZ2Decompressor), CHUNK_BYTES)
    if compression == "xz":
        return io.BufferedReader(_Unpacked(raw, lzma.LZMADecompressor, b"\0"), CHUNK_BYTES)
    return io.BufferedReader(pa.input_stream(raw, compression=compression))  # type: ignore[arg-type]


def _check_packing(file: TextFile, kind: str, compression: str | None) -> None:
    """Refuse a file that is compressed otherwise than its name says.

    Raises:
        ConfigError: with the command that writes it as its name says.
    """
    with file.path.open("rb") as raw:
        begins = raw.read(SNIFFED_BYTES)
    packed = packed_as(begins)
    if not begins or packed == compression or (compression and not packed and not is_text(begins)):
        return  # damage is reported where the file is read
    if kind == ".parquet" and compression:
        return
    says = f"compressed with {compression}" if compression else f"a plain {kind}"
    raise ConfigError(
        f"{file.name} is by its name {says}, and by its first bytes "
        + (f"compressed with {packed}" if packed else "not compressed"),
        file.unpacked(packed),
    )


def _check_kind(file: TextFile, begins: bytes) -> None:
    """Refuse what is no plain text by its first bytes.

    Raises:
        ConfigError: with the command that makes it readable, or else takes it out.
    """
    if packed := packed_as(begins):
        raise ConfigError(
            f"{file.name} is compressed twice, within with {packed}",
            file.through(DECOMPRESS[packed]),
        )
    if begins.startswith(PARQUET):
        other = file.path.with_name(f"{file.path.name}.parquet")
        raise ConfigError(
            f"{file.name} is a table of parquet by its first bytes",
            file.replaced(f"mv {shell(file.path)} {shell(other)}", other),
        )
    if what := other_kind(begins):
        raise ConfigError(f"{file.name} is {what} by its first bytes, and no text", file.without())


def _check_text(file: TextFile, stream: io.BufferedReader) -> bytes:
    """Return the first bytes of a file, or refuse it where they are no text in UTF-8."""
    begins = stream.peek(SNIFFED_BYTES)[:SNIFFED_BYTES]
    _check_kind(file, begins)
    encoding = next((name for mark, name in MARKS if begins.startswith(mark)), "")
    nuls = begins.count(0)
    if not encoding and nuls > NUL_SHARE * len(begins):
        odd, even = begins[1::2].count(0), begins[::2].count(0)
        encoding = "UTF-16LE" if even < odd / 8 else "UTF-16BE" if odd < even / 8 else "none"
    if encoding == "none":
        raise ConfigError(
            f"{file.name} is no text: {nuls:,} of its first {len(begins):,} bytes are zero",
            file.without(),
        )
    if encoding:
        evidence = "by its first bytes" if encoding in ("UTF-16", "UTF-32") else "by its zero bytes"
        raise ConfigError(
            f"{file.name} is not UTF-8: it is in {encoding}, {evidence}",
            file.through(f"iconv -f {encoding} -t UTF-8"),
        )
    return begins


def _plain(file: TextFile, stream: io.BufferedReader) -> Iterator[TextAndOrigin]:
    """Yield a file as one document, or the parts between separators, of which one is in memory."""
    limit, separator = text_file.MOST_DOCUMENT_BYTES, file.reading.separator.encode()
    rest, number, before_bytes = b"", 0, 0
    while chunk := stream.read(CHUNK_BYTES if separator else limit + 1):
        parts = (rest + chunk).split(separator) if separator else [rest + chunk]
        rest = parts.pop()
        for part in parts:
            number += 1
            yield _part(file, part, number, before_bytes)
            before_bytes += len(part) + len(separator)
        if len(rest) > limit:
            where = f"{file.name}:{number + 1}" if number else file.name
            raise file.too_large(where, _cut(file))
    if rest or not number:
        yield _part(file, rest, number + 1 if number else 0, before_bytes)


def _part(file: TextFile, raw: bytes, number: int, before_bytes: int) -> TextAndOrigin:
    origin = f"{file.name}:{number}" if number else file.name
    text = file.decoded(raw, origin, before_bytes)
    text = text if number > 1 else text.removeprefix("\ufeff")
    return plain(text) if file.reading.chat else text, origin


def _cut(file: TextFile) -> str:
    """Return the command that cuts a plain text at lines into files of 64 MiB in a folder."""
    folder, compression = file.path.parent / f"{file.path.name}.cut", kind_of(file.path)[1]
    unpack = DECOMPRESS[compression] if compression else "cat"
    command = (
        f"mkdir {shell(folder)} && {unpack} < {shell(file.path)} | split -C 64M "
        f"--additional-suffix=.txt - {shell(folder)}/"
    )
    return file.replaced(command if file.asked else f"{command} && {file.aside()}", folder)


def _is_json(begins: bytes) -> bool:
    """Return whether a file of lines is in truth one array, or objects over several lines."""
    text = begins.removeprefix(codecs.BOM_UTF8).lstrip()
    return text.startswith(b"[") or bool(re.match(rb"\{\s*\n", text))


def _lines(file: TextFile, stream: io.BufferedReader) -> Iterator[str]:
    """Yield the lines of a file as text, without the mark before the first."""
    offset_bytes, limit = 0, text_file.MOST_DOCUMENT_BYTES
    for number, raw in enumerate(iter(partial(stream.readline, limit + 1), b""), 1):
        if len(raw) > limit:
            raise file.too_large(f"{file.name}:{number}", file.without_lines(number))
        line = file.decoded(raw, f"{file.name}:{number}", offset_bytes)
        offset_bytes += len(raw)
        yield line.removeprefix("\ufeff") if number == 1 else line


def _table(file: TextFile, stream: io.BufferedReader, delimiter: str) -> Iterator[TextAndOrigin]:
    """Yield the rows of a .csv or .tsv file; its first row names the fields."""
    # An old Macintosh ends lines in \r alone, which the library takes for a mistake.
    lines = (part for line in _lines(file, stream) for part in re.split("(?<=\r)(?!\n)", line))
    rows = csv.reader(filter(None, lines), delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(1 << 31)  # a text may be longer than the library's 128 KiB
    begins = 1
    try:
        header = next(rows, [])
        _check_header(file, header, delimiter)
        for key in file.reading.keys:
            if key not in header:
                raise no_field(key, file.reading, header, header, file.name, file.without)
        places, begins = {key: header.index(key) for key in file.reading.keys}, rows.line_num + 1
        for number, row in enumerate(rows, 2):
            if row and len(row) != len(header):
                raise ConfigError(
                    f"{file.name}: row {number} at line {begins} has {len(row)} fields, its header "
                    f"{len(header)}",
                    file.without_lines(begins, rows.line_num),
                )
            if row:
                if file.column is not None:
                    file.column.note(dict(zip(header, row, strict=True)))
                origin = f"{file.name}:{number}"
                fields = {key: row[place] for key, place in places.items()}
                text = file.reading.join(fields) if file.reading.chat is None else None
                if file.reading.chat is not None:
                    named = dict(zip(header, row, strict=True))
                    text = file.reading.chat.text_of(named, origin, file.without)
                yield text, origin
            else:
                file.tally.add(Reason.BLANK_LINE, f"{file.name}:{number}")
            begins = rows.line_num + 1
    except csv.Error as error:
        raise ConfigError(
            f"{file.name}: what begins at line {begins} is no row of a table: {error}",
            file.without_lines(begins) if begins > 1 else file.without(),
        ) from None
    finally:
        csv.field_size_limit(limit)


def _check_header(file: TextFile, header: list[str], delimiter: str) -> None:
    """Refuse a table whose columns are cut by another sign, or whose text is in two columns."""
    other = next((sign for sign in ";\t|," if len(header) == 1 and sign in header[0]), "")
    if other and {*file.reading.keys} <= {*header[0].split(other)}:
        script = (
            f"import csv, sys; csv.field_size_limit(1 << 31); r = csv.reader(sys.stdin, "
            f"delimiter={other!r}); csv.writer(sys.stdout, delimiter={delimiter!r}).writerows(r)"
        )
        raise ConfigError(
            f"{file.name} has no {delimiter!r} between its columns, but {other!r}",
            file.through(python(script)),
        )
    for key in file.reading.keys:
        if (count := header.count(key)) > 1:
            first = header.index(key)
            names = delimiter.join([*header[:first], f"{key}_1", *header[first + 1 :]])
            raise ConfigError(
                f"{file.name} has {count} columns {key!r}; the command gives the first another "
                "name",
                file.through(f"sed {shlex.quote(f'1c {names}')}"),
            )


def _json_lines(file: TextFile, stream: io.BufferedReader) -> Iterator[TextAndOrigin]:
    """Yield the rows of JSON lines.

    Several values on a line are as many rows: an old Macintosh ends lines in a carriage return
    alone, and some writers end none. What files that were put together have before a line is none
    of it: a mark of UTF-8, or the sign with which a JSON text sequence begins a record.
    """
    reading, earlier = file.reading, False
    parts, made = [part for key in reading.keys for part in key.split(".")], once(*reading.keys)
    lines = enumerate(_lines(file, stream), 1)
    for number, line in lines:
        origin = f"{file.name}:{number}"
        line = line.lstrip("\ufeff\x1e")
        if not line.strip():
            file.tally.add(Reason.BLANK_LINE, origin)
            continue
        try:
            repeated = any(line.count(f'"{part}"') > 1 for part in parts)
            rows = _values(line, made if repeated else None)
        except (ValueError, RecursionError) as error:
            syntax = isinstance(error, json.JSONDecodeError)
            raise ConfigError(
                f"{origin} is not JSON: {fault(error)} at column {error.colno}"
                if syntax
                else f"{origin} is not JSON that can be read: {error}",
                _without_row(file, number, line),
            ) from None
        for row in rows:
            key = reading.lacking(row) if isinstance(row, dict) else None
            if key is not None and (earlier or _follows(file, lines)):
                out, where = _without_row(file, number, line), "before" if earlier else "behind"
                raise lacks(key, row, origin, out, where)
            remedy = partial(_without_row, file, number, line)
            yield file.text_of(row, origin, remedy), origin
            earlier = True


def _values(line: str, made: Callable[[Any], Any] | None) -> list[Any]:
    """Return the JSON values on a line, mostly one.

    Raises:
        ValueError, RecursionError: it is no JSON.
    """
    try:
        return [json.loads(line, object_pairs_hook=made)]
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
    decoder, values, at = json.JSONDecoder(object_pairs_hook=made), [], 0
    while token := NO_SPACE.search(line, at):
        value, at = decoder.raw_decode(line, token.start())
        values.append(value)
    return values


def _without_row(file: TextFile, number: int, line: str) -> str:
    """Return the command that takes a line out, or that splits a line which holds many."""
    if "\r" in line.rstrip("\r\n"):
        return file.through("tr '\\r' '\\n'")
    return file.without_lines(number)


def _follows(file: TextFile, lines: Iterable[tuple[int, str]]) -> bool:
    """Return whether one of the next lines has the fields."""
    for _, line in islice(lines, LOOKED_BEHIND):
        try:
            if any(file.reading.lacking(row) is None for row in _values(line, None)):
                return True
        except (ValueError, RecursionError):
            continue
    return False
