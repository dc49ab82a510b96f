"""End a run between two steps when a signal comes, with its checkpoint saved.

Ctrl-C gives exit code 130, SIGTERM 143, SIGHUP 129, SIGUSR1 75 (Slurm's `--signal=USR1` sends it
before the time limit, so that the job is requeued). In a batch job of a scheduler SIGTERM gives 75
too: it comes before the job is preempted, or its node is drained. Before the first step there is
nothing to save, and a signal ends the run at once. A second Ctrl-C also ends it at once, until the
report is written. After the report is written, a signal only skips what is made after it. A signal
that was ignored when the process began, as under `nohup`, stays ignored. A compiler may take
minutes and handles no signal: a run that compiles when the signal comes is ended from another
thread, and keeps what it had saved.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Self

from headrace.core.command import rerun
from headrace.core.errors import (
    EXIT_HANGUP,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    EXIT_TERMINATED,
    HeadraceError,
    Stopped,
)
from headrace.core.files import shell

CODES = {
    "SIGINT": EXIT_INTERRUPTED,
    "SIGTERM": EXIT_TERMINATED,
    "SIGHUP": EXIT_HANGUP,
    "SIGUSR1": EXIT_REQUEUE,
}
PATIENCE_S = 4.0
"""Seconds that a compiler has to end by itself after a signal."""
LAST_WORDS_S = 3.0
"""Seconds that writing the report may take when a run is ended while it compiles."""
NOTHING_KEPT = "there was nothing to save", "the same command starts it again"
"""What remains of a run that had no step yet, and what its user can do."""
COMPILING = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "torch/_inductor/codecache.py",
    "torch/_inductor/async_compile.py",
)
"""Files of torch that are on the stack only while it compiles, not while compiled code runs."""


def _print(error: HeadraceError) -> None:
    print(f"error: {error.message}\n  try: {error.remedy}", file=sys.stderr, flush=True)


class Interrupts:
    """Catch the signals that ask a run to end; `name` is the signal that came."""

    patience_s: ClassVar[float | None] = PATIENCE_S
    early = "the run before its first step; there was nothing to save"
    """Words for what a signal ends before `hold` was called; part of the error's message."""
    print_error: ClassVar[Callable[[HeadraceError], None]] = staticmethod(_print)
    """Function that prints the error of a run that is ended while it compiles."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._deferring = self._deaf = False
        self._last_words: Callable[[str], tuple[str, str]] = lambda name: NOTHING_KEPT
        self._before: dict[signal.Signals, Any] = {}
        self._left = threading.Event()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python hears signals in the main thread alone: whoever runs that decides
        for name in CODES:
            number = getattr(signal, name, None)
            if number is None:
                continue
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and `&` in a script ask
                self._before[number] = signal.signal(number, self._caught)
        if self.patience_s is not None:
            main = threading.get_ident()
            threading.Thread(target=self._watch, args=(main,), daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._left.set()
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def hold(self, last_words: Callable[[str], tuple[str, str]] | None = None) -> None:
        """Keep signals from ending the run until its current step is complete.

        Args:
            last_words: called with the signal's name when the run is ended while it compiles. It
                writes the report, and returns what remains of the run and how to go on.
        """
        self._deferring = True
        self._last_words = last_words or self._last_words

    def deafen(self) -> None:
        """Ignore every signal from now on: the report is being written, which takes little time."""
        self._deaf = True

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._deaf:
            return
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if not self._deferring:
            raise Stopped(f"{self.name} ended {self.early}", self.rerun_command(), self.exit_code)

    def _watch(self, main: int) -> None:
        """End the process when a signal has come and the main thread still compiles.

        Args:
            main: the identifier of the main thread.
        """
        came_s: float | None = None
        while not self._left.wait(0.25):
            if self.name is None:
                continue
            came_s = time.monotonic() if came_s is None else came_s
            overdue = time.monotonic() - came_s > (self.patience_s or 0.0)
            if overdue and is_compiling(main):
                self._cut_off()

    def _cut_off(self) -> None:
        name, outcome = str(self.name), [("its report was not written", NOTHING_KEPT[1])]

        def speak() -> None:
            outcome[0] = self._last_words(name)

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_S)
        if os.environ.get("RANK", "0") == "0":
            error = Stopped(
                f"{name} ended the run while it compiled; {outcome[0][0]}",
                outcome[0][1],
                self.exit_code,
            )
            with suppress(Exception):
                type(self).print_error(error)
                sys.stdout.flush()
        end_children()
        os._exit(self.exit_code)

    def rerun_command(self) -> str:
        """Return the command that starts what a signal ended before `hold` was called."""
        return f"{rerun(verb='train PLAN')}; prepared data is kept"

    @property
    def exit_code(self) -> int:
        """Return the exit code of the signal that came; of Ctrl-C where none came."""
        if self.name == "SIGTERM" and in_a_batch_job():
            return EXIT_REQUEUE
        return CODES[self.name or "SIGINT"]


class PatientInterrupts(Interrupts):
    """Catch signals in a process that does more than one run, as a notebook's kernel.

    A compiler that handles no signal is waited for: nothing ends the process but its owner.
    """

    patience_s: ClassVar[float | None] = None


class Preparing(Interrupts):
    """Catch signals while data is prepared without a run; half-made data is not kept."""

    patience_s: ClassVar[float | None] = None
    early = "the preparation of data; nothing half made is kept"

    def rerun_command(self) -> str:
        """Return the command line of this process."""
        return " ".join(["headrace", *map(shell, sys.argv[1:])])


class Skipped(KeyboardInterrupt):
    """A signal came while something was made without which a run is still complete."""


class Closing(Interrupts):
    """Catch signals while optional things are made after the report of a run; the run stays done.

    Until `begin` is called, a signal ends the command as a signal before the first step does.
    """

    patience_s: ClassVar[float | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._begun = self._making = False

    def begin(self) -> None:
        """Let a signal skip only what is optional from now on, because the run has ended."""
        self._begun = True

    def make(self, what: Callable[[], object]) -> bool:
        """Call `what` unless a signal has come, and return whether it was completed."""
        try:
            self._making = True
            if self.name is None:
                what()
                return True
        except Skipped:
            pass
        finally:
            self._making = False
        return False

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if not self._begun:
            super()._caught(number, frame)
        elif self.name is None:  # a later signal has nothing left to skip
            self.name = signal.Signals(number).name
            if self._making:
                raise Skipped


class AsCtrlC(Interrupts):
    """Convert each signal into KeyboardInterrupt, for work that ends in good order by it."""

    patience_s: ClassVar[float | None] = None

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        raise KeyboardInterrupt


def in_a_batch_job() -> bool:
    """Return whether a scheduler started this process: Slurm, a Job of Kubernetes or SkyPilot."""
    numbers = (
        os.environ.get("SLURM_JOB_ID"),
        os.environ.get("JOB_COMPLETION_INDEX"),
        os.environ.get("SKYPILOT_TASK_ID"),
    )
    return any(number is not None for number in numbers)


def is_compiling(thread: int) -> bool:
    """Return whether torch's compiler is on the stack of a thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.replace(os.sep, "/").endswith(COMPILING):
            return True
        frame = frame.f_back
    return False


def end_children() -> None:
    """Kill all descendants of this process: the workers of a compiler would outlive it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    waiting = [os.getpid()]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            waiting.append(child)
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
