"""Make the report that a run which has not ended has so far, so that the doctor can judge it.

A run writes report.json when it ends. Until then metrics.jsonl has a row for each step: its time by
phase, its loss, and its tokens without a target. That is what is judged, by the same rules as a run
that has ended. What only the end of a run tells is left out, and no rule speaks of it: peak memory,
traces, whether techniques are still in force, and the runs beside it. A report that was written
before a resume is not read: it is of another part of the run.

Nothing is measured meanwhile, since a probe beside the run would slow both.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from headrace.doctor.recipe import plan_tables
from headrace.observe import PHASES, REPORT_FORMAT
from headrace.observe.waits import waits_of
from headrace.train.run_folder import RunFolder

KnownRow = Mapping[str, float | None]


def has_ended(report: Mapping[str, Any] | None) -> bool:
    """Return whether a report is that of a run which has ended.

    Args:
        report: the object of report.json; None where there is none. A resumed run has one that says
            that it is running.
    """
    return report is not None and report.get("status") != "running"


def report_so_far(folder: Path, rows: Sequence[KnownRow]) -> dict[str, Any]:
    """Return what report.json would hold by now of what the doctor reads; see the module.

    Args:
        folder: the folder of the run.
        rows: the rows of its metrics.jsonl, of finite numbers or None.

    Raises:
        RunError: environment.json is damaged.
    """
    environment = RunFolder(folder).read("environment") or {}
    data = (plan_tables(folder) or {}).get("data")
    chats = isinstance(data, Mapping) and "chat" in data
    wasted = _known(rows, "wasted_tokens")
    step_s = _known(rows, "step_s")
    tokens = max((row.get("tokens") or 0 for row in rows), default=0)
    return {
        "format": REPORT_FORMAT,
        "status": "running",
        "tokens": tokens,
        "phase_s": {name: sum(_known(rows, f"{name}_s")) for name in PHASES},
        "measured_steps": len(rows),
        "input_wait": waits_of(_known(rows, "input_s"), median(step_s) if step_s else None),
        "peak_memory_bytes": dict.fromkeys(("allocated", "reserved", "predicted", "method")),
        "memory_lines": [],
        "wasted_token_fraction": _share(sum(wasted), tokens) if wasted else None,
        "padding_fraction": None,  # the packer of the run's process knows it
        "data": {"chat": {}} if chats else {},
        "val": list(_looks(rows)),
        "signals": {"device": str(environment.get("device") or "")},
    }


def _looks(rows: Sequence[KnownRow]) -> Iterator[dict[str, float]]:
    """Yield the validations of the rows, as a report has them."""
    for row in rows:
        loss = row.get("val_loss_nats")
        if loss is not None and isfinite(loss):
            yield {
                "step": row.get("step") or 0,
                "tokens": row.get("tokens") or 0,
                "loss_nats": loss,
            }


def _known(rows: Sequence[KnownRow], key: str) -> list[float]:
    """Return a number of each row that has it."""
    values = (row.get(key) for row in rows)
    return [value for value in values if value is not None and isfinite(value)]


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None
