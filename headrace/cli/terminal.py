"""Print what the command line shows: bars, tables and errors; end with the exit code."""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column, Table
from rich.text import Text

from headrace.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PLAN,
    HeadraceError,
    at_a_limit,
)
from headrace.core.files import encodable
from headrace.core.progress import Borrowed, Lines, Progress, Several, shown


class Aside(Console):
    """Print on standard error. A failure to write there, as on a full disk, ends nothing."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print as `Console` does; discard what cannot be written."""
        try:
            super().print(*objects, **how)
        except (OSError, ValueError):  # full, or shut
            self._buffer.clear()


console = Aside(stderr=True, highlight=False)
WIDE = 100
"""Columns of a terminal from which on progress bars are 24 characters long, and not 12."""
ENDLESS = 10**6
"""The most columns of a line in a file or a pipe, where nothing is wrapped."""


def note(text: str) -> None:
    """Print a text on standard error as it is."""
    console.print(text, markup=False, soft_wrap=True)


@contextmanager
def exit_codes(as_json: bool, *, together: bool = False) -> Iterator[None]:
    """Turn errors that a user can mend into one message and their exit code.

    Args:
        as_json: whether the message is a JSON document on standard output.
        together: whether the ranks that torchrun started do the verb's work together. If not, the
            first rank does it, and the others end at once and print nothing.

    Raises:
        typer.Exit: with the exit code.
    """
    if not together and not is_first():
        raise typer.Exit
    if isinstance(sys.stdout, TextIOWrapper):  # a name may hold bytes that are no UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        _flush()
    except HeadraceError as error:
        _fail(error.message, error.remedy.text, error.exit_code, as_json)
    except KeyboardInterrupt:
        _fail("interrupted; checkpoints that were complete are kept", "", EXIT_INTERRUPTED, as_json)
    except BaseException as error:  # what Rust raises is no Exception
        if (limit := at_a_limit(error)) is not None:
            _fail(limit.message, limit.remedy.text, limit.exit_code, as_json)
        if isinstance(error, UnicodeEncodeError):
            name = error.object[max(0, error.start - 80) : error.end + 80]
            message = f"a name or a text is not {error.encoding.upper()}: {name!a}"
            _fail(message, "the same command once that file or word is renamed", EXIT_PLAN, as_json)
        if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
            raise  # a reader that has seen enough, as head, is no error
        full = not error.filename and _is_full()
        name = "standard output" if full else error.filename
        message = f"{name}: " * bool(name) + (error.strerror or str(error))
        _fail(message, "", EXIT_FAILED, as_json and not full)


def print_error(error: HeadraceError, *, as_json: bool) -> None:
    """Print an error as `exit_codes` does, for a process that ends by itself."""
    with suppress(typer.Exit):
        _fail(error.message, error.remedy.text, error.exit_code, as_json)


def is_first() -> bool:
    """Return whether this process is the first rank of its world, or alone."""
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


def is_teller() -> bool:
    """Return whether this rank prints how a verb ended: the first rank that asks does.

    The ranks agree through the store that torchrun's agent keeps. Where there is no store, every
    rank prints its own end, so that an end that only one rank has is not lost.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return True
    from torch import distributed  # which most ends need not wait for

    if not distributed.is_torchelastic_launched():
        return True
    try:
        stores = distributed.rendezvous("env://", timeout=timedelta(seconds=10))  # pyright: ignore
        store, _, _ = next(stores)
        return store.add("headrace/told", 1) == 1
    except (RuntimeError, ValueError):  # the agent is gone, or gives no address
        return True


def _is_full() -> bool:
    """Return whether standard output takes nothing more, as on a full disk.

    An error of standard output names no file, so this writes an empty line to find out.
    """
    return not _written("\n")


def _flush() -> None:
    """Flush standard output now, while a failure can still be reported."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = "standard output"
        raise


def _fail(message: str, remedy: str, code: int, as_json: bool) -> NoReturn:
    """Print an error and its remedy, by one rank, and exit with its code."""
    message, remedy = encodable(message), encodable(remedy)
    with _uninterrupted():
        if is_teller():
            document = {"error": message, "remedy": remedy, "exit_code": code}
            if not (as_json and _written(json.dumps(document))):
                with suppress(OSError):
                    console.print(
                        f"error: {message}", style="bold red", markup=False, soft_wrap=True
                    )
                    if remedy:
                        console.print(f"  try: {remedy}", markup=False, soft_wrap=True)
            _written("")
    raise typer.Exit(code)


