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
import glob
import hashlib
import io
import json
import lzma
import shlex
import sysconfig
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

PLAIN = frozenset({".txt", ".md", ".py"})
LINES = frozenset({".jsonl", ".ndjson"})
TABLES = {".csv": ",", ".tsv": "\t"}
READABLE = PLAIN | LINES | {".parquet", *TABLES}
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_NOT_LIBRARY = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


class Document(NamedTuple):
    """One text and where it came from: `path.txt`, or `path.jsonl:17` for a line or row."""

    text: str
    origin: str


def read_documents(source: str, *, text_key: str = "text") -> Iterator[Document]:
    """Every non-empty document of a source, in a fixed order.

    Args:
        source: file, folder (recursive), glob, `stdlib` or `hf:PATH_OR_NAME[:CONFIG][@SPLIT]`.
        text_key: the field that holds the text in .jsonl, .parquet and hf: sources.

    Raises:
        ConfigError: nothing there, nothing readable, or a damaged or unexpected file.
        UnsupportedError: an `hf:` source without the `datasets` package.
    """
    if source.startswith("hf:"):
        documents = _hugging_face(source, text_key)
    else:
        documents = (d for name, path in _listing(source) for d in _read(path, name, text_key))
    return (document for document in documents if document.text)


def source_signature(source: str) -> str:
    """A cheap sha256 of what a source holds now: names, sizes and modification times.

    Good enough to name a cache; the prepared shards carry hashes of their content.
    """
    digest = hashlib.sha256()
    path = Path(_parse_hf(source)[0]) if source.startswith("hf:") else None
    if path is None or path.exists():
        files = _listing(str(path) if path else source)
        for name, file in files:
            stat = file.stat()
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    if path:
        digest.update(source.encode())
    return digest.hexdigest()


def _kind(path: Path) -> tuple[str, str | None]:
    """(suffix without compression, compression), e.g. ('.jsonl', 'gzip')."""
    compression = COMPRESSION.get(path.suffix.lower())
    return Path(path.stem if compression else path.name).suffix.lower(), compression


def _listing(source: str) -> list[tuple[str, Path]]:
    """The readable files of a local source as (name to show, path), sorted."""
    if source == "stdlib":
        return _standard_library()
    if not source:  # which pathlib takes for the current folder
        raise ConfigError("data.sources names an empty path", "data.sources=PATH")
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if _kind(path)[0] not in READABLE:
            raise ConfigError(
                f"data.sources = {source!r} is not a kind of file that can be read; "
                f"the kinds are {' '.join(sorted(READABLE))} (and .gz, .zst, .bz2 or .xz of them)",
            )
        return [(source, path)]
    if glob.has_magic(source):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        files = [p for p in found if p.is_file() and _kind(p)[0] in READABLE]
        if files:
            return [(str(p), p) for p in files]
        raise ConfigError(f"data.sources = {source!r} matches no readable file")
    if path.exists():  # a pipe, a socket, a device: a corpus is read more than once
        raise ConfigError(
            f"data.sources = {source!r} is neither a file nor a folder, and text is read twice",
            f"cat {source} > TEXT.txt, and data.sources=TEXT.txt",
        )
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, siblings) if siblings else ""
    hint = str(path.parent / close) if close in siblings else ""
    raise ConfigError(
        f"data.sources = {source!r} does not exist"
        + (f"; the nearest name there is {hint}" if hint else ""),
        f"data.sources={hint or 'PATH'}",
    )


def _folder(folder: Path) -> list[tuple[str, Path]]:
    """Readable files under a folder; hidden ones and caches are left out."""
    others: set[str] = set()
    files = []
    for path in sorted(_walk(folder, frozenset())):
        inside = path.relative_to(folder).parts
        if any(p.startswith(".") or p == "__pycache__" for p in inside) or not path.is_file():
            continue
        if _kind(path)[0] in READABLE:
            files.append((str(path), path))
        else:
            others.add(path.suffix or path.name)
    if not files:
        found = f"only {' '.join(sorted(others)[:8])}" if others else "no files"
        raise ConfigError(
            f"data.sources = {str(folder)!r} holds {found}; "
            f"the kinds that can be read are {' '.join(sorted(READABLE))}"
        )
    return files


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """Yield what stands under a folder; links to folders are followed, but never in a circle."""
    real = folder.resolve()
    if real in above:
        return
    try:
        inside = list(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"data.sources: the folder {folder} cannot be read: {error.strerror}",
            f"chmod u+rx {shlex.quote(str(folder))}",
        ) from None
    for path in inside:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path, above | {real})
        else:
            yield path


def _standard_library() -> list[tuple[str, Path]]:
    """The interpreter's own .py files, tests and installed packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(p.relative_to(root), p) for p in root.rglob("*.py")]
    kept = [(n.as_posix(), p) for n, p in files if not _NOT_LIBRARY.intersection(n.parts)]
    if not kept:
        raise ConfigError(f"this Python has no library sources under {root}", "data.sources=PATH")
    return sorted(kept)


def _read(path: Path, name: str, text_key: str) -> Iterator[Document]:
    """The documents of one file."""
    kind, compression = _kind(path)
    try:
        if kind == ".parquet":
            yield from _parquet(path, name, text_key)
            return
        with _open(path, compression) as stream:
            if kind in LINES:
                yield from _json_lines(stream, name, text_key)
            elif kind in TABLES:
                yield from _table(stream, name, text_key, TABLES[kind])
            else:
                yield Document(_decode(stream.read(), name).removeprefix("\ufeff"), name)
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
    return io.BufferedReader(pa.input_stream(str(path), compression=compression))  # type: ignore[arg-type]


def _table(stream: Iterable[bytes], name: str, text_key: str, delimiter: str) -> Iterator[Document]:
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
                yield Document(row[place], f"{name}:{number}")
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


def _json_lines(stream: Iterable[bytes], name: str, text_key: str) -> Iterator[Document]:
    offset_bytes, earlier = 0, False
    for number, raw in enumerate(stream, 1):
        origin = f"{name}:{number}"
        line = _decode(raw, origin, offset_bytes, name)
        line = line.removeprefix("\ufeff") if number == 1 else line
        offset_bytes += len(raw)
        if not line.strip():
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
        yield Document(_text(row, text_key, origin), origin)


def _parquet(path: Path, name: str, text_key: str) -> Iterator[Document]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if text_key not in names:
            raise _no_key(text_key, names, name)
        number = 0
        for batch in file.iter_batches(columns=[text_key], batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield Document(_text(row, text_key, f"{name}:{number}"), f"{name}:{number}")


def _text(row: dict[str, Any], text_key: str, origin: str) -> str:
    """The text of a row; a null is an empty document, which nobody sees."""
    if text_key not in row:
        raise _no_key(text_key, row, origin)
    text = row[text_key]
    if text is None:
        return ""
    if not isinstance(text, str):
        others = [str(key) for key, value in row.items() if isinstance(value, str)]
        raise ConfigError(
            f"{origin}: the field {text_key!r} holds {type(text).__name__}, not text",
            f"data.text_key={others[0]}" if len(others) == 1
            else f"data.text_key=KEY, one of {', '.join(others)}" if others
            else f"leave {origin} out, or write its {text_key!r} as text",
        )  # fmt: skip
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair; UTF-8 cannot
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
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


def _hugging_face(source: str, text_key: str) -> Iterator[Document]:
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
            kind = "parquet" if _kind(Path(name))[0] == ".parquet" else "json"
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
            yield Document(_text(row, text_key, origin), origin)
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
