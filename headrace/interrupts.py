"""Signals end a run between two steps, with its checkpoint saved.

Ctrl-C gives exit code 130, SIGTERM 143, SIGUSR1 75 (what Slurm's `--signal=USR1` sends before the
limit: requeue). Before the first step there is nothing to save, and a signal ends the run at once;
so does a second Ctrl-C at any time.
"""

import signal
from types import FrameType
from typing import Any

from headrace.core.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, EXIT_TERMINATED, Stopped

CODES = {
    "SIGINT": EXIT_INTERRUPTED,
    "SIGTERM": EXIT_TERMINATED,
    "SIGUSR1": EXIT_REQUEUE,
}


class Interrupts:
    """Catches the signals that ask a run to end; `name` is the one that came."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._held = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        for name in CODES:
            number = getattr(signal, name, None)
            if number is not None:
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def hold(self) -> None:
        """From now on a signal waits for the end of the step."""
        self._held = True

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if not self._held:
            raise Stopped(
                f"{self.name} ended the run before its first step; there was nothing to save",
                "headrace train PLAN starts it again; prepared data is kept",
                self.exit_code,
            )

    @property
    def exit_code(self) -> int:
        """The exit code of the signal that came."""
        return CODES[self.name or "SIGINT"]


class AsCtrlC(Interrupts):
    """For work that KeyboardInterrupt ends in good order: each of the signals raises it."""

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        raise KeyboardInterrupt
