"""Measure the parts of the time from the command to the end of the first step."""

import os
import time
from contextlib import suppress
from pathlib import Path


class Start:
    """Measure the seconds of each part of a start, one part after another.

    Args:
        imports_s: the seconds that the command took until now; None where there is no command, as
            in a notebook, or where the system does not provide them.
    """

    def __init__(self, imports_s: float | None = None) -> None:
        self.spent_s = {} if imports_s is None else {"imports": imports_s}
        self._last_s = time.perf_counter()

    @property
    def age_s(self) -> float:
        """Return the seconds since the command began, as far as they are known."""
        return sum(self.spent_s.values()) + time.perf_counter() - self._last_s

    def mark(self, part: str, *, compile_s: float = 0.0) -> None:
        """Record that a part ends now and the next one begins.

        Args:
            part: the name of the part that ends.
            compile_s: the seconds of it that the compiler took, which are recorded separately.
        """
        now_s = time.perf_counter()
        self.spent_s[part] = now_s - self._last_s - compile_s
        if compile_s:
            self.spent_s["compile"] = compile_s
        self._last_s = now_s


def process_age_s() -> float | None:
    """Return the seconds since this process began; None where the system does not provide them."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        # The name may hold spaces; the 20th field after it is the start, in ticks since boot.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks
    return None
