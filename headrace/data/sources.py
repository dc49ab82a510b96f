"""Read text in: whatever the user points at becomes one stream of documents.

A source is a file, a folder, a glob, `stdlib` or `hf:NAME`. Everything is read lazily and in a
fixed order, so that preparing twice gives the same tokens. A .txt, .md or .py file is one document
(read whole); .jsonl, .ndjson, .json, .csv, .tsv and .parquet give one document a row and are
streamed. Compression is undone by pyarrow (gzip, zstd) or the standard library (bz2, xz); a stream
that ends too early is reported. Hugging Face datasets are streamed; loading scripts never run (from
`datasets` 4 on they do not even exist).

`stdlib` is the Python standard library's own sources without its tests: about 12 MB of real text
that is on every machine, so that the first run needs no download.
"""

import hashlib
import os
from collections.abc import Iterator
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
from headrace.core.files import printable
from headrace.data.fields import text_of
from headrace.data.formats import read_file
from headrace.data.left_out import LeftOutTally, Reason
from headrace.data.listing import READABLE, Asked, kind_of, list_files
from headrace.data.repeated import Seen
from headrace.data.text_file import TextAndOrigin, TextFile


class Document(NamedTuple):
    """A document is one text and its origin: `path.txt`, or `path.jsonl:17` for a line or row."""

    text: str
    origin: str


def read_documents(
    named: str | Asked, *, text_key: str = "text", left_out: LeftOutTally | None = None
) -> Iterator[Document]:
    """Yield every non-empty document of a source, in a fixed order.

    Args:
        named: file, folder (recursive), glob, `stdlib` or `hf:PATH_OR_NAME[:CONFIG][@SPLIT]`.
        text_key: the field that holds the text in .jsonl, .parquet and hf: sources.
        left_out: counts what gives no document, by reason.

    Raises:
        ConfigError: nothing there, nothing readable, or a damaged or unexpected file.
        UnsupportedError: an `hf:` source without the `datasets` package.
    """
    asked = Asked(named) if isinstance(named, str) else named
    source = asked.source
    tally = LeftOutTally() if left_out is None or source == "stdlib" else left_out
    if source.startswith("hf:"):
        texts = _hugging_face(asked, text_key)
    else:
        files = list_files(asked, tally)
        alone = None if len(files) != 1 else Path(os.path.expanduser(source))
        texts = (
            row
            for name, path in files
            for row in read_file(
                TextFile(path, printable(name), text_key, tally, asked if path == alone else None)
            )
        )
    for text, origin in texts:
        if not text:
            tally.add(Reason.NULL_TEXT if text is None else Reason.EMPTY_TEXT, origin)
            continue
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair; UTF-8 cannot
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            tally.add(Reason.HALF_CHARACTER, origin)
        yield Document(text, origin)


def source_signature(
    named: str | Asked, left_out: LeftOutTally | None = None, seen: Seen | None = None
) -> str:
    """Return a cheap sha256 of what a source holds now: names, sizes and modification times.

    Good enough to name a cache; the prepared shards carry hashes of their content. `left_out`
    counts the files that are none of it, and `seen` knows those of the sources before.
    """
    asked = Asked(named) if isinstance(named, str) else named
    source = asked.source
    tally = LeftOutTally() if left_out is None or source.startswith("hf:") else left_out
    digest = hashlib.sha256()
    path = Path(_parse_hf(source)[0]) if source.startswith("hf:") else None
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


def _hugging_face(asked: Asked, text_key: str) -> Iterator[TextAndOrigin]:
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
            yield text_of(row, text_key, origin, lambda: remedy), origin
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
        cause = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(
            f"{source} cannot be read after row {number:,}: {cause}",
            remedy,
        ) from None
