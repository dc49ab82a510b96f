"""Keep what a teacher says of the training text on disk: its K likeliest tokens at each place.

A row of training (rows.py) becomes one record: the ids of the K tokens that the teacher finds
likeliest after each of its T inputs, their log-probabilities, and the logarithm of what all other
tokens have together. Records have one size, so a row is found by a multiplication. They lie beside
the tokens in a folder `teacher-DIGEST`, where the digest is made of the teacher's weights, the
shards, how rows are made of them, K, the temperature and the arithmetic: another of these is
another folder. A record also holds a hash of its row's tokens, which is compared whenever it is
read.

Records are written in parts, each whole or not there, and the manifest last. Writing that was
interrupted goes on with the parts that are missing. Bytes a token: K x (2 or 4 + 4) + 4, with ids
of 2 bytes for a vocabulary of up to 65,536 entries.

T: sequence length. K: tokens kept of each place.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import MALFORMED, ConfigError, RunError, UnsupportedError
from headrace.core.files import hold_lock, sha256_of, shell, write_whole
from headrace.core.remedy import mend
from headrace.core.units import format_bytes
from headrace.data.rows import Row

RULE = 1
"""Version of the format; a folder of another version is not read."""
IDS, LOGS = "teacher_ids", "teacher_logs"
"""What a row says of its teacher by these names: ids int32 [T, K], and log-probabilities fp32
[T, K + 1], of which the last is that of all other tokens together."""
PART_BYTES = 64 << 20
"""Most bytes of a part; a part has at least one row."""
VERIFY_BYTES = 1 << 30
"""Folders up to this size are compared with their hashes when they are opened."""
MANIFEST = "manifest.json"
Unit = tuple[int, int]
"""A row of training: the number of its source, and its number within that."""
ReadRows = Callable[[Sequence[Unit]], np.ndarray]
"""(rows) -> their records, as the teacher reads them."""


class TeacherShards:
    """The records of one teacher, text and K; they can be read from several threads.

    Args:
        beside: the folder of the tokens.
        facts: all that decides what a record holds, as JSON values.
        units: rows of each source.
        length: T.
        top_k: K.
        vocab: entries of the vocabulary.
    """

    def __init__(
        self,
        beside: Path,
        facts: Mapping[str, Any],
        units: Sequence[int],
        *,
        length: int,
        top_k: int,
        vocab: int,
    ) -> None:
        self.facts = {"rule": RULE, "top_k": top_k, "length": length, "units": [*units], **facts}
        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()
        self.folder = beside / f"teacher-{digest[:12]}"
        self.length, self.top_k, self.vocab = length, top_k, vocab
        self.firsts = np.cumsum([0, *units])
        """Rows of all sources before each, and the number of all rows."""
        self.record = self._record_of(top_k)
        self._rows_of_part = max(1, PART_BYTES // self.record.itemsize)

    def _record_of(self, top_k: int) -> np.dtype:
        """Return the type of a record, without gaps."""
        ids = "<u2" if self.vocab <= 1 << 16 else "<u4"
        shape = self.length, top_k
        fields = [("row", "<u8"), ("ids", ids, shape), ("logs", "<f4", shape)]
        return np.dtype([*fields, ("rest", "<f4", (self.length,))])

    @property
    def rows(self) -> int:
        """Return the number of records."""
        return int(self.firsts[-1])

    @property
    def bytes(self) -> int:
        """Return the size of all records."""
        return self.rows * self.record.itemsize

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return -(-self.rows // self._rows_of_part)

    @property
    def line(self) -> str:
        """Return in words what they take."""
        each = self.record.itemsize / self.length
        tokens = self.rows * self.length
        return (
            f"the teacher's {self.top_k} likeliest tokens of each place: {each:.0f} bytes a token, "
            f"{format_bytes(self.bytes)} for {tokens:,} tokens in {self.folder}"
        )

    def is_written(self) -> bool:
        """Return whether all is there, with the sizes and hashes that the manifest says.

        Raises:
            ConfigError: a part is not as it was written.
        """
        file = self.folder / MANIFEST
        if not file.is_file():
            return False
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            digests = [str(digest) for digest in manifest["parts"]]
            known = manifest["facts"] == self.facts and len(digests) == self.parts
        except MALFORMED:
            known, digests = False, []
        damaged = [] if known else [MANIFEST]
        for part, digest in enumerate(digests if known else ()):
            path = self._path(part)
            right = path.is_file() and path.stat().st_size == self._bytes_of(part)
            if right and self.bytes <= VERIFY_BYTES:
                right = sha256_of(path) == digest
            damaged += [] if right else [path.name]
        if damaged:
            raise ConfigError(
                f"{self.folder} is damaged: {damaged[0]} is not as it was written",
                f"rm -r {shell(self.folder)}, and the same command: the teacher reads the text "
                "again",
            )
        return True

    def check_room(self) -> None:
        """Refuse what the disk has no room for.

        Raises:
            UnsupportedError: with both sizes, and the largest K that fits.
        """
        there = sum(self._bytes_of(part) for part in range(self.parts) if self._is_there(part))
        free = shutil.disk_usage(self.folder.parent).free
        if self.bytes - there <= free:
            return
        each = self._record_of(1).itemsize - (none := self._record_of(0).itemsize)
        fits = int((free / self.rows - none) // each)
        other = "data.directory=FOLDER on another disk"
        least = mend(f"techniques.distillation.top_k={fits}")
        raise UnsupportedError(
            f"{self.line}, and {format_bytes(free)} are free there",
            least.otherwise(other) if fits > 0 else other,
        )

    def write(self, read: ReadRows, progress: Callable[[int, int], None]) -> None:
        """Write the parts that are missing, and the manifest.

        Args:
            read: asks the teacher.
            progress: called with rows that are done, and all rows.

        Raises:
            ConfigError: the file system has no locks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = hold_lock(self.folder / ".lock", wait=True, key="data.directory")
        try:
            if self.is_written():  # another process has, while this one waited
                return
            for part in range(self.parts):
                first, last = self._rows_in(part)
                if not self._is_there(part):
                    rows = [self._unit(row) for row in range(first, last)]
                    write_whole(self._path(part), read(rows).tobytes())
                progress(last, self.rows)
            digests = [sha256_of(self._path(part)) for part in range(self.parts)]
            manifest = json.dumps({"facts": self.facts, "parts": digests}, indent=1)
            write_whole(self.folder / MANIFEST, manifest)
        finally:
            lock.release()

    def empty(self, rows: int) -> np.ndarray:
        """Return records to fill."""
        return np.zeros(rows, dtype=self.record)

    def beside(self, source: int, unit: int, row: Row) -> Row:
        """Return a row with what the teacher says of it, under the names `IDS` and `LOGS`.

        Raises:
            RunError: the teacher read other tokens.
        """
        number = int(self.firsts[source]) + unit
        part, within = divmod(number, self._rows_of_part)
        size = self.record.itemsize
        with self._path(part).open("rb", buffering=0) as file:
            file.seek(within * size)
            raw = file.read(size)
        record = np.frombuffer(raw, self.record, 1)[0] if len(raw) == size else None
        if record is None or int(record["row"]) != row_hash(row):
            raise RunError(
                f"{self._path(part)} holds what the teacher says of other tokens than those of row "
                f"{unit} of source {source}",
                f"rm -r {shell(self.folder)}, and the same command: the teacher reads the text "
                "again",
            )
        logs = np.concatenate([record["logs"], record["rest"][:, None]], axis=1)
        taught = {IDS: record["ids"].astype(np.int32), LOGS: logs}
        return row._replace(numbers={**(row.numbers or {}), **taught})

    def _unit(self, row: int) -> Unit:
        source = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return source, row - int(self.firsts[source])

    def _rows_in(self, part: int) -> Unit:
        first = part * self._rows_of_part
        return first, min(self.rows, first + self._rows_of_part)

    def _bytes_of(self, part: int) -> int:
        first, last = self._rows_in(part)
        return (last - first) * self.record.itemsize

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.bin"

    def _is_there(self, part: int) -> bool:
        path = self._path(part)
        return path.is_file() and path.stat().st_size == self._bytes_of(part)


def row_hash(row: Row) -> int:
    """Return 64 bits that change with a row's tokens and with where its documents begin."""
    digest = hashlib.blake2b(row.ids.astype("<i8").tobytes(), digest_size=8)
    digest.update(row.starts.astype("<i8").tobytes())
    return int.from_bytes(digest.digest(), "little")
