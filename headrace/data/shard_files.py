"""Read the files of a shard set, however many there are.

Maps are made when first touched and the oldest are dropped, so ten thousand files cost neither
start-up time nor file descriptors. Random rows of more files than are mapped at once would each
make a map, which takes 30 us of a core; to open, to read and to close a file takes 7.
"""

import mmap
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from headrace.core.errors import RunError

OPEN_MAPS = 128
"""Files that are mapped at once."""


class ShardFiles:
    """The files of a shard set are open for reading, from several threads.

    Args:
        directory: where they are.
        dtype: of a token.
        count: how many of them hold tokens.
    """

    def __init__(self, directory: Path, dtype: np.dtype, count: int) -> None:
        self._directory, self._dtype = os.fspath(directory), dtype
        self._is_mapped = count <= OPEN_MAPS
        self.map = lru_cache(maxsize=OPEN_MAPS)(self._open_map)

    def read(self, name: str, first: int, count: int) -> np.ndarray:
        """Return items [first, first + count) of a file: tokens, or the bytes of answers.

        Raises:
            RunError: it has become shorter since the set was opened.
        """
        if self._is_mapped:
            part = self.map(name)[first : first + count]
        else:
            part = self._read_once(name, first, count)
        if len(part) < count:
            raise RunError(
                f"{self._directory}/{name} became shorter while it was read: it has "
                f"{first + len(part):,} items, and {first + count:,} are wanted",
                "the same command again",
            )
        return part

    def _read_once(self, name: str, first: int, count: int) -> np.ndarray:
        """Read from a file that is opened for it."""
        dtype = self._dtype_of(name)
        file = os.open(f"{self._directory}/{name}", os.O_RDONLY)
        try:
            raw = os.pread(file, count * dtype.itemsize, first * dtype.itemsize)
        finally:
            os.close(file)
        return np.frombuffer(raw, dtype, len(raw) // dtype.itemsize)

    def _dtype_of(self, name: str) -> np.dtype:
        """Return the type of a file's items."""
        own = {"offsets": np.dtype("<u8"), "answers": np.dtype(np.uint8)}
        return own.get(name.partition(".")[0].partition("-")[0], self._dtype)

    def _open_map(self, name: str) -> np.ndarray:
        """Map a file. `np.memmap` resolves its path first, which takes ten times as long."""
        dtype = self._dtype_of(name)
        with open(os.path.join(self._directory, name), "rb", buffering=0) as file:
            if not (size := os.fstat(file.fileno()).st_size):
                return np.empty(0, dtype=dtype)
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype=dtype, count=size // dtype.itemsize)
