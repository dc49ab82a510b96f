"""Imports that take seconds, during which a signal still ends the command with one message."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 75}
"""The signals that end a run, and the exit codes that it has then (train/interrupts.py). They are
repeated here because this module imports nothing that takes time."""


@contextmanager
def loading() -> Iterator[None]:
    """End the process at once when a signal comes while this context imports modules.

    An import may catch what a handler raises, so the handler raises nothing. A signal that
    somebody else handles or ignores, as under `nohup`, stays with them.
    """
    before = _catch() if threading.current_thread() is threading.main_thread() else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _catch() -> dict[signal.Signals, signal.Handlers]:
    """Catch the signals that have their usual handlers, and return those handlers."""
    before = {}
    for name in CODES:
        number = getattr(signal, name, None)  # Windows lacks some
        usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        if number is not None and signal.getsignal(number) is usual:
            before[number] = signal.signal(number, _end)
    return before


def _end(number: int, frame: FrameType | None) -> None:
    """Print that a signal ended the command, and end it with the code of that signal."""
    name = signal.Signals(number).name
    cause = "interrupted" if name == "SIGINT" else f"{name} ended it"
    message, code = f"{cause} before anything was begun", CODES[name]
    if os.environ.get("RANK", "0") == "0":
        if "--json" in sys.argv:
            document = {"error": message, "remedy": "", "exit_code": code}
            os.write(1, f"{json.dumps(document)}\n".encode())
        else:
            os.write(2, f"error: {message}\n".encode())
    os._exit(code)
