"""`python -m headrace` is `headrace`."""

import json
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line. A Ctrl-C while it is imported is one message, as it is later."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _interrupted)
    from headrace.cli import app
    from headrace.core.native import exit_beside_native

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(prog_name="headrace")
    except SystemExit as ended:
        exit_beside_native(ended.code)
        raise
    finally:
        if ours:  # another one ends what is left to do, without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End at once: nothing was begun, and an import may catch what is raised in it."""
    told, code = "interrupted before anything was begun", 130
    if os.environ.get("RANK", "0") == "0":
        if "--json" in sys.argv:
            document = {"error": told, "remedy": "", "exit_code": code}
            os.write(1, f"{json.dumps(document)}\n".encode())
        else:
            os.write(2, f"error: {told}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    main()
