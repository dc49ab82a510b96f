"""Take readings in a process whose failure cannot take others down with it."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process, resource_tracker
from pathlib import Path
from typing import Any

from headrace.core.errors import RefusalKind
from headrace.tuner.readings import NOT_DONE, Reading, refusal_of, why


def _begin(log: Path | None) -> None:
    """Prepare the new process: the one that asks ends it, whatever signals reach a job.

    Its output goes to the log, for the asking process writes messages and JSON to the same outputs.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)


def _end_with_parent() -> None:
    """End with the parent: keep no device and no memory for a process that is gone."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


class Worker:
    """Hold a process that takes readings, and start a new one after each that may have harmed it.

    Args:
        here: no process, to debug.
        log: where what it says goes; the terminal, without.
    """

    def __init__(self, *, here: bool = False, log: Path | None = None) -> None:
        self.here, self.log = here, log
        self._pool: ProcessPoolExecutor | None = None

    def ask(self, what: Callable[..., Reading], *given: Any, limit_s: float, **how: Any) -> Reading:
        """Return `what(*given, **how)` of the process, which ends after `limit_s` seconds."""
        if self.here:
            return what(*given, **how)
        try:
            reading = self._process().submit(what, *given, **how).result(limit_s)
        except BrokenProcessPool:
            reading = Reading(
                refused=f"its process died{self._last_word()}",
                refusal=RefusalKind.PROCESS,
                poisoned=True,
            )
        except TimeoutError:
            reading = Reading(
                refused=f"{NOT_DONE} {limit_s:.0f} s", refusal=RefusalKind.TIME, poisoned=True
            )
        except Exception as error:  # outside of `read`, as what cannot be sent to the process
            reading = Reading(refused=why(error), refusal=refusal_of(error), poisoned=True)
        if reading.poisoned:
            self.close()
        return reading

    def begin(self, what: Callable[[], object]) -> None:
        """Start the process and have it do `what` before it is asked; nobody waits for it."""
        if not self.here:
            self._process().submit(what)

    def _process(self) -> ProcessPoolExecutor:
        if self._pool is None:
            sys.warnoptions.append("ignore:resource_tracker")  # it removes what a kill left
            resource_tracker.ensure_running()
            sys.warnoptions.pop()
            self._pool = ProcessPoolExecutor(
                1, mp_context=get_context("spawn"), initializer=_begin, initargs=(self.log,)
            )
        return self._pool

    def _last_word(self) -> str:
        """Return what the log ends with, where there is one."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log else []
        written = [line.strip() for line in lines if line.strip()]
        return f": {written[-1][:200]}" if written else ""

    def close(self) -> None:
        """End the process, busy or not."""
        if self._pool is None:
            return
        for process in list(self._pool._processes.values()):
            process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
