"""Long calls of native code, during which a signal is answered all the same.

Python answers a signal between two lines of the main thread. While that thread is inside of a
library it does not come to the next line, so the call runs on a thread of its own.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from headrace.core.errors import HeadraceError

T = TypeVar("T")
LOOK_EVERY_S = 0.1
_left: list[threading.Event] = []
"""One for each call that was waited for no longer; it is set when the call has ended."""


def call_native(work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises; a signal's exception ends the wait.

    A library that holds the interpreter's lock meanwhile is waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[Any] = []
    errors: list[BaseException] = []
    ended = threading.Event()  # `Thread.join` takes a thread for ended once it was interrupted

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # what Rust raises is no Exception
            errors.append(error)
        finally:
            ended.set()

    try:
        threading.Thread(target=run, daemon=True).start()
        while not ended.wait(LOOK_EVERY_S):
            pass
    except RuntimeError:  # no thread could be started
        raise
    except BaseException:
        _left.append(ended)
        raise
    if errors:
        raise errors[0]
    return results[0]


def exit_beside_native(code: object) -> None:
    """End the process if such a call still goes on: the interpreter cannot be taken apart under it.

    Args:
        code: of SystemExit.
    """
    if any(not ended.is_set() for ended in _left):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


@contextmanager
def silent_panics() -> Iterator[None]:
    """Drop what a library wrote on standard error before an error of ours that says it in words.

    Rust writes where it panicked before anybody can catch it. What is written there otherwise
    comes a moment later. For short calls.
    """
    try:
        kept = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as capture_file:
        os.dup2(capture_file.fileno(), 2)
        explained = False
        try:
            yield
        except HeadraceError:
            explained = True
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            capture_file.seek(0)
            if not explained and (output := capture_file.read()):
                os.write(2, output)


@contextmanager
def silent_library() -> Iterator[None]:
    """Drop what a library writes on standard error by itself, as of files of other machines.

    For short calls: Python's own lines are dropped too.
    """
    try:
        kept = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
