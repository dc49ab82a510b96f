"""Time calls on one device, and count the seconds since the probes began.

Timing a kernel alone adds to its time: it starts after one event and ends before another. A step
pays nothing of that, because kernels follow each other there. A clock therefore measures at its
beginning what it adds (`edge_s`), and subtracts it. A time over many calls in a row needs no
correction.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

MIB = 2**20
REPEATS = 7
"""How many times a call is timed; the median counts."""
MIN_SINGLE_S, BACK_TO_BACK = 20e-6, 100
"""Seconds below which a kernel is timed over many calls back to back, and how many."""
AHEAD_CYCLES = 600_000
"""GPU clock cycles that the device waits, about 0.3 ms, while the host queues a call."""
ROW = 8
"""How many copies in a row are timed, to compare one of them with a copy alone."""


class Clock:
    """A clock times calls on one device and counts the seconds since it was made."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self.budget_s, self.began_s = device, budget_s, time.perf_counter()
        if device.type == "cuda":
            cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
            self.flush = torch.empty(max(2 * cache, 256 * MIB), dtype=torch.int8, device=device)
            self.edge_s = self._edge_s()

    @property
    def spent_s(self) -> float:
        """Return the seconds since the clock was made."""
        return time.perf_counter() - self.began_s

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the median seconds of a call, after two calls that do not count."""
        call()
        if self.device.type != "cuda":
            return self._host_seconds(call)
        call()
        torch.cuda.synchronize(self.device)
        median_s = median(self._between_events(call, 1) for _ in range(REPEATS))
        if median_s >= MIN_SINGLE_S:
            return median_s - self.edge_s
        begin_s = time.perf_counter()
        call()
        queue_s = time.perf_counter() - begin_s
        cycles = AHEAD_CYCLES + int(4e9 * BACK_TO_BACK * queue_s)
        all_s = median(self._between_events(call, BACK_TO_BACK, cycles) for _ in range(REPEATS))
        return all_s / BACK_TO_BACK

    def _edge_s(self) -> float:
        """Return the seconds that timing a kernel alone adds to it: 1 to 7.5 us.

        It is what a copy alone takes beyond one of `ROW` copies in a row; they are too large for
        the cache. On H200s it is 2% to 14% of a matmul of 32,768 x 768 x 768.
        """
        x, y = self.flush.chunk(2)
        y.copy_(x)

        def copies(count: int) -> float:
            return median(self._between_events(lambda: y.copy_(x), count) for _ in range(REPEATS))

        alone_s = copies(1)
        return min(max(0.0, alone_s - (copies(ROW) - alone_s) / (ROW - 1)), MIN_SINGLE_S / 2)

    def in_a_row(self, call: Callable[[], Any], calls: int) -> float:
        """Return the mean seconds of a GPU call among `calls` calls with nothing between them."""
        return self._between_events(call, calls) / calls

    def _between_events(
        self, call: Callable[[], Any], calls: int, cycles: int = AHEAD_CYCLES
    ) -> float:
        """Return the device seconds of all calls; all are queued before the first begins."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _host_seconds(self, call: Callable[[], Any]) -> float:
        """Return the median seconds of a call by the host's clock, for a CPU.

        A long call is repeated fewer times; a short one is called many times per repeat.
        """
        begin_s = time.perf_counter()
        call()
        once_s = max(time.perf_counter() - begin_s, 1e-7)
        calls = max(1, min(1000, int(1e-3 / once_s)))
        times_s = []
        for _ in range(REPEATS if once_s < 0.05 else 2):
            begin_s = time.perf_counter()
            for _ in range(calls):
                call()
            times_s.append((time.perf_counter() - begin_s) / calls)
        return median(times_s)

    def wait(self) -> None:
        """Wait until the device has done all that is queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Free the device memory that the clock uses."""
        if self.device.type == "cuda":
            del self.flush
            torch.cuda.empty_cache()
