"""What the signals of a loop say about its steady steps, in one shape whoever wrote it.

A run of Headrace leaves report.json and a row of metrics.jsonl for each step; `headrace.watch`
leaves one file. A number that nobody read is None, and the doctor says that it was not measured
rather than guess. Steps that compiled, and the first ones, are no part of a window.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

from headrace.core.errors import RunError

WARM_STEPS = 2
"""First steps of a session that are never steady: caches fill, and states are made."""


@dataclass(frozen=True)
class Window:
    """The steady steps of one run, the oldest first.

    Args:
        step_s: seconds of each step.
        input_s: of them, those in which the device waited for the loader.
        forward_s, backward_s: the device's work on the model.
        communication_s: exposed communication.
        slack_s: seconds in which the host waited for the device. Near zero, the host is what the
            step waits for.
        loss, grad_norm: of each step; nan where they were not finite.
        useful_share: of the tokens, what a loss counted.
        late_graphs: compilations in the later half of the steps.
        allocated_bytes, reserved_bytes: peaks.
        capacity_bytes: the device's memory.
        alloc_retries: times the allocator gave back its cache to go on.
        saves_memory: names of what is on that trades time for memory.
        inactive: names of techniques that were asked for and are not in force.
        device: "cuda", "cpu" or "mps".
    """

    step_s: tuple[float, ...] = ()
    input_s: tuple[float, ...] | None = None
    forward_s: tuple[float, ...] | None = None
    backward_s: tuple[float, ...] | None = None
    communication_s: tuple[float, ...] | None = None
    slack_s: tuple[float, ...] | None = None
    loss: tuple[float, ...] | None = None
    grad_norm: tuple[float, ...] | None = None
    useful_share: float | None = None
    late_graphs: int | None = None
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    capacity_bytes: float | None = None
    alloc_retries: int | None = None
    saves_memory: tuple[str, ...] = ()
    inactive: tuple[str, ...] = ()
    device: str = ""

    @property
    def steps(self) -> int:
        """How many steady steps there are."""
        return len(self.step_s)

    def share(self, series: Sequence[float] | None) -> float | None:
        """Of the steps' time, what a phase took; None where it was not read."""
        whole_s = sum(self.step_s)
        return None if series is None or not whole_s else sum(series) / whole_s


def steady(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of steps that are behind a session's first ones and did not compile."""
    taken: Counter[Any] = Counter()
    found = []
    for row in rows:
        taken[row.get("session")] += 1
        if taken[row.get("session")] > WARM_STEPS and not row.get("compile_s"):
            found.append(row)
    return found


def series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[float, ...] | None:
    """A number of each row, nan for null; None where a row lacks it."""
    if not rows or any(key not in row for row in rows):
        return None
    return tuple(nan if row[key] is None else float(row[key]) for row in rows)


def finite(values: Sequence[float] | None) -> tuple[float, ...]:
    """Those that are numbers."""
    return tuple(value for value in values or () if isfinite(value))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, without a last line that was cut off; none where it is not there.

    Raises:
        RunError: a line before the last one is no JSON object.
    """
    rows: list[dict[str, Any]] = []
    try:
        lines = [n for n in file.read_text().splitlines() if n.strip()] if file.is_file() else []
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file} cannot be read: {error}", "headrace doctor on another run"
        ) from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise RunError(f"{file} line {number} is damaged", "headrace doctor on another run")
    return rows


def of_run(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Window:
    """A run's window.

    Args:
        report: report.json, or what `headrace.watch` reports.
        rows: of metrics.jsonl.
    """
    kept, waste = steady(rows), report["wasted_token_fraction"]
    between = series(kept, "other_s") or (0.0,) * len(kept)
    memory, watched = report["peak_memory_bytes"], report.get("signals") or {}
    read: Callable[[str], tuple[float, ...] | None] = lambda key: series(kept, key)  # noqa: E731
    return Window(
        step_s=tuple(a - b for a, b in zip(read("step_s") or (), between, strict=False)),
        input_s=read("input_s"),
        forward_s=read("forward_s"),
        backward_s=read("backward_s"),
        communication_s=read("communication_exposed_s"),
        slack_s=read("slack_s"),
        loss=read("loss"),
        grad_norm=read("grad_norm"),
        useful_share=None if waste is None else 1.0 - waste,
        late_graphs=sum(bool(row.get("compile_s")) for row in rows[len(rows) // 2 :]),
        allocated_bytes=memory["allocated"] if memory["method"] == "allocator" else None,
        reserved_bytes=memory["reserved"] if memory["method"] == "allocator" else None,
        capacity_bytes=watched.get("capacity_bytes"),
        alloc_retries=watched.get("alloc_retries"),
        saves_memory=tuple(watched.get("saves_memory", ())),
        inactive=tuple(watched.get("lost_techniques") or ()),
        device=watched.get("device", ""),
    )
