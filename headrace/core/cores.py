"""List the cores that this process may use, and bind its threads to some of them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

CAN_BIND = hasattr(os, "sched_setaffinity")
"""Whether this operating system lets a process choose its cores; Linux does."""
TOPOLOGY = Path("/sys/devices/system/cpu")


def cores() -> list[int]:
    """Return one logical processor of each core that this process may use, in rising order.

    Two hardware threads of one core share its units of arithmetic, which a matmul fills alone.
    """
    allowed = sorted(os.sched_getaffinity(0)) if CAN_BIND else range(os.cpu_count() or 1)
    processors: dict[str, int] = {}
    for one in allowed:
        processors.setdefault(_siblings(one), one)
    return list(processors.values())


def _siblings(one: int) -> str:
    """Return the logical processors that share the core of `one`, as the text that Linux lists.

    Where the system does not list them it is the processor's own number.
    """
    file = TOPOLOGY / f"cpu{one}" / "topology" / "thread_siblings_list"
    try:
        return file.read_text().strip()
    except OSError:
        return str(one)


@contextmanager
def bound(to: Sequence[int]) -> Iterator[None]:
    """Keep every thread of this process on some logical processors while it lasts."""
    before = {task: os.sched_getaffinity(task) for task in _tasks()}
    _move({task: set(to) for task in before})
    try:
        yield
    finally:
        allowed = before.get(os.getpid(), os.sched_getaffinity(0))
        _move({task: before.get(task, allowed) for task in _tasks()})


def _move(where: dict[int, set[int]]) -> None:
    for task, on in where.items():
        with suppress(ProcessLookupError):  # a thread that has ended since
            os.sched_setaffinity(task, on)


def _tasks() -> list[int]:
    """Return the ids of this process's threads; its own id where /proc is missing."""
    folder = Path("/proc/self/task")
    return [int(task.name) for task in folder.iterdir()] if folder.is_dir() else [os.getpid()]
