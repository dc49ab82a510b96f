"""Read a run that goes on: its metrics while they are written, as the report that it has so far.

A run writes report.json when it ends. Until then metrics.jsonl has a row for each step, and the
recorded plan says what was asked. `GrowingRun` makes a `Report` of these with what is known: loss,
validation, phases, speed. What only the end of a run tells is left unmeasured. A call reads what
was added to the file since the last one, so following a long run costs what a step costs. A row
that is being written is read when it is whole. A file that was cut or replaced, as a resumed run
does, is read from its beginning.
"""

import math
import tomllib
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.command import train_command
from headrace.core.errors import ConfigError
from headrace.core.files import recorded_plan, shell
from headrace.observe import PHASES, REPORT_FORMAT
from headrace.observe.waits import waits_of
from headrace.report.metrics import COLUMNS, metric_values
from headrace.report.run_files import Report, RunFiles

MORE = (
    "compile_s",
    "communication_exposed_s",
    "tokens_per_s",
    "val_loss_nats",
    "val_bits_per_byte",
)
"""Columns of metrics.jsonl that a report has summed up when a run has ended."""
LONGEST = 1 << 20
"""Bytes of a line beyond which it is no row of metrics; a row has some 600."""
FIRST_ROWS = 1024
"""Rows for which there is room at first; it doubles."""
Array = NDArray[np.float64]


class GrowingRun:
    """Follow the folder of a run that has not ended."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._table = np.empty((FIRST_ROWS, len(COLUMNS + MORE)))
        self._rows = self._at = self._number = self._file = 0
        self._reading = Lock()

    def read(self) -> RunFiles:
        """Return what is known of the run by now.

        Raises:
            ConfigError: a file of the run is damaged.
        """
        with self._reading:
            self._read_rows(self.directory / "metrics.jsonl")
            table = self._table[: self._rows].T.copy()
            columns: dict[str, Array] = dict(zip(COLUMNS + MORE, table, strict=True))
        plan = recorded_plan(self.directory)
        text = _text(plan) if plan.is_file() else ""
        report = _report(self.directory, _goal(text, plan), columns)
        return RunFiles(self.directory, report, columns, {}, text)

    def _read_rows(self, path: Path) -> None:
        """Read the whole lines that were added to the file; see the module."""
        if not path.is_file():
            self._begin(0)
            return
        try:
            with path.open("rb") as file:
                about = path.stat()
                if about.st_ino != self._file or about.st_size < self._at:
                    self._begin(about.st_ino)
                file.seek(self._at)
                while (line := file.readline(LONGEST)).endswith(b"\n"):
                    self._add(metric_values(line, self._number + 1, path, COLUMNS + MORE))
                    self._number += 1
                    self._at += len(line)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}", f"ls -l {shell(path)}") from None
        if len(line) == LONGEST:
            message = f"{path} line {self._number + 1} is longer than {LONGEST:,} bytes"
            raise ConfigError(message, f"mv {shell(path)} {shell(f'{path}.damaged')}")

    def _begin(self, file: int) -> None:
        self._rows, self._at, self._number, self._file = 0, 0, 0, file

    def _add(self, row: list[float]) -> None:
        """Add a row; it replaces those of its step and of later ones, which are trained again."""
        while self._rows and self._table[self._rows - 1, 0] >= row[0]:
            self._rows -= 1
        if self._rows == len(self._table):
            self._table = np.concatenate([self._table, np.empty_like(self._table)])
        self._table[self._rows] = row
        self._rows += 1


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", f"ls -l {shell(path)}") from None


def _goal(text: str, plan: Path) -> dict[str, Any]:
    """Return the table `goal` of a plan's text."""
    try:
        goal = tomllib.loads(text).get("goal", {})
    except (ValueError, RecursionError) as error:
        message = f"{plan} is damaged: {str(error) or 'its tables lie too deep'}"
        raise ConfigError(message, f"mv {shell(plan)} {shell(f'{plan}.damaged')}") from None
    numbers = goal.items() if isinstance(goal, dict) else ()
    return {key: value for key, value in numbers if isinstance(value, int | float)}


def _report(directory: Path, asked: dict[str, Any], columns: dict[str, Array]) -> Report:
    """Return the report of a run as far as it has come."""
    known = len(columns["step"]) > 0
    last = {name: _number(column[-1]) if known else None for name, column in columns.items()}
    phase_s = {name: columns.get(f"{name}_s") for name in PHASES}
    waits_s = columns["input_s"][np.isfinite(columns["input_s"])]
    values = {
        "format": REPORT_FORMAT,
        "name": directory.name,
        "status": "running",
        "goal": {"asked": asked, "reached": None},
        "steps": last["step"],
        "tokens": last["tokens"],
        "wall_s": last["wall_s"],
        "steady_tokens_per_s": steady_rate(columns),
        "model_flops_utilization": {"value": None},
        "peak_memory_bytes": {"allocated": None, "reserved": None, "predicted": None},
        "phase_s": {
            name: float(np.nansum(spent))
            for name, spent in phase_s.items()
            if spent is not None and np.isfinite(spent).any()
        },
        "wasted_token_fraction": None,
        "input_wait": waits_of([float(wait_s) for wait_s in waits_s], None),
        "val": _validations(columns),
        "dollars": None,
        "restarts": None,
        "skipped_steps": None,
        "techniques": {},
        "stream_sha256": None,
        "seed": None,
    }
    try:
        return Report.model_validate(values)
    except ValueError as error:
        first = str(error).splitlines()[1:2]
        message = f"{directory / 'metrics.jsonl'} is damaged: {' '.join(first)}"
        raise ConfigError(message, train_command(directory, "--resume")) from None


def _validations(columns: dict[str, Array]) -> list[dict[str, float | None]]:
    """Return a row for each evaluation that gave a number."""
    when = ("step", "tokens", "wall_s")
    known = np.isfinite(columns["val_bits_per_byte"])
    for name in ("step", "tokens"):
        known &= np.isfinite(columns[name])
    return [
        {name: _number(columns[name][at]) for name in when}
        | {
            "loss_nats": _number(columns["val_loss_nats"][at]),
            "bits_per_byte": _number(columns["val_bits_per_byte"][at]),
        }
        for at in np.flatnonzero(known)
    ]


def steady_rate(columns: dict[str, Array]) -> float | None:
    """Return the median of the tokens a second of steps that compiled nothing, without the first.

    Args:
        columns: those of metrics.jsonl, with `compile_s` and `tokens_per_s`.
    """
    rates = columns["tokens_per_s"][1:]
    steady = np.isfinite(rates) & (np.nan_to_num(columns["compile_s"][1:]) == 0)
    return float(np.median(rates[steady])) if steady.any() else None


def _number(value: float) -> float | int | None:
    """Return a number of a row: a whole one as such, and None for one that is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(value)
