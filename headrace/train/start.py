"""Where the time from the command to the end of the first step went."""

import os
import time
from contextlib import suppress
from pathlib import Path


class Start:
    """Seconds of each part of a start, in turn.

    Args:
        imports_s: that the command took until now; None where there is no command, as in a
            notebook, or where the system does not tell.
    """

    def __init__(self, imports_s: float | None = None) -> None:
        self.spent_s = {} if imports_s is None else {"imports": imports_s}
        self._last_s = time.perf_counter()

    def mark(self, part: str, *, compile_s: float = 0.0) -> None:
        """`part` ends now, and the next begins.

        Args:
            part: its name.
            compile_s: what the compiler took of it, which is told apart.
        """
        now_s = time.perf_counter()
        self.spent_s[part] = now_s - self._last_s - compile_s
        if compile_s:
            self.spent_s["compile"] = compile_s
        self._last_s = now_s


def process_age_s() -> float | None:
    """Seconds since this process began; None where the system does not tell it."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        # The name may hold spaces; the 20th field behind it is the start, in ticks since boot.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks
    return None
