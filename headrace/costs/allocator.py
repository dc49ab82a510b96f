"""Follow torch's caching allocator by its documented rules, to find what it reserves for tensors.

Allocated bytes are those of tensors. Reserved bytes are what the allocator holds of the device; a
run is out of memory when the device has no room for more of them. The two differ by rounding, by
free blocks that are kept for the next tensor of their size, and by free blocks between used ones
that are too small for any tensor.

Sizes are rounded up to 512 bytes. A block of at most 1 MiB is cut from a segment of 2 MiB, and a
larger one below 10 MiB from a segment of 20 MiB. From 10 MiB on, a block has a segment of its own,
rounded up to 2 MiB. A tensor takes the smallest free block that is large enough. The block is cut
where at least 512 bytes of a small segment, or more than 1 MiB of a large one, are left over. A
block that is freed joins its free neighbours. Where the device has no room for a new segment, all
segments that are wholly free are given back first. An expandable segment grows at its end by pages
of 2 MiB, so there is one for small blocks and one for large ones.

Left out are streams, rounding to divisions of powers of two, the limit on cutting, and several
devices.
Source: c10/cuda/CUDACachingAllocator.cpp and docs.pytorch.org/docs/stable/notes/cuda.html.
"""

import math
from bisect import bisect_left, insort

MIB = 2**20
UNIT = 512
"""Bytes of which every block is a multiple."""
SMALL = MIB
"""Bytes of the largest block in the pool of small ones. A rest of a large block that is no larger
is not cut off."""
SMALL_SEGMENT = 2 * MIB
"""Bytes of a segment from which small blocks are cut."""
OWN = 10 * MIB
"""Bytes from which a block has a segment of its own size."""
SEGMENT = 20 * MIB
"""Bytes of a segment from which large blocks below `OWN` are cut."""
PAGE = 2 * MIB
"""Bytes of which an expandable segment, and a segment for one block, is a multiple."""


class OutOfMemory(Exception):
    """Raised where the device has no room, though every free segment was given back."""


class MemoryBlock:
    """Hold one piece of a segment, which a tensor uses or which is free."""

    __slots__ = ("after", "before", "free", "order", "size", "small", "spare")

    def __init__(self, size: int, small: bool, order: int) -> None:
        self.size, self.small, self.order = size, small, order
        self.free = False
        self.spare = 0
        """bytes of a used block that its tensor does not need"""
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None


class Allocator:
    """Count the bytes that are allocated and reserved, and their peaks.

    Args:
        capacity: bytes that may be reserved.
        expandable: whether segments grow at their end, as `expandable_segments` has it.
    """

    def __init__(self, capacity: float = math.inf, *, expandable: bool = False) -> None:
        self.capacity, self.expandable = capacity, expandable
        self.allocated = self.reserved = 0
        self.allocated_peak = self.reserved_peak = 0
        self.spare = self.spare_at_peak = 0
        """bytes of used blocks that no tensor needs, now and when most was allocated; torch counts
        them as allocated"""
        self.retries = 0
        """how often every free segment had to be given back before there was room"""
        self._free: dict[bool, list[tuple[int, int, MemoryBlock]]] = {True: [], False: []}
        self._last: dict[bool, MemoryBlock] = {}
        """the last block of the expandable segment, for small blocks and for large ones"""
        self._count = 0

    def allocate(self, bytes: float) -> MemoryBlock:
        """Return a block for a tensor of so many bytes, and count it.

        Raises:
            OutOfMemory: the device has no room for it.
        """
        whole = math.ceil(bytes)
        size = -(-whole // UNIT) * UNIT or UNIT
        small = size <= SMALL
        pool = self._free[small]
        at = bisect_left(pool, (size,))  # type: ignore[arg-type]
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size, small)
        block.free = False
        if block.size != size:
            self._cut(block, size)
        block.spare = block.size - whole
        self.allocated += block.size
        self.spare += block.spare
        if self.allocated > self.allocated_peak:
            self.allocated_peak, self.spare_at_peak = self.allocated, self.spare
        return block

    def release(self, block: MemoryBlock) -> None:
        """Free the block of a tensor that has gone."""
        self.allocated -= block.size
        self.spare -= block.spare
        pool = self._free[block.small]  # of its neighbours, too, which are of its segment
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.pop(bisect_left(pool, (before.size, before.order)))  # type: ignore[arg-type]
            self._ends_with(before, block)
            block.size += before.size
            block.before = before.before
            if before.before is not None:
                before.before.after = block
        if after is not None and after.free:
            pool.pop(bisect_left(pool, (after.size, after.order)))  # type: ignore[arg-type]
            self._ends_with(after, block)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        block.free = True
        insort(pool, (block.size, block.order, block))

    def _ends_with(self, was: MemoryBlock, now: MemoryBlock) -> None:
        """Note that an expandable segment which ended with `was` ends with `now`."""
        if self.expandable and self._last.get(was.small) is was:
            self._last[was.small] = now

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        """Return a block that is a new segment, or the grown end of the expandable one."""
        if self.expandable:
            return self._grown(size, small)
        own = SEGMENT if size < OWN else -(-size // PAGE) * PAGE
        whole = SMALL_SEGMENT if small else own
        self._take(whole)
        return self._new(whole, small)

    def _grown(self, size: int, small: bool) -> MemoryBlock:
        """Return the last block of the expandable segment, grown by pages until `size` fits."""
        last = self._last.get(small)
        over = last if last is not None and last.free else None
        more = -(-(size - (over.size if over else 0)) // PAGE) * PAGE
        self._take(more)
        if over is not None and over.free:
            pool = self._free[small]
            pool.pop(bisect_left(pool, (over.size, over.order)))  # type: ignore[arg-type]
            over.size += more
            return over
        block = self._new(more, small)
        block.before = last
        if last is not None:
            last.after = block
        self._last[small] = block
        return block

    def _take(self, bytes: int) -> None:
        """Reserve more of the device; give every free segment back first where it has no room.

        Raises:
            OutOfMemory: there is no room even then.
        """
        if self.reserved + bytes > self.capacity:
            self.retries += 1
            self._give_back()
            if self.reserved + bytes > self.capacity:
                raise OutOfMemory
        self.reserved += bytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _new(self, size: int, small: bool) -> MemoryBlock:
        self._count += 1
        return MemoryBlock(size, small, self._count)

    def _cut(self, block: MemoryBlock, size: int) -> None:
        """Cut a block to `size` bytes, and keep the rest as a free block of its own."""
        left = block.size - size
        if left < UNIT if block.small else left <= SMALL:
            return
        rest = self._new(left, block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._ends_with(block, rest)
        rest.free = True
        insort(self._free[block.small], (left, rest.order, rest))

    def _give_back(self) -> None:
        """Give back segments that are wholly free; pages within an expandable one stay."""
        for small, pool in self._free.items():
            kept = []
            for size, order, block in pool:
                if block.before is None and block.after is None:
                    self.reserved -= size
                    self._last.pop(small, None)
                else:
                    kept.append((size, order, block))
            self._free[small] = kept
