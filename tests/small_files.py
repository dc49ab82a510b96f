"""A command whose process may write no file beyond a size, as on a disk that is full."""

import resource
import signal
import sys

from headrace.cli.app import app


def run(*, limit: int, argv: list[str]) -> None:
    """Run a command; `limit` is the size in bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv = ["headrace", *argv]
    app()
