"""Let one process at a time use the device, while the other processes of the program stand still.

Compiling keeps a host's cores busy for minutes, and timing keeps the device busy for seconds. So a
`Crew` of processes compiles as it likes, and a process that times enters the `Gate`. It takes a
lock, stops every other process of the program (SIGSTOP, the compilers' own processes too), and
waits until the device answers at once, which it does when nothing is left in its queue. Then
neither the device nor the host's cores are shared while a step is timed. What a process stopped
goes on when it leaves the gate. `Crew` also wakes what a process stopped that was killed inside.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from headrace.tuner.worker import Worker

HOW = "processes compile side by side; while one times, all others are stopped (SIGSTOP)"
"""The text by which a row describes how processes share the device."""
ANSWERS_S, CALM, QUIET_S = 3e-4, 5, 8.0
"""Seconds in which an idle device finishes a tiny operation; how often in a row it must do so; and
the most seconds to wait for that."""
WAKE_S = 1.0
"""Seconds between two checks for processes that a killed one has left stopped."""


@dataclass
class Calm:
    """Hold how calm device and host were while a process was alone.

    Args:
        quiet: whether the device was idle before.
        others_s: seconds of the host's cores that the program's other processes used; 0 when all
            were stopped.
    """

    quiet: bool
    others_s: float = 0.0


@dataclass(frozen=True)
class Gate:
    """Give the process inside the device and the cores for itself.

    Args:
        file: the file of the lock.
        program: the process whose descendants are stopped.
    """

    file: Path
    program: int

    @contextmanager
    def alone(self) -> Iterator[Calm]:
        """Wait for the lock, stop the others, and yield how calm it is; complete at the end."""
        with FileLock(self.file):
            mine, stopped = {os.getpid(), *descendants(os.getpid())}, list[int]()
            try:
                while begun := {*descendants(self.program)} - mine - {*stopped}:
                    stopped += begun
                    # one may have begun another before it stood
                    send_signal([*begun], signal.SIGSTOP)
                calm, before_s = Calm(quiet()), used_s(stopped)
                yield calm
                calm.others_s = used_s(stopped) - before_s
            finally:
                send_signal(stopped, signal.SIGCONT)

    def wake(self) -> None:
        """Let all stopped processes go on, unless a process is inside."""
        with suppress(Timeout), FileLock(self.file, timeout=0):
            send_signal(descendants(self.program), signal.SIGCONT)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process began, and those that these began."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            text = file.read_text()
            parent = int(text.rpartition(")")[2].split()[1])  # behind a name in brackets
            children.setdefault(parent, []).append(int(text.partition(" ")[0]))
    family, waiting = list[int](), [pid]
    while waiting:
        begun = children.get(waiting.pop(), [])
        family += begun
        waiting += begun
    return family


def used_s(processes: list[int]) -> float:
    """Return the seconds of the host's cores that processes have used so far."""
    ticks = 0
    for pid in processes:
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def send_signal(processes: list[int], signal_: signal.Signals) -> None:
    """Send a signal to each of these processes that still exists."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_)


def quiet() -> bool:
    """Wait until a GPU is idle, for `QUIET_S` at most; return whether it is."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return True
    one, calm, ends_s = torch.zeros(1, device="cuda"), 0, time.monotonic() + QUIET_S
    while calm < CALM and time.monotonic() < ends_s:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        one.add_(1.0)
        torch.cuda.synchronize()
        calm = calm + 1 if time.perf_counter() - began_s < ANSWERS_S else 0
        time.sleep(2e-3)
    return calm >= CALM


# --- who works ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Describe what a process of the crew does, and the bytes of the device that it takes."""

    name: str
    bytes: float
    do: Callable[[Worker], None]


@dataclass
class Crew:
    """Run tasks in their order, as many at a time as the device has memory for.

    Args:
        workers: the number of processes.
        bytes: the memory of the device for all tasks.
        gate: the gate of the program.
        ends_s: the end on the monotonic clock; no task begins later.
        logs: the folder of what the processes print.
        awake: what each process does first, while others still prepare their work.
        here: whether tasks run in this process, to debug.
    """

    workers: int
    bytes: float
    gate: Gate
    ends_s: float
    logs: Path
    awake: Callable[[], object] = os.getpid
    here: bool = False
    _waiting: list[Task] = field(default_factory=list)
    _running: list[Task] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._before = {*descendants(os.getpid())}
        """Processes that began before the crew, and so are none of it."""
        self.closed = False
        """Whether this process has ended the crew, so that one that dies since was ended by it."""
        each = range(1 if self.here else self.workers)
        self._crew = [Worker(here=self.here, log=self.logs / f"{n}.log") for n in each]
        for worker in self._crew:
            worker.begin(self.awake)

    def run(self, tasks: list[Task]) -> None:
        """Run all tasks, until none is left or the time is over."""
        self._waiting = list(tasks)
        if self.here:
            self._work(self._crew[0])
            return
        threads = [
            threading.Thread(target=self._work, args=(one,), daemon=True) for one in self._crew
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(WAKE_S)
            self.gate.wake()

    def _work(self, worker: Worker) -> None:
        while (task := self._take()) is not None:
            try:
                task.do(worker)
            finally:
                with self._changed:
                    self._running.remove(task)
                    self._changed.notify_all()

    def _take(self) -> Task | None:
        """Return the next task that fits beside what runs; None where none may begin."""
        with self._changed:
            while self._waiting and time.monotonic() < self.ends_s and not self.closed:
                left = self.bytes - sum(task.bytes for task in self._running)
                fits = (t for t in self._waiting if t.bytes <= left or not self._running)
                task = next(fits, None)
                if task is not None:
                    self._waiting.remove(task)
                    self._running.append(task)
                    return task
                self._changed.wait(timeout=WAKE_S)
        return None

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True
        begun = {*descendants(os.getpid())} - self._before
        send_signal([*begun], signal.SIGCONT)
        for worker in self._crew:
            worker.close()
        send_signal([*begun.intersection(descendants(os.getpid()))], signal.SIGTERM)
