"""`python -m headrace` is `headrace`."""

import json
import os
import signal
import sys
from types import FrameType

CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 75}
"""Signals that end a run, and the exit codes that it has then (interrupts.py). They stand here as
well, for what comes while the rest is imported."""


def main() -> None:
    """Run the command line. A signal while it is imported is one message, as it is later."""
    before = _caught()
    from headrace.cli.app import app
    from headrace.core.native import exit_beside_native

    for number, handler in before.items():
        signal.signal(number, handler)
    try:
        app(prog_name="headrace")
    except SystemExit as ended:
        exit_beside_native(ended.code)
        raise
    finally:
        if signal.SIGINT in before:  # another one ends what is left to do, without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _caught() -> dict[signal.Signals, signal.Handlers]:
    """Catch the signals that nobody else does, as `nohup` ignores one; return what caught them."""
    found = {}
    for name in CODES:
        number = getattr(signal, name, None)  # Windows lacks some
        usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        if number is not None and signal.getsignal(number) is usual:
            found[number] = signal.signal(number, _ended)
    return found


def _ended(number: int, frame: FrameType | None) -> None:
    """End at once: nothing was begun, and an import may catch what is raised in it."""
    name = signal.Signals(number).name
    said = "interrupted" if name == "SIGINT" else f"{name} ended it"
    told, code = f"{said} before anything was begun", CODES[name]
    if os.environ.get("RANK", "0") == "0":
        if "--json" in sys.argv:
            document = {"error": told, "remedy": "", "exit_code": code}
            os.write(1, f"{json.dumps(document)}\n".encode())
        else:
            os.write(2, f"error: {told}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    main()
