"""Define how a run can end, each with the exit code that a script or a scheduler reads.

A message says what was asked, what was found (with units), the nearest value that works, and the
command that mends it. `assert` is for our own bugs; these are for everything else.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from enum import StrEnum
from errno import EDQUOT, EFBIG, ENOMEM, ENOSPC
from pathlib import Path

from headrace.core.remedy import Remedy, as_remedy, mend

EXIT_DONE, EXIT_FAILED, EXIT_PLAN, EXIT_UNSUPPORTED = 0, 1, 2, 3
EXIT_REQUEUE, EXIT_HANGUP, EXIT_INTERRUPTED, EXIT_TERMINATED = 75, 129, 130, 143
NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "_ALLOC_FAILED",
    "bad_alloc",
    "MemoryError",
)
"""Texts by which CUDA, the host's allocator, cuBLAS and cuDNN, C++ and Python say that memory ran
out."""
NO_THREAD = (
    "can't start new thread",
    "The global thread pool has not been initialized",
    "Resource temporarily unavailable",
)
"""How a message of Python, Rust or C++ begins that says that no thread could be started."""
LESS_PER_STEP = Remedy(text="batch.micro_sequences=N with a smaller N,") | mend(
    "+selective_checkpoint"
)
"""The remedy that makes a run take less memory."""
MANY = 24
"""How many choices a message lists where none is close to what was typed."""
SIZE = r"([\d.]+ \w+)"
GPU_FULL = re.compile(
    rf"Tried to allocate {SIZE}\..*?capacity of {SIZE} of which {SIZE} is free.*?{SIZE} is "
    rf"allocated by PyTorch.*?{SIZE} is reserved by PyTorch but unallocated",
    re.DOTALL,
)
"""Pattern of the message of torch's CUDA allocator. Its groups are sizes: what was asked for, the
GPU's whole memory, what is free, what tensors hold, and what is free in pieces between tensors."""
OTHERS = 0.1
"""Share of a GPU's memory from which a message mentions what is none of these."""
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
HOST, SENTENCE = "DefaultCPUAllocator: ", re.compile(r"(?<=[a-z])\.\s+(?=[A-Z])")
"""The text that ends the prefix of the host allocator's messages; and where a sentence ends."""


class RefusalKind(StrEnum):
    """Why something cannot be done: what a program that meets a refusal decides by."""

    PLAN = "plan"
    """a key of the plan, or the model and data that it asks for"""
    COMBINATION = "combination"
    """another technique of the plan, or one that is missing"""
    DEVICE = "device"
    """the kind of the device, or what it can do"""
    PACKAGE = "package"
    """something that is not installed: a package, a compiler"""
    VERSION = "version"
    """a package, or torch itself, that is too old or is known to be wrong"""
    SYSTEM = "system"
    """the operating system, its limits, or a folder of it"""
    MEMORY = "memory"
    """there is too little of it"""
    TIME = "time"
    """it did not end by then"""
    PROCESS = "process"
    """the process that did it ended"""
    BASELINE = "baseline"
    """what it is compared with cannot be done"""
    OTHER = "other"
    """an error that has none of these kinds"""


class HeadraceError(Exception):
    """Base of every error that is shown as one message, without a traceback."""

    exit_code: int = EXIT_FAILED
    run: Path | None = None
    """the folder of the run that it ended, whose report holds it"""

    def __init__(self, message: str, remedy: Remedy | str = "") -> None:
        """Keep what is shown, and what a program may do about it.

        Args:
            message: what was asked and what was found.
            remedy: what mends it; a plain text where no change of the plan does.
        """
        super().__init__(message)
        self.message: str = message
        self.remedy: Remedy = as_remedy(remedy)

    def __str__(self) -> str:
        return f"{self.message}\n  try: {self.remedy}" if self.remedy else self.message


class RunError(HeadraceError):
    """The run has started and has failed (exit code 1)."""


class Diverged(RunError):
    """A loss or a gradient was not finite."""


class ConfigError(HeadraceError):
    """The plan or the input is wrong (exit code 2)."""

    exit_code = EXIT_PLAN
    keys: tuple[str, ...] = ()
    """Dotted keys of the table whose values it refuses; none where a table is wrong as a whole."""


class TextLost(ConfigError):
    """A tokenizer does not give back the text, and the plan does not say that it may."""


class UnsupportedError(HeadraceError):
    """It cannot fit, or is not supported here (exit code 3)."""

    exit_code = EXIT_UNSUPPORTED


