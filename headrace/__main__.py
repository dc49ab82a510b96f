"""`python -m headrace` is `headrace`."""

import signal

from headrace.core.loading import loading


def main() -> None:
    """Run the command line, and end the process without waiting for threads of libraries."""
    caught = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with loading():
        from headrace.cli.app import app
        from headrace.core.native import exit_beside_native
    try:
        app(prog_name="headrace")
    except SystemExit as ended:
        exit_beside_native(ended.code)
        raise
    finally:
        if caught:  # another Ctrl-C ends what is left to do, without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
