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
import pyarrow.parquet as pq

from headrace.core.errors import ConfigError, is_out_of_memory
from headrace.core.files import python, shell
from headrace.data.contents import PARQUET, is_text, other_kind, packed_as
from headrace.data.fields import MISSING, find, lacks, no_field, once, top
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
UNPACK = {"gzip": "gzip -d", "zstd": "zstd -d --rm", "bz2": "bzip2 -d", "xz": "xz -d"}
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
        yield from _parquet(file, compression)
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
            yield file.decoded(stream.read(), file.name).removeprefix("\ufeff"), file.name


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


def _is_json(begins: bytes) -> bool:
    """Return whether a file of lines is in truth one array, or objects over several lines."""
    text = begins.removeprefix(codecs.BOM_UTF8).lstrip()
    return text.startswith(b"[") or bool(re.match(rb"\{\s*\n", text))


def _lines(file: TextFile, stream: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a file as text, without the mark before the first."""
    offset_bytes = 0
    for number, raw in enumerate(stream, 1):
        line = file.decoded(raw, f"{file.name}:{number}", offset_bytes)
        offset_bytes += len(raw)
        yield line.removeprefix("\ufeff") if number == 1 else line


def _table(file: TextFile, stream: Iterable[bytes], delimiter: str) -> Iterator[TextAndOrigin]:
    """Yield the rows of a .csv or .tsv file; its first row names the fields."""
    # An old Macintosh ends lines in \r alone, which the library takes for a mistake.
    lines = (part for line in _lines(file, stream) for part in re.split("(?<=\r)(?!\n)", line))
    rows = csv.reader(filter(None, lines), delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(1 << 31)  # a text may be longer than the library's 128 KiB
    begins = 1
    try:
        header = next(rows, [])
        _check_header(file, header, delimiter)
        if file.text_key not in header:
            raise no_field(file.text_key, header, header, file.name, file.without)
        place, begins = header.index(file.text_key), rows.line_num + 1
        for number, row in enumerate(rows, 2):
            if row and len(row) != len(header):
                raise ConfigError(
                    f"{file.name}: row {number} at line {begins} has {len(row)} fields, its header "
                    f"{len(header)}",
                    file.without_lines(begins, rows.line_num),
                )
            if row:
                yield row[place], f"{file.name}:{number}"
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
    if other and file.text_key in header[0].split(other):
        script = (
            f"import csv, sys; csv.field_size_limit(1 << 31); r = csv.reader(sys.stdin, "
            f"delimiter={other!r}); csv.writer(sys.stdout, delimiter={delimiter!r}).writerows(r)"
        )
        raise ConfigError(
            f"{file.name} has no {delimiter!r} between its columns, but {other!r}",
            file.through(python(script)),
        )
    if (count := header.count(file.text_key)) > 1:
        first = header.index(file.text_key)
        names = delimiter.join([*header[:first], f"{file.text_key}_1", *header[first + 1 :]])
        raise ConfigError(
            f"{file.name} has {count} columns {file.text_key!r}; the command gives the first "
            "another name",
            file.through(f"sed {shlex.quote(f'1c {names}')}"),
        )


def _json_lines(file: TextFile, stream: Iterable[bytes]) -> Iterator[TextAndOrigin]:
    """Yield the rows of JSON lines.

    Several values on a line are as many rows: an old Macintosh ends lines in a carriage return
    alone, and some writers end none. What files that were put together have before a line is none
    of it: a mark of UTF-8, or the sign with which a JSON text sequence begins a record.
    """
    earlier, parts, made = False, file.text_key.split("."), once(file.text_key)
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
            lacking = isinstance(row, dict) and find(row, file.text_key) is MISSING
            if lacking and (earlier or _follows(file.text_key, lines)):
                out, where = _without_row(file, number, line), "before" if earlier else "behind"
                raise lacks(file.text_key, row, origin, out, where)
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


def _follows(key: str, lines: Iterable[tuple[int, str]]) -> bool:
    """Return whether one of the next lines has a field."""
    for _, line in islice(lines, LOOKED_BEHIND):
        try:
            if any(find(row, key) is not MISSING for row in _values(line, None)):
                return True
        except (ValueError, RecursionError):
            continue
    return False


def _parquet(file: TextFile, compression: str | None) -> Iterator[TextAndOrigin]:
    if compression:
        raise ConfigError(
            f"{file.name} is compressed as a whole, and parquet is compressed within",
            file.replaced(f"{UNPACK[compression]} {shell(file.path)}", file.path.with_suffix("")),
        )
    with file.path.open("rb") as raw, pq.ParquetFile(raw) as table:
        names = table.schema_arrow.names
        column = top(file.text_key, names)
        if column is None:
            fields = [*_fields(table.schema_arrow)]
            texts = [name for name, kind in fields if _is_text(kind)]
            raise no_field(
                file.text_key, [name for name, _ in fields], texts, file.name, file.without
            )
        if (count := names.count(column)) > 1:
            raise ConfigError(
                f"{file.name} has {count} columns {column!r}; the command numbers the others",
                _numbered(file),
            )
        number = 0
        for batch in table.iter_batches(columns=[column], batch_size=1024):
            if len(batch.schema.names) != 1:  # a name with dots that is also a path in another
                batch = batch.select([column])
            for row in _rows(file, batch, number):
                number += 1
                origin = f"{file.name}:{number}"
                try:
                    yield file.text_of(row, origin, file.without), origin
                except UnicodeDecodeError as error:
                    raise _not_utf_8(file, number, column, error) from None


def _rows(file: TextFile, batch: pa.RecordBatch, before: int) -> list[dict[str, Any]]:
    """Return the rows of a batch.

    Raises:
        ConfigError: a text of it is not UTF-8, which its writer did not check.
    """
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        pass
    for number in range(len(batch)):
        try:
            batch.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            column = batch.schema.names[0]
            raise _not_utf_8(file, before + number + 1, column, error) from None
    raise AssertionError("a batch fails, and none of its rows")


def _not_utf_8(file: TextFile, number: int, column: str, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(
        f"{file.name}: row {number:,} is not UTF-8 in its column {column!r}: byte "
        f"0x{error.object[error.start]:02x} at offset {error.start:,} of the text; the command "
        "replaces such bytes with U+FFFD",
        _replaced(file, column),
    )


def _numbered(file: TextFile) -> str:
    """Return the command that rewrites a parquet file so that every column has its own name."""
    script = (
        "import pyarrow.parquet as pq, sys; t = pq.ParquetFile(sys.argv[1]).read(); "
        "n = t.column_names; m = [x if x not in n[:i] else f'{x}_{i}' for i, x in enumerate(n)]; "
        "pq.write_table(t.rename_columns(m), sys.argv[2])"
    )
    run = python(script, shell(file.kept()), shell(file.path))
    return f"{file.aside()} && {run}"


def _replaced(file: TextFile, column: str) -> str:
    """Return the command that rewrites a parquet file with valid text in a column."""
    script = (
        "import pyarrow as pa, pyarrow.parquet as pq, sys; bad, good, name = sys.argv[1:]; "
        "t = pq.read_table(bad); "
        "texts = [x and x.decode(errors='replace') for x in t[name].cast('binary').to_pylist()]; "
        "t = t.set_column(t.column_names.index(name), name, pa.array(texts, 'string')); "
        "pq.write_table(t, good)"
    )
    run = python(script, shell(file.kept()), shell(file.path), shlex.quote(column))
    return f"{file.aside()} && {run}"


def _fields(fields: Iterable[Any], before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a table with their types, those inside of others dotted."""
    for field in fields:
        name, kind = before + field.name, field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            name, kind = f"{name}.0", kind.value_type
        if pa.types.is_struct(kind) and depth < 4:
            inner = [kind.field(i) for i in range(kind.num_fields)]
            yield from _fields(inner, f"{name}.", depth + 1)
        else:
            yield name, kind


def _is_text(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
