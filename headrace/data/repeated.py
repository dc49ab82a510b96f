"""Files that two sources name: they are read twice, and whoever trains on them is told.

Listing a source twice may be meant, to have more of it, so it is not refused. A file is the same by
its place on the disk, whatever names and links lead there, or by its bytes. Bytes are compared only
between files of one size, their beginnings first: nothing else is read.
"""

import hashlib
import os
from pathlib import Path

from headrace.data.left_out import LeftOutTally, Reason

HEAD_BYTES = 2**16
"""Bytes at the beginning of two files that are compared before all of them are."""


class Seen:
    """The files of the sources that were listed so far."""

    def __init__(self, tally: LeftOutTally) -> None:
        self._tally = tally
        self._places: dict[tuple[int, int], str] = {}
        self._sizes: dict[int, list[tuple[Path, str]]] = {}
        self._digests: dict[tuple[Path, int | None], bytes] = {}

    def add(self, source: str, name: str, file: Path, stat: os.stat_result) -> None:
        """Count a file of a source, if another source has it.

        Args:
            source: which is listed.
            name: of the file, to be shown.
            file: its path.
            stat: what the system tells of it.
        """
        place = stat.st_dev, stat.st_ino
        other = self._places.setdefault(place, source) != source
        alike = self._sizes.setdefault(stat.st_size, [])
        if other or any(source != before and self._are_alike(path, file) for path, before in alike):
            self._tally.add(Reason.READ_TWICE, name)
        else:
            alike.append((file, source))

    def _are_alike(self, one: Path, other: Path) -> bool:
        """Return whether two files of one size hold the same bytes; unreadable files differ."""
        try:
            return all(
                self._digest(one, bytes) == self._digest(other, bytes)
                for bytes in (HEAD_BYTES, None)
            )
        except OSError:  # whoever reads it as text says why
            return False

    def _digest(self, file: Path, bytes: int | None) -> bytes:
        """Return the digest of the first `bytes` bytes of a file, or of all where it is None."""
        key = file, bytes
        if key not in self._digests:
            with file.open("rb") as opened:
                self._digests[key] = (
                    hashlib.file_digest(opened, "sha256").digest()
                    if bytes is None
                    else hashlib.sha256(opened.read(bytes)).digest()
                )
        return self._digests[key]
