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
TRIM, MAPS = -1, -4
"""glibc's names of how much free memory the heap's top may hold, and of how many blocks may lie
outside of the heap."""
NEVER = -1
MOST_MAPS, TOP_BYTES = 65536, 64 << 20
"""What it puts back: glibc's default, and the most that it would have set the other to itself."""


def pages_touched() -> int:
    """Pages of memory that this process touched first, since it began."""
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
        library.mallopt(TRIM, TOP_BYTES)
        library.malloc_trim(0)