def _written(line: str) -> bool:
    """Write a line on standard output; return whether it was written.

    Where standard output is full, nothing is written there any more.
    """
    try:
        print(line, end="\n" if line.strip() else "", flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it in the end
        return False
    return True


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def show_json(value: Mapping[str, Any] | list[Any], code: int = EXIT_DONE) -> None:
    """Print the one JSON document of a verb on standard output, by one rank.

    Args:
        value: the result of the verb; numbers that are not finite become null.
        code: the exit code of the verb. An object holds it, as the object of an error does. An
            array, as `list` and `doctor` print, does not: only success prints one.
    """
    if is_teller():
        whole = value if isinstance(value, list) else {**value, "exit_code": code}
        text = json.dumps(whole, default=str)
        print(json.dumps(json.loads(text, parse_constant=lambda word: None), indent=1))


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table on standard output, with every cell whole.

    In a terminal, a cell that is too wide is folded into further lines. In a file or a pipe, each
    row is one line.

    Args:
        head: the names of the columns; none for a table without a head.
        rows: the cells of each row.
        title: a line above the table; "" for none.
    """
    columns = [Column(head[0], no_wrap=True)] if head else []
    columns += [Column(name, overflow="fold") for name in head[1:]]
    table = Table(*columns, title=title or None, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    out = Console(highlight=False, markup=False, soft_wrap=False)
    if not out.is_terminal:
        out.width = out.measure(table, options=out.options.update(width=ENDLESS)).maximum
    out.print(table)


class FactsColumn(TextColumn):
    """Show the facts of a bar in one line, which is cut off where the terminal is too narrow."""

    def render(self, task: Task) -> Text:
        """Return the facts of a bar as text that is not wrapped."""
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class BarProgress(Progress):
    """Draw progress as bars on standard error, with the library rich."""

    def __init__(self) -> None:
        super().__init__()
        whole: Any = {"table_column": Column(no_wrap=True)}
        self._bars = Bars(
            TextColumn("{task.description}", **whole),
            BarColumn(bar_width=24 if console.width >= WIDE else 12, **whole),
            TextColumn("{task.percentage:>3.0f}%", **whole),
            TimeElapsedColumn(**whole),
            TimeRemainingColumn(**whole),
            FactsColumn("{task.fields[facts]}", table_column=Column()),
            console=console,
            refresh_per_second=4,
        )
        self._tasks: dict[str, Any] = {}
        self._facts: dict[str, str] = {}
        try:
            self._bars.start()
        except RuntimeError:  # no thread to draw them: give the terminal back
            self._bars.stop()
            raise

    def task(self, description: str, done: float, total: float | None) -> None:
        """Draw or advance the bar of this description."""
        if description not in self._tasks:
            for task in self._bars.tasks:  # what had no known end has ended by now
                if task.total is None:
                    self._bars.update(task.id, total=1, completed=1)
            self._tasks[description] = self._bars.add_task(description, total=total, facts="")
        self._bars.update(self._tasks[description], completed=done, total=total)

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text, markup=False, soft_wrap=True)

    def row(self, row: dict[str, Any], total_steps: int | None, **facts: float | None) -> None:
        """Advance the bar of training, and show loss, speed and validation beside it."""
        self._facts["loss"] = f"loss {row['loss']:.3f}"
        self._facts["speed"] = f"{row['tokens_per_s']:,.0f} tok/s"
        if "val_bits_per_byte" in row:
            self._facts["val"] = f"{row['val_bits_per_byte']:.3f} bits/byte"
        self.task("training", row["step"], total_steps)
        shown = "  ".join(self._facts.values())
        self._bars.update(self._tasks["training"], facts=shown)

    def close(self) -> None:
        """Stop drawing; the bars stay on the screen as they are."""
        self._bars.stop()


def started_as() -> str:
    """Return the command that started this process, for the user to type again."""
    script = sys.argv[0]
    if script.endswith("__main__.py") or not Path(script).is_file():
        return "python -m headrace"
    return "headrace" if shutil.which("headrace") else script


def make_progress(as_json: bool) -> Progress:
    """Return what shows progress: bars in a terminal, lines in a log.

    Only the first rank shows any, and none where the verb prints JSON. A verb that another one
    calls shows it as that one says.
    """
    if (caller := shown.get()) is not None:
        return Borrowed(caller)
    if as_json or os.environ.get("RANK", "0") != "0":
        return Progress()
    lines = Lines(_logs())
    return Several(BarProgress(), lines) if console.is_terminal else lines


def probe_progress() -> Progress:
    """Return what shows on standard error how far probes are: bars, or lines in a log."""
    return BarProgress() if console.is_terminal else Lines([sys.stderr])


def _logs() -> list[TextIO]:
    """Return standard error and standard output where they are no terminal.

    If both go to one file, only standard error is returned.
    """
    streams: list[TextIO] = [] if console.is_terminal else [sys.stderr]
    try:
        out, error = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
        same = bool(streams) and (out.st_dev, out.st_ino) == (error.st_dev, error.st_ino)
        if not same and not sys.stdout.isatty():
            streams.append(sys.stdout)
    except (OSError, ValueError, AttributeError):  # it is no file, or shut
        pass
    return streams