class MemoryFull(UnsupportedError):
    """There was no memory left for what a run, or what comes before it, asked for."""

    def __init__(
        self, error: BaseException, what: str = "it", remedy: Remedy | str = LESS_PER_STEP
    ) -> None:
        """Say it as a user needs it.

        Args:
            error: one that `is_out_of_memory`.
            what: what does not fit.
            remedy: what makes it smaller.
        """
        detail = str(error).rpartition(HOST)[2] or type(error).__name__
        first = SENTENCE.split(detail.splitlines()[0])[0].rstrip(".")
        if sizes := GPU_FULL.search(detail):
            asked, whole, free, in_use, pieces = sizes.groups()
            first += (
                f": {asked} were asked for; tensors held {in_use} of the GPU's {whole}, {pieces} "
                f"were free in pieces between them, and {free} beside them"
            )
            need, all_, left, mine, between = map(_bytes, sizes.groups())
            if all_ - left - mine - between > OTHERS * all_:
                first += "; the rest is other processes', or kept from this one by a limit"
            if between + left >= need > left:
                grown = "--with expandable_segments, where it is not on, leaves fewer such pieces;"
                remedy = mend("+expandable_segments", text=grown) | remedy
        super().__init__(f"{what} does not fit in memory: {first}", remedy)


def _bytes(size: str) -> float:
    """Return the bytes of a size as torch writes it: "1.5 GiB"."""
    number, unit = size.split()
    return float(number) * UNITS.get(unit, 0)


class NoMoreThreads(UnsupportedError):
    """The system would start no more threads, for this user or in this container."""

    def __init__(self) -> None:
        """Say it with the limit that a user can see; a container's own may be lower."""
        import resource  # which not every system has

        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limit = "unlimited" if most == resource.RLIM_INFINITY else f"{most:,}"
        super().__init__(
            "the system would start no more threads: this user's limit of threads and processes "
            f"(ulimit -u) is {limit}, and a container may have a lower one (pids)",
            "data.workers=0, and OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 before the command, to "
            "start fewer (--without loader_workers, where that is on); or raise that limit, or "
            "end other processes",
        )


class Stopped(HeadraceError):
    """A signal ended the run after its checkpoint was saved (75, 129, 130 or 143)."""

    def __init__(self, message: str, remedy: Remedy | str, exit_code: int) -> None:
        super().__init__(message, remedy)
        self.exit_code = exit_code


MALFORMED = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors that code raises which takes values out of tables that somebody else wrote."""

MOST_REPEATED = 200
"""Letters of another library's message that are repeated."""


@contextmanager
def interpreting(what: str | Path, remedy: Remedy | str) -> Iterator[None]:
    """Turn errors over a table that somebody else wrote into one error for the user.

    Args:
        what: the file that holds the table.
        remedy: what mends it.

    Raises:
        ConfigError: a value in it is of another kind, or out of all bounds.
    """
    try:
        yield
    except MALFORMED as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0][:MOST_REPEATED]
        raise ConfigError(
            f"{what} holds a value that none of its kind has: {first}", remedy
        ) from None


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error says that a disk, or a user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (EDQUOT, EFBIG, ENOSPC)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that an allocator, of any device, ran out of memory."""
    if isinstance(error, OSError):
        return error.errno == ENOMEM
    message = f"{type(error).__name__}: {error}"
    own = isinstance(error, RuntimeError | MemoryError)
    return own and any(sign in message for sign in NO_MEMORY)


def at_a_limit(error: BaseException) -> UnsupportedError | None:
    """Return the error to show a user where memory or threads ran out; None for any other error.

    Args:
        error: what was raised.
    """
    if is_out_of_memory(error):
        return MemoryFull(error)
    raised = isinstance(error, RuntimeError) or type(error).__name__ == "PanicException"  # Rust's
    return NoMoreThreads() if raised and str(error).startswith(NO_THREAD) else None


ALIKE = 0.6
"""Similarity of two names, by difflib, from which one may be a mistyped other."""


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


def alike(word: str, choices: Iterable[str]) -> str | None:
    """Return the closest choice, in any case and with any dashes; None where all are far."""
    names = sorted(choices)
    if word in names:
        return word
    folded = {_folded(name): name for name in names}
    close = get_close_matches(_folded(word), folded, n=1, cutoff=ALIKE)
    return folded[close[0]] if close else None


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the choice closest to `word`, in any case and with any dashes, or a list of all.

    All are listed where none is close; of more than `MANY` the first ones and a count.
    """
    names = sorted(choices)
    more = f" and {len(names) - MANY} more" if len(names) > MANY + 1 else ""
    listed = ", ".join(names[:MANY] if more else names) + more
    return alike(word, names) or listed
