"""Text in: whatever the user points at becomes one stream of documents.

A source is a file, a folder, a glob, `stdlib` or `hf:NAME`. Everything is read lazily and in a
fixed order, so that preparing twice gives the same tokens. A .txt, .md or .py file is one document
(read whole); .jsonl, .ndjson, .csv, .tsv and .parquet give one document a row and are streamed.
Compression is undone by pyarrow (gzip, zstd) or the standard library (bz2, xz); a stream that ends
too early is reported. Hugging Face datasets are streamed; loading scripts never run (from
`datasets` 4 on they do not even exist).

`stdlib` is the Python standard library's own sources without its tests: about 12 MB of real text
that is on every machine, so that the first run needs no download.
"""

import bz2
import csv
import hashlib
import io
import json
import lzma
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.core.errors import (
    ConfigError,
    HeadraceError,
    RunError,
    UnsupportedError,
    is_out_of_memory,
    nearest,
)
from headrace.data.left_out import Reason, Tally, printable
from headrace.data.listing import LINES, TABLES, kind_of, list_files


class Document(NamedTuple):
    """One text and where it came from: `path.txt`, or `path.jsonl:17` for a line or row."""

    text: str
    origin: str


Found = tuple[str | None, str]
"""(A row's text or its null, where it came from)."""


def read_documents(
    source: str, *, text_key: str = "text", left_out: Tally | None = None
) -> Iterator[Document]:
    """Every non-empty document of a source, in a fixed order.

    Args:
        source: file, folder (recursive), glob, `stdlib` or `hf:PATH_OR_NAME[:CONFIG][@SPLIT]`.
        text_key: the field that holds the text in .jsonl, .parquet and hf: sources.
        left_out: counts what gives no document, by reason.

    Raises:
        ConfigError: nothing there, nothing readable, or a damaged or unexpected file.
        UnsupportedError: an `hf:` source without the `datasets` package.
    """
    tally = Tally() if left_out is None or source == "stdlib" else left_out
    if source.startswith("hf:"):
        found = _hugging_face(source, text_key)
    else:
        files = list_files(source, tally)
        found = (d for name, path in files for d in _read(path, printable(name), text_key, tally))
    for text, origin in found:
        if not text:
            tally.add(Reason.NULL_TEXT if text is None else Reason.EMPTY_TEXT, origin)
            continue
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair; UTF-8 cannot
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            tally.add(Reason.HALF_CHARACTER, origin)
        yield Document(text, origin)


