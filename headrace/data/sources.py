"""Read text in: whatever the user points at becomes one stream of documents.

A source is a file, a folder, a glob, an address in an object store, `stdlib` or `hf:NAME`.
Everything is read lazily and in a fixed order, so that preparing twice gives the same tokens. A
.txt, .md or .py file is one document (read whole); .jsonl, .ndjson, .json, .csv, .tsv and .parquet
give one document a row and are streamed. Compression is undone by pyarrow (gzip, zstd) or the
standard library (bz2, xz); a stream that ends too early is reported. Hugging Face datasets are
streamed; loading scripts never run (from `datasets` 4 on they do not even exist).

`stdlib` is the Python standard library's own sources without its tests: about 12 MB of real text
that is on every machine, so that the first run needs no download.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.errors import (
    ConfigError,
    HeadraceError,
    RunError,
    UnsupportedError,
    is_out_of_memory,
)
from headrace.core.files import in_one_line, printable
from headrace.data.fields import TextReading, text_of
from headrace.data.formats import read_file
from headrace.data.left_out import LeftOutTally, Reason
from headrace.data.listing import READABLE, Asked, kind_of, list_files
from headrace.data.number_column import NumberColumn
from headrace.data.remote import RemoteFile, fetched, is_remote, list_remote
from headrace.data.repeated import Seen
from headrace.data.text_file import TextAndOrigin, TextFile

SourceFiles = Sequence[tuple[str, Path | RemoteFile]]
"""Files of a source in their order: what is shown of each, and where it lies."""


class Document(NamedTuple):
    """A document is one text and its origin: `path.txt`, or `path.jsonl:17` for a line or row."""

    text: str
    origin: str
    number: float = 0.0
    """What its row says in the field that a `NumberColumn` notes; 0 where none does."""


def read_documents(
    named: str | Asked,
    *,
    reading: TextReading | None = None,
    left_out: LeftOutTally | None = None,
    column: NumberColumn | None = None,
    files: SourceFiles | None = None,
) -> Iterator[Document]:
    """Yield every non-empty document of a source, in a fixed order.

    Args:
        named: file, folder (recursive), glob, `stdlib` or `hf:PATH_OR_NAME[:CONFIG][@SPLIT]`.
        reading: how rows and files become texts; by default a row's text is in its field `text`.
        left_out: counts what gives no document, by reason.
        column: notes a number of each row, which its documents have.
        files: those of its files that are read; without it all of them, which are listed now.

    Raises:
        ConfigError: nothing there, nothing readable, or a damaged or unexpected file.
        UnsupportedError: an `hf:` source without the `datasets` package.
    """
    tally = LeftOutTally() if left_out is None else left_out
    for documents in read_by_file(named, reading or TextReading(), tally, column, files):
        yield from documents


def read_by_file(
    named: str | Asked,
    reading: TextReading,
    left_out: LeftOutTally,
    column: NumberColumn | None = None,
    files: SourceFiles | None = None,
) -> Iterator[Iterator[Document]]:
    """Yield the documents of each file of a source, in a fixed order; see `read_documents`.

    A file that is refused ends its own documents, and the next file can still be read.
    """
    asked = Asked(named) if isinstance(named, str) else named
    source = asked.source
    if is_hub(source):
        yield _documents(_hugging_face(asked, reading, column), reading, left_out, column)
        return
    tally = LeftOutTally() if source == "stdlib" else left_out
    files = list_source(asked, tally) if files is None else files
    alone = None if len(files) != 1 else Path(os.path.expanduser(source))
    for name, path in files:
        if isinstance(path, RemoteFile):
            texts = _remote_texts(path, reading, tally, asked, column)
        else:
            own = asked if path == alone else None
            texts = read_file(TextFile(path, printable(name), reading, tally, own, column))
        yield _documents(texts, reading, tally, column)


def is_hub(source: str) -> bool:
    """Return whether a source is a dataset of Hugging Face, and not a file there (`hf://`)."""
    return source.startswith("hf:") and not is_remote(source)


def list_source(asked: Asked, tally: LeftOutTally) -> SourceFiles:
    """Return the files of a source with their names, on this machine or in an object store."""
    if is_remote(asked.source):
        return list_remote(asked, tally)
    return list_files(asked, tally)


def _remote_texts(
    file: RemoteFile,
    reading: TextReading,
    tally: LeftOutTally,
    asked: Asked,
    column: NumberColumn | None,
) -> Iterator[TextAndOrigin]:
    with fetched(file, asked) as copy:
        name = printable(file.url)
        yield from read_file(TextFile(copy, name, reading, tally, asked, column, is_remote=True))


def _documents(
    texts: Iterable[TextAndOrigin],
    reading: TextReading,
    tally: LeftOutTally,
    column: NumberColumn | None,
) -> Iterator[Document]:
    """Yield what is a document of the texts of a file, cut at separators; count what is none."""
    for whole, place in texts:
        row = column.newest() if column else None
        parts = whole.split(reading.separator) if whole and reading.separator else [whole]
        for number, text in enumerate(parts, 1):
            origin = place if len(parts) == 1 else f"{place}#{number}"
            if not text:
                tally.add(Reason.NULL_TEXT if text is None else Reason.EMPTY_TEXT, origin)
                continue
            try:
                if not text.isascii():
                    text.encode()
            except UnicodeEncodeError:  # JSON can spell half of a surrogate pair; UTF-8 cannot
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                tally.add(Reason.HALF_CHARACTER, origin)
            yield Document(text, origin, column.number(row, origin) if column else 0.0)


def source_signature(
    named: str | Asked, left_out: LeftOutTally | None = None, seen: Seen | None = None
) -> str:
    """Return a cheap sha256 of what a source holds now: names, sizes and modification times.

    Good enough to name a cache; the prepared shards carry hashes of their content. `left_out`
    counts the files that are none of it, and `seen` knows those of the sources before.
    """
    asked = Asked(named) if isinstance(named, str) else named
    source = asked.source
    tally = LeftOutTally() if left_out is None or is_hub(source) else left_out
    digest = hashlib.sha256()
    if is_remote(source):
        for name, remote in list_remote(asked, tally):
            digest.update(os.fsencode(f"{name}\0{remote.size}\0{remote.version}\n"))
        return digest.hexdigest()
    path = Path(_parse_hf(source)[0]) if is_hub(source) else None
    if path is None or path.exists():
        files = list_files(replace(asked, source=str(path)) if path else asked, tally)
        for name, file in files:
            try:
                stat = file.stat()
            except FileNotFoundError:
                raise ConfigError(
                    f"{printable(name)} went away while {asked} was read", "the same command again"
                ) from None
            if seen is not None:
                seen.add(source, name, file, stat)
            digest.update(os.fsencode(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n"))
    if path:
        digest.update(os.fsencode(source))
    return digest.hexdigest()


def _parse_hf(source: str) -> tuple[str, str | None, str]:
    """Return the parts of `hf:PATH_OR_NAME[:CONFIG][@SPLIT]` as (path or name, config, split)."""
    rest, _, split = source.removeprefix("hf:").partition("@")
    name, _, config = rest.partition(":")
    if not name:
        message = f"data.sources = {source!r} names no dataset, as hf:NAME[:CONFIG][@SPLIT] does"
        raise ConfigError(message, "data.sources=hf:NAME")
    return name, config or None, split or "train"


def _hugging_face(
    asked: Asked, reading: TextReading, column: NumberColumn | None
) -> Iterator[TextAndOrigin]:
    """Stream the rows of a dataset that a name or a local path gives."""
    source = asked.source
    name, config, split = _parse_hf(source)
    local = Path(name).is_file() and kind_of(Path(name))[0] in READABLE
    try:
        import datasets
    except ImportError:
        raise UnsupportedError(
            f"{asked} needs the package `datasets`, which is not installed",
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
            f"{asked} cannot be opened: {error}",
            asked.to(name if local else "hf:NAME[:CONFIG][@SPLIT]"),
        ) from None
    number = 0
    # A file of a kind that we read has a remedy for its row.
    remedy = asked.to(name) if local else asked.without()
    try:
        for row in rows:
            number += 1
            origin = f"{source}:{number}"
            if column is not None:
                column.note(row)
            yield text_of(row, reading, origin, lambda: remedy), origin
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
        cause = in_one_line(str(error.__cause__ or error))
        raise ConfigError(
            f"{source} cannot be read after row {number:,}: {cause}",
            remedy,
        ) from None
