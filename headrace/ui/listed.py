"""Look at each run of a folder: whether it goes on, how it ended, or why it cannot be read."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeVar

import numpy as np

from headrace.core.command import train_command
from headrace.core.errors import HeadraceError, interpreting
from headrace.core.files import shell
from headrace.core.remedy import NONE, Remedy
from headrace.core.units import format_seconds
from headrace.report.growing import GrowingRun
from headrace.report.run_files import Report, RunFiles, read_report
from headrace.report.words import bits, count, seconds, verdict, whole
from headrace.tuner.path import PATH
from headrace.tuner.recorded import read_tuning, readings_in
from headrace.ui.runs_folder import RunsFolder, changed_s, is_locked, is_run

QUIET_S = 60.0
"""Seconds without a new row after which a run counts as stopped where its lock cannot be seen."""
QUIET_STEPS = 20.0
"""Steps' worth of seconds without a new row, likewise, for runs of long steps."""
MOST_KEPT, MOST_GROWING = 512, 32
"""Most runs of which the server remembers the report, and the rows so far."""

T = TypeVar("T")
ListedState = Literal["running", "stopped", "ended", "damaged", "tuning"]


class Remembered:
    """Remember what was made of files until the files change."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, version: Any, make: Callable[[], T]) -> T:
        """Return what was made for `key` at this version of its files, or make it now."""
        with self._lock:
            if key in self._kept and self._kept[key][0] == version:
                self._kept.move_to_end(key)
                return self._kept[key][1]
        made = make()
        with self._lock:
            self._kept[key] = version, made
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made


@dataclass(frozen=True)
class ListedRun:
    """Hold a line of the list of runs.

    Args:
        name: its name in the folder.
        state: what it is doing.
        tone: the tone of its badge: "good", "bad" or "plain".
        badge: its state in a few words.
        sentence: how it ended, or how far it has come.
        changed_s: when its files changed last, in seconds since 1970.
        loss: validation in bits per byte, the last; "" where it has none.
        steps: how many it trained; "" where that is not known.
        took: how long it took; "" where that is not known.
        remedy: what may be done about it.
    """

    name: str
    state: ListedState
    tone: str
    badge: str
    sentence: str
    changed_s: float
    loss: str = ""
    steps: str = ""
    took: str = ""
    remedy: Remedy = NONE


class Looker:
    """Look at the runs of a folder, and remember what did not change."""

    def __init__(self, folder: RunsFolder) -> None:
        self.folder = folder
        self._reports, self._growing = Remembered(), Remembered(MOST_GROWING)

    def all(self) -> list[ListedRun]:
        """Return a line for each run and tuning, the newest first."""
        return [self.one(name) for name in self.folder.names()]

    def one(self, name: str) -> ListedRun:
        """Return the line of a run or a tuning; one that cannot be read says why."""
        path = self.folder.root / name
        try:
            with interpreting(f"a file in {path}", f"headrace report {shell(path)}"):
                path = self.folder.find(name)
                if not is_run(path):
                    return _tuning(path)
                report = self.report(path)
                return self._going(path) if report is None else _ended(path, report)
        except (HeadraceError, OSError) as error:
            known = isinstance(error, HeadraceError)
            words = error.message if known else str(error)
            remedy = error.remedy if known else NONE
            return ListedRun(
                name, "damaged", "bad", "Cannot be read", words, _changed(path), remedy=remedy
            )

    def report(self, path: Path) -> Report | None:
        """Return the report of a run that has ended; None of one that has not.

        Raises:
            ConfigError: report.json is damaged.
        """
        file = path / "report.json"
        try:
            about = file.stat()
        except FileNotFoundError:
            return None
        version = (about.st_mtime_ns, about.st_size, about.st_ino)
        report = self._reports.get(path, version, lambda: read_report(file, ended=False))
        return None if report.status == "running" else report

    def growing(self, path: Path) -> RunFiles:
        """Return the files of a run that has not ended, as far as it has come.

        Raises:
            ConfigError: a file of it is damaged.
        """
        return self._growing.get(path, None, lambda: GrowingRun(path)).read()

    def _going(self, path: Path) -> ListedRun:
        """Return the line of a run that has not ended."""
        run, since_s = self.growing(path), time.time() - changed_s(path)
        report, going = run.report, is_going(path, run)
        known = report.steps is not None
        ago = f"its last row is {format_seconds(max(since_s, 0.0))} old"
        sentence = verdict(report).sentence
        loss = run.metrics["loss"]
        if known and len(loss) and np.isfinite(loss[-1]):
            sentence = f"{sentence[:-1]}; loss {loss[-1]:.3f} nats per token."
        if not known:
            sentence = "It prepares its data or its model; no step is complete."
        if not going:
            sentence = (
                f"It ended without a report, or hangs: {ago}. {sentence}"
                if known
                else ("It ended before its first step.")
            )
        return ListedRun(
            name=path.name,
            state="running" if going else "stopped",
            tone="good" if going else "bad",
            badge=("Running" if known else "Starting") if going else "Stopped",
            sentence=sentence,
            changed_s=changed_s(path),
            loss=bits(report.evaluated[-1].bits_per_byte) if report.evaluated else "",
            steps=whole(report.steps) if known else "",
            took=seconds(report.wall_s) if known else "",
            remedy=NONE if going else Remedy(text=train_command(path, "--resume")),
        )


def is_going(path: Path, run: RunFiles) -> bool:
    """Return whether a run without a report is being trained by a process.

    Its lock says so where it can be seen. On another machine of a shared file system, and on macOS,
    a new row does.
    """
    if is_locked(path):
        return True
    step_s = run.metrics["step_s"]
    usual_s = float(np.nanmedian(step_s)) if np.isfinite(step_s).any() else 0.0
    return time.time() - changed_s(path) < max(QUIET_S, QUIET_STEPS * usual_s)


def _ended(path: Path, report: Report) -> ListedRun:
    """Return the line of a run that has ended."""
    ruling = verdict(report)
    last = report.evaluated[-1].bits_per_byte if report.evaluated else None
    return ListedRun(
        name=path.name,
        state="ended",
        tone=ruling.tone,
        badge=ruling.badge,
        sentence=ruling.sentence,
        changed_s=changed_s(path),
        loss="" if last is None else bits(last),
        steps=whole(report.steps) if report.steps is not None else "",
        took=seconds(report.wall_s) if report.wall_s is not None else "",
    )


def _tuning(path: Path) -> ListedRun:
    """Return the line of a tuning."""
    if not (path / PATH).is_file():
        kept = count(readings_in(path))
        going = is_locked(path)
        badge = "Tuning" if going else "Tuning, not ended"
        words = f"{kept} readings so far; its path is written when it ends."
        return ListedRun(path.name, "tuning", "plain", badge, words, changed_s(path))
    tuning = read_tuning(path)
    kept = [row for row in tuning.path if row.verdict == "kept"]
    words = tuning.result or f"{len(tuning.path)} plans tried, {len(kept)} changes kept."
    took = "" if tuning.seconds is None else seconds(tuning.seconds)
    tone = "good" if kept else "plain"
    return ListedRun(path.name, "tuning", tone, "Tuned", words, changed_s(path), took=took)


def _changed(path: Path) -> float:
    try:
        return changed_s(path)
    except OSError:
        return 0.0
