"""Read metrics.jsonl, the rows that a run writes while it trains, as columns.

The file may end in half a row (the process was killed while it wrote) and may repeat steps (the run
was resumed from an older checkpoint): the last row of a step is the one that counts.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import ConfigError
from headrace.core.files import parse_json, shell

COLUMNS = (
    "step",
    "tokens",
    "wall_s",
    "loss",
    "step_s",
    "input_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
)
"""Columns that a page draws."""


def read_text(path: Path) -> str:
    """Return a file as text.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    aside = f"mv {shell(path)} {shell(f'{path}.damaged')}"
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: it is not UTF-8 ({error.reason})", aside) from None
    except OSError as error:
        mend = f"chmod u+r {shell(path)}" if isinstance(error, PermissionError) else aside
        raise ConfigError(f"{path} cannot be read: {error}", mend) from None


def read_metrics(path: Path) -> dict[str, NDArray[np.float64]]:
    """Return the columns of metrics.jsonl; empty arrays when there is no such file.

    Raises:
        ConfigError: it cannot be read, or a line is no row.
    """
    lines = read_text(path).split("\n") if path.exists() else [""]
    rows: dict[float, list[float]] = {}
    # What follows the last newline is a row that was being written when the process ended.
    for number, line in enumerate(lines[:-1], start=1):
        values = metric_values(line, number, path)
        rows[values[0]] = values
    table = np.array([rows[step] for step in sorted(rows)], dtype=np.float64)
    return dict(zip(COLUMNS, table.reshape(-1, len(COLUMNS)).T, strict=True))


def metric_values(
    line: str | bytes, number: int, path: Path, columns: Sequence[str] = COLUMNS
) -> list[float]:
    """Return what a line of metrics.jsonl holds of some columns; NaN where it holds nothing.

    Args:
        line: the line.
        number: its number in the file, from 1, for a message.
        path: the file.
        columns: the names of the columns.

    Raises:
        ConfigError: the line is no row of metrics.
    """
    try:
        row = parse_json(line)
        return [math.nan if row.get(c) is None else float(row[c]) for c in columns]
    except (AttributeError, TypeError, ValueError):
        message = f"{path} line {number} is not a row of metrics: {line[:60]!r}"
        raise ConfigError(message, f"sed -i {number}d {shell(path)}") from None
