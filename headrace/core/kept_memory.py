"""Let this process keep the memory that it frees, so that it has not to ask for it again.

glibc gives a large block back to the system as soon as it is freed, and the top of its heap when
enough of that is free. The next step asks for the same memory again: the system hands it out page
by page, and empties each first. Two settings of glibc's allocator end that (man 3 mallopt).
"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

CAN_KEEP = platform.libc_ver()[0] == "glibc"
"""Whether this process's C library is the one that has these settings."""
TRIM, MAPPED, MAPS = -1, -3, -4
"""glibc's numbers of three settings: how much free memory the heap's top may hold, from which size
on a block lies outside of the heap, and how many blocks may."""
NEVER = -1
MOST_MAPS, MAPPED_BYTES, TOP_BYTES = 65536, 32 << 20, 64 << 20
"""The settings that are restored: glibc's default number of blocks outside of the heap, and what
the other two grow to by themselves as blocks are freed. They grow no more once one was set: a
process that had freed little would ask the system for each larger block from then on."""


def pages_touched() -> int:
    """Return how many pages of memory the system handed to this process since it began.

    It counts minor page faults: first touches that read nothing from a disk.
    """
    import resource  # which not every system has

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@contextmanager
def kept() -> Iterator[bool]:
    """Keep freed memory while it lasts; yields whether the allocator took both settings."""
    library = _library()
    took = bool(library.mallopt(TRIM, NEVER)) and bool(library.mallopt(MAPS, 0))
    try:
        yield took
    finally:
        library.mallopt(MAPS, MOST_MAPS)
        library.mallopt(MAPPED, MAPPED_BYTES)
        library.mallopt(TRIM, TOP_BYTES)
        library.malloc_trim(0)
