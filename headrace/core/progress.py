"""Report how a run goes: bars in a terminal, plain lines elsewhere, nothing in a test."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from headrace.core.units import format_bytes, format_seconds

OnProgress = Callable[[str, float, float | None], None]
"""(what is being done, how far, of how much or None)."""
LINE_EVERY_S = 30.0
"""Seconds between two lines of a long run, off a terminal."""
LINES_A_RUN = 20
"""How many lines a short run prints whose last step is known."""


class Progress:
    """Print nothing, and keep the notes; it is the base of the classes that print."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """the lines that were not printed; `--json` has them"""

    def task(self, description: str, done: float, total: float | None) -> None:
        """Report that a piece of long work stands at `done` of `total`."""

    def note(self, text: str) -> None:
        """Report one line that is worth reading; here it is kept in `notes`."""
        self.notes.append(text)

    def log(self, text: str) -> None:
        """Report one line for those who read a log; bars show the same in another form."""

    def row(self, row: dict[str, Any], total_steps: int | None, **facts: float | None) -> None:
        """Report that a step is complete.

        Args:
            row: its row of metrics.jsonl.
            total_steps: the run's last step, where it is known.
            **facts: `memory_bytes`, the peak so far, and `left_s`, the seconds to the end.
        """

    def close(self) -> None:
        """End the report: no call follows this one."""


class Lines(Progress):
    """Print plain lines for a log, and flush each; drop a stream that cannot be written any more.

    Args:
        streams: where they go.
        every_s: seconds between two lines about steps, or about other work.
    """

    def __init__(self, streams: Sequence[TextIO], *, every_s: float = LINE_EVERY_S) -> None:
        super().__init__()
        self._streams, self._every_s = [*streams], every_s
        self._last_s = time.monotonic()
        self._last_step = 0

    def task(self, description: str, done: float, total: float | None) -> None:
        """Print how far a piece of long work is, at most once an interval."""
        if time.monotonic() - self._last_s >= self._every_s:
            share = f" {done / total:.0%}" if total else ""
            self.log(f"{description}{share}")
            self._last_s = time.monotonic()

    def note(self, text: str) -> None:
        """Print one line that is worth reading."""
        self.log(text)

    def log(self, text: str) -> None:
        """Print one line to every stream."""
        for stream in [*self._streams]:
            try:
                print(text, file=stream, flush=True)
            except (OSError, ValueError):  # a full disk, a reader that left, a stream that is shut
                self._streams.remove(stream)

    def row(self, row: dict[str, Any], total_steps: int | None, **facts: float | None) -> None:
        """Print the first and the last step, and some of the steps between."""
        step, now_s = row["step"], time.monotonic()
        apart = max(1, (total_steps or 0) // LINES_A_RUN)
        due = now_s - self._last_s >= self._every_s or step == total_steps or not self._last_step
        if due or (total_steps and step - self._last_step >= apart):
            self._last_s, self._last_step = now_s, step
            self.log(step_line(row, total_steps, **facts))


class Several(Progress):
    """Pass each report on to several others."""

    def __init__(self, *those: Progress) -> None:
        super().__init__()
        self._those = those

    def task(self, description: str, done: float, total: float | None) -> None:
        """Report how far long work is to each of them."""
        for one in self._those:
            one.task(description, done, total)

    def note(self, text: str) -> None:
        """Report a line worth reading to each of them."""
        for one in self._those:
            one.note(text)

    def log(self, text: str) -> None:
        """Report a line of the log to each of them."""
        for one in self._those:
            one.log(text)

    def row(self, row: dict[str, Any], total_steps: int | None, **facts: float | None) -> None:
        """Report a complete step to each of them."""
        for one in self._those:
            one.row(row, total_steps, **facts)

    def close(self) -> None:
        """End the report of each of them."""
        for one in self._those:
            one.close()


def step_line(
    row: dict[str, Any],
    total_steps: int | None,
    *,
    memory_bytes: float | None = None,
    left_s: float | None = None,
) -> str:
    """Return a step's line: its number, loss, speed, memory, and the time left."""
    parts = [
        f"step {row['step']}" + (f"/{total_steps}" if total_steps else ""),
        f"loss {row['loss']:.4f}",
        f"{row['tokens_per_s']:,.0f} tokens/s",
    ]
    if memory_bytes is not None:
        parts.append(f"memory {format_bytes(memory_bytes)}")
    parts.append("time left unknown" if left_s is None else f"{format_seconds(left_s)} left")
    return "  ".join(parts)


shown: ContextVar[Progress | None] = ContextVar("shown", default=None)
"""What shows the progress of verbs that are called here; None shows none."""


class Borrowed(Several):
    """Pass each report on to what belongs to the caller, which ends it, and keep the notes."""

    def note(self, text: str) -> None:
        """Report a line, and keep it."""
        super().note(text)
        self.notes.append(text)

    def close(self) -> None:
        """Leave the caller's report open."""


@contextmanager
def showing(progress: Progress) -> Iterator[None]:
    """Show the progress of the verbs that are called inside."""
    token = shown.set(progress)
    try:
        yield
    finally:
        shown.reset(token)
