"""Files that are read twice, as two sources name them or one holds a copy: the user is told.

They are read as often as they are named, for listing a source twice may be meant, to have more of
it. A file is the same by its place on the disk, whatever names and links lead there, or by its
bytes. Bytes are compared only between files of one size, their beginnings first: nothing else is
read, so ten thousand files of one size cost ten thousand beginnings.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from headrace.data.left_out import LeftOutTally, Reason

HEAD_BYTES = 1 << 12
"""Bytes at the beginning of two files that are compared before all of them are."""

Content = tuple[int] | tuple[int, bytes] | tuple[int, bytes, bytes]
"""(Size, digest of the beginning, digest of all bytes), as far as it is known."""


class Seen:
    """The files of the sources that were listed so far."""

    def __init__(self, tally: LeftOutTally) -> None:
        self._tally = tally
        self._places: dict[tuple[int, int], str] = {}
        self._first: dict[Content, tuple[Path, str] | None] = {}
        """The first file of a content and its source; None where more of it tells them apart."""

    def add(self, source: str, name: str, file: Path, stat: os.stat_result) -> None:
        """Count a file of a source, if another source has it, or this one under another name.

        Args:
            source: which is listed.
            name: of the file, to be shown.
            file: its path.
            stat: what the system tells of it.
        """
        before = self._places.setdefault((stat.st_dev, stat.st_ino), source)
        if before == source:
            before = self._source_of_equal(file, source, stat.st_size)
        if before is not None and not before == source == "stdlib":
            self._tally.add(Reason.COPY if before == source else Reason.READ_TWICE, name)

    def _source_of_equal(self, file: Path, source: str, size: int) -> str | None:
        """Return the source that first had a file of these bytes, or None for a new one."""
        content: Content = (size,)
        while content in self._first:
            first = self._first[content]
            if len(content) == 3:
                return None if first is None else first[1]
            try:
                own = _further(file, content)
            except OSError:  # whoever reads it as text says why
                return None
            if first is not None:
                with suppress(OSError):
                    self._first[_further(first[0], content)] = first
                self._first[content] = None
            content = own
        self._first[content] = file, source
        return None


def _further(file: Path, content: Content) -> Content:
    """Return a content with the digest of a further part of a file."""
    with file.open("rb") as opened:
        if len(content) == 1:
            return (*content, hashlib.sha256(opened.read(HEAD_BYTES)).digest())
        size, head = content[:2]
        return size, head, hashlib.file_digest(opened, "sha256").digest()
