"""Cut the sources into parts: fixed ranges of their files, decided from the listing alone.

Whatever is done to every document is done part by part, and what parts give is merged in their
order. So the result is the same for one process and for many machines. A part holds files of one
source, up to PART_BYTES of them together; a larger file is a part alone, so a corpus for many
workers is written as many files. A dataset of `hf:` is one part.

Every file has its size and its version of when it was listed. One that is another when its part is
read, or after, is an error: no result mixes two states of a source.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.files import printable
from headrace.core.strict import Strict
from headrace.data.fields import TextReading
from headrace.data.left_out import LeftOutTally
from headrace.data.listing import Asked
from headrace.data.number_column import NumberColumn
from headrace.data.remote import RemoteFile, is_remote, look_up
from headrace.data.sources import Document, is_hub, list_source, read_documents

PART_BYTES = 64 << 20
"""Bytes of files that one part holds, as they lie on the disk."""


class SourceFile(Strict):
    """A file of a source as it was listed."""

    name: str
    """What is shown of it."""
    path: str
    """Where it lies: a path, or an address in an object store."""
    size: int
    """Bytes."""
    version: str
    """Time of its last change in nanoseconds, or what an object store gives for it."""

    @property
    def place(self) -> Path | RemoteFile:
        """Return where it lies, as it is read."""
        if is_remote(self.path):
            return RemoteFile(self.path, self.size, self.version)
        return Path(self.path)

    def check(self, asked: Asked) -> None:
        """Refuse the file where it is not what was listed.

        Raises:
            ConfigError: it changed or went away since.
        """
        if (now := _looked_at(self.name, self.place, asked)) != self:
            state = "went away" if now is None else f"has {now.size:,} bytes"
            raise ConfigError(
                f"{printable(self.name)} changed while {asked} was read: it had {self.size:,} "
                f"bytes when it was listed, and {state} now"
                + (", written since" if now and now.size == self.size else ""),
                "the same command again",
            )


class SourcePart(Strict):
    """A part is a range of one source, which one worker reads."""

    source: int
    """Number of the source in the plan."""
    files: tuple[SourceFile, ...] = ()
    """Its files in their order; none where the source is one stream that is no files, as `hf:`."""


def list_parts(sources: Sequence[Asked], left_out: LeftOutTally) -> tuple[SourcePart, ...]:
    """Return the parts of all sources, in the order of the text.

    Args:
        sources: as the plan names them.
        left_out: counts the files that are none of them.

    Raises:
        ConfigError: a source is not there, or holds nothing that can be read.
    """
    parts: list[SourcePart] = []
    for number, asked in enumerate(sources):
        if is_hub(asked.source):
            parts.append(SourcePart(source=number))
            continue
        tally = LeftOutTally() if asked.source == "stdlib" else left_out
        files: list[SourceFile] = []
        size = 0
        for name, place in list_source(asked, tally):
            if (one := _listed(name, place)) is None:
                raise ConfigError(
                    f"{printable(name)} went away while {asked} was listed",
                    "the same command again",
                )
            if files and size + one.size > PART_BYTES:
                parts.append(SourcePart(source=number, files=tuple(files)))
                files, size = [], 0
            files.append(one)
            size += one.size
        parts.append(SourcePart(source=number, files=tuple(files)))
    return tuple(parts)


def _looked_at(name: str, place: Path | RemoteFile, asked: Asked) -> SourceFile | None:
    """Return a file as it is now, or None where it is gone."""
    if isinstance(place, RemoteFile):
        now = look_up(place, asked)
        return None if now is None else _listed(name, now)
    return _listed(name, place)


def _listed(name: str, place: Path | RemoteFile) -> SourceFile | None:
    """Return a file of a listing with its size and version, or None where it is gone."""
    if isinstance(place, RemoteFile):
        return SourceFile(name=name, path=place.url, size=place.size, version=place.version)
    try:
        stat = os.stat(place)
    except FileNotFoundError:
        return None
    return SourceFile(
        name=str(name), path=str(place), size=stat.st_size, version=str(stat.st_mtime_ns)
    )


def read_part(
    part: SourcePart,
    asked: Asked,
    reading: TextReading,
    left_out: LeftOutTally | None = None,
    column: NumberColumn | None = None,
) -> Iterator[Document]:
    """Yield the documents of a part, in their order.

    Args:
        part: what of the source is read.
        asked: the source as the plan names it.
        reading: how rows and files become texts.
        left_out: counts what gives no document.
        column: notes a number of each row, which its documents have.

    Raises:
        ConfigError: a file changed since it was listed, or see `read_documents`.
    """
    if not part.files:
        yield from read_documents(asked, reading=reading, left_out=left_out, column=column)
    for file in part.files:
        file.check(asked)
        yield from read_documents(
            asked,
            reading=reading,
            left_out=left_out,
            column=column,
            files=[(file.name, file.place)],
        )
        file.check(asked)