def source_signature(source: str, left_out: Tally | None = None) -> str:
    """A cheap sha256 of what a source holds now: names, sizes and modification times.

    Good enough to name a cache; the prepared shards carry hashes of their content. `left_out`
    counts the files that are none of it.
    """
    tally = Tally() if left_out is None else left_out
    digest = hashlib.sha256()
    path = Path(_parse_hf(source)[0]) if source.startswith("hf:") else None
    if path is None or path.exists():
        files = list_files(str(path) if path else source, tally)
        for name, file in files:
            stat = file.stat()
            digest.update(os.fsencode(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n"))
    if path:
        digest.update(os.fsencode(source))
    return digest.hexdigest()


def _read(path: Path, name: str, text_key: str, tally: Tally) -> Iterator[Found]:
    """The texts of one file."""
    kind, compression = kind_of(path)
    try:
        if kind == ".parquet":
            yield from _parquet(path, name, text_key)
            return
        with _open(path, compression) as stream:
            if kind in LINES:
                yield from _json_lines(stream, name, text_key, tally)
            elif kind in TABLES:
                yield from _table(stream, name, text_key, TABLES[kind], tally)
            else:
                yield _decode(stream.read(), name).removeprefix("\ufeff"), name
    except UnicodeDecodeError as error:  # of a column whose writer did not check it
        raise ConfigError(
            f"{name} is not UTF-8 in its column {text_key!r}: {error}",
            "write the file again as UTF-8, or leave it out of data.sources",
        ) from None
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{name} cannot be read: {error}",
            "copy or download the file again, or leave it out of data.sources",
        ) from None


def _open(path: Path, compression: str | None) -> IO[bytes]:
    """Open a file for reading, decompressed."""
    if compression == "xz":
        return lzma.open(path)
    if compression == "bz2":
        return bz2.open(path)
    raw = path.open("rb")
    if compression is None:
        return raw
    return io.BufferedReader(pa.input_stream(raw, compression=compression))  # type: ignore[arg-type]


def _table(
    stream: Iterable[bytes], name: str, text_key: str, delimiter: str, tally: Tally
) -> Iterator[Found]:
    """Yield the rows of a .csv or .tsv file; its first row names the fields."""
    rows = csv.reader(_decoded(stream, name), delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(1 << 31)  # a text may be longer than the library's 128 KiB
    try:
        header = [field.removeprefix("\ufeff") for field in next(rows, [])]
        if text_key not in header:
            raise _no_key(text_key, header, name)
        place = header.index(text_key)
        for number, row in enumerate(rows, 2):
            if row and len(row) != len(header):
                raise ConfigError(
                    f"{name}: row {number} has {len(row)} fields, its header {len(header)}",
                    f"quote the fields of row {number}, or leave it out",
                )
            if row:
                yield row[place], f"{name}:{number}"
            else:
                tally.add(Reason.BLANK_LINE, f"{name}:{number}")
    except csv.Error as error:
        raise ConfigError(
            f"{name}: line {rows.line_num} is no row of a table: {error}", f"leave {name} out"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _decoded(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a file as text."""
    offset_bytes = 0
    for number, raw in enumerate(stream, 1):
        yield _decode(raw, f"{name}:{number}", offset_bytes, name)
        offset_bytes += len(raw)


def _decode(raw: bytes, name: str, before_bytes: int = 0, file: str = "") -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        offset = before_bytes + error.start
        raise ConfigError(
            f"{name} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset:,}",
            f"iconv -f LATIN1 -t UTF-8 {file or name} > FILE (with the encoding that it has)",
        ) from None


def _json_lines(stream: Iterable[bytes], name: str, text_key: str, tally: Tally) -> Iterator[Found]:
    offset_bytes, earlier = 0, False
    for number, raw in enumerate(stream, 1):
        origin = f"{name}:{number}"
        line = _decode(raw, origin, offset_bytes, name)
        line = line.removeprefix("\ufeff") if number == 1 else line
        offset_bytes += len(raw)
        if not line.strip():
            tally.add(Reason.BLANK_LINE, origin)
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{origin} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            ) from None
        except (ValueError, RecursionError) as error:  # a number or a nesting without end
            raise ConfigError(f"{origin} is not JSON that can be read: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{origin} is a JSON {type(row).__name__}, not an object with fields")
        if earlier and text_key not in row:
            told = _no_key(text_key, row, origin).message
            raise ConfigError(f"{told}; lines before it have one", f"leave {origin} out")
        earlier = True
        yield _text(row, text_key, origin), origin


def _parquet(path: Path, name: str, text_key: str) -> Iterator[Found]:
    with path.open("rb") as raw, pq.ParquetFile(raw) as file:
        names = file.schema_arrow.names
        if text_key not in names:
            raise _no_key(text_key, names, name)
        number = 0
        for batch in file.iter_batches(columns=[text_key], batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield _text(row, text_key, f"{name}:{number}"), f"{name}:{number}"


def _text(row: dict[str, Any], text_key: str, origin: str) -> str | None:
    """The text of a row, or its null."""
    if text_key not in row:
        raise _no_key(text_key, row, origin)
    text = row[text_key]
    if not isinstance(text, str | None):
        others = [str(key) for key, value in row.items() if isinstance(value, str)]
        raise ConfigError(
            f"{origin}: the field {text_key!r} holds {type(text).__name__}, not text",
            f"data.text_key={others[0]}" if len(others) == 1
            else f"data.text_key=KEY, one of {', '.join(others)}" if others
            else f"leave {origin} out, or write its {text_key!r} as text",
        )  # fmt: skip
    return text


def _no_key(text_key: str, names: Iterable[str], origin: str) -> ConfigError:
    names = [str(name) for name in names]
    close = nearest(text_key, names)
    return ConfigError(
        f"{origin} has no field {text_key!r}; its fields are {', '.join(names) or 'none'}",
        f"data.text_key={close if close in names else 'KEY'}",
    )


def _parse_hf(source: str) -> tuple[str, str | None, str]:
    """`hf:PATH_OR_NAME[:CONFIG][@SPLIT]` as (path or name, config, split)."""
    rest, _, split = source.removeprefix("hf:").partition("@")
    name, _, config = rest.partition(":")
    if not name:
        raise ConfigError(f"data.sources = {source!r} names no dataset", "hf:NAME[:CONFIG][@SPLIT]")
    return name, config or None, split or "train"


def _hugging_face(source: str, text_key: str) -> Iterator[Found]:
    """Rows of a dataset by name or local path, streamed."""
    name, config, split = _parse_hf(source)
    try:
        import datasets
    except ImportError:
        raise UnsupportedError(
            f"data.sources = {source!r} needs the package `datasets`, which is not installed",
            "pip install 'headrace[hf]'",
        ) from None
    options: dict[str, Any] = {"split": split, "streaming": True}
    try:
        if Path(name).is_file():
            kind = "parquet" if kind_of(Path(name))[0] == ".parquet" else "json"
            rows = datasets.load_dataset(kind, data_files=name, **options)
        else:
            rows = datasets.load_dataset(name, config, **options)
    except Exception as error:  # the library raises a dozen kinds, most of them for a wrong name
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"data.sources = {source!r} cannot be opened: {error}",
            "check name, config and split: hf:NAME[:CONFIG][@SPLIT]",
        ) from None
    number = 0
    try:
        for row in rows:
            number += 1
            origin = f"{source}:{number}"
            yield _text(row, text_key, origin), origin
    except OSError as error:
        if is_out_of_memory(error):
            raise
        raise RunError(
            f"{source} broke off after row {number:,}: {error}", "the same command again"
        ) from None
    except HeadraceError:
        raise
    except Exception as error:  # as many kinds as there are formats
        if is_out_of_memory(error):
            raise
        told = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(
            f"{source} cannot be read after row {number:,}: {told}",
            "mend that row, or leave the source out of data.sources",
        ) from None
