"""What the signals of a loop say about its steady steps, in one shape whoever wrote it.

A run of Headrace leaves report.json and a row of metrics.jsonl for each step; `headrace.watch`
leaves one file. A number that nobody read is None, and the doctor says that it was not measured
rather than guess. Steps that compiled, and the first ones, are no part of a window.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

from headrace.core.command import again
from headrace.core.errors import RunError
from headrace.core.files import shell

WARM_STEPS = 2
"""First steps of a session that are never steady: caches fill, and states are made."""
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
NORMAL = 1.4826
"""A normal deviation over its median absolute deviation."""
NEAR = 8
"""Steps that are one level."""
NEWEST_STEPS = 2048
"""Steps that jumps are looked for in."""


@dataclass(frozen=True)
class Window:
    """The steady steps of one run, the oldest first.

    Args:
        step_s: seconds of each step.
        input_s: of them, those in which the device waited for the loader.
        forward_s, backward_s: the device's work on the model.
        communication_s: exposed communication.
        slack_s: seconds in which the host waited for the device. Near zero, the host is what the
            step waits for, or a step's launches do not fit into the device's queue.
        dry: 1 for each step at whose beginning the device had nothing left to do, else 0.
        loss, grad_norm: of every step, not of the steady ones only; nan where they were not finite.
        useful_share: of the tokens, what a loss counted.
        recompile_s: seconds that each step which compiled after the first ones took more than
            others.
        graph_breaks: between compiled graphs.
        tiny: operations of a step that are views or touch a page at most.
        host_s: seconds of the host for them.
        wide_flops: of the products' FLOPs, those in a dtype wider than the plan's.
        wider: how many times as wide.
        late_s: by how much the last rank of a step is behind the others' median, in the median
            step.
        waited_s: what this rank of it waited for the last one, a mean.
        last, last_share: the rank that is last most often, and in how much of the steps.
        allocated_bytes, reserved_bytes: peaks; of a CPU the process's own.
        capacity_bytes: the device's memory.
        alloc_retries: times the allocator gave back its cache to go on.
        savings: of each that trades time for memory the "bytes" that it takes off the peak, the
            share of a step's FLOPs that it does "again" and the bytes "moved" for it, by the
            ledger.
        untrained: of the optimizer's parameters, those that never had a gradient.
        inactive: names of techniques that were asked for and are not in force.
        device: "cuda", "cpu" or "mps".
        ended_by: class of the error that ended the run, "" where none did.
        message: of that error, its first line.
    """

    step_s: tuple[float, ...] = ()
    input_s: tuple[float, ...] | None = None
    forward_s: tuple[float, ...] | None = None
    backward_s: tuple[float, ...] | None = None
    communication_s: tuple[float, ...] | None = None
    slack_s: tuple[float, ...] | None = None
    dry: tuple[float, ...] | None = None
    loss: tuple[float, ...] | None = None
    grad_norm: tuple[float, ...] | None = None
    useful_share: float | None = None
    recompile_s: tuple[float, ...] = ()
    graph_breaks: int | None = None
    tiny: int | None = None
    host_s: float | None = None
    wide_flops: float | None = None
    wider: float = 1.0
    late_s: float | None = None
    waited_s: float | None = None
    last: int | None = None
    last_share: float = 0.0
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    capacity_bytes: float | None = None
    alloc_retries: int | None = None
    savings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    untrained: float = 0.0
    inactive: tuple[str, ...] = ()
    device: str = ""
    ended_by: str = ""
    message: str = ""

    @property
    def steps(self) -> int:
        """How many steady steps there are."""
        return len(self.step_s)

    def share(self, series: Sequence[float] | None) -> float | None:
        """Of the steps' time, what a phase took; None where it was not read."""
        whole_s = sum(self.step_s)
        return None if series is None or not whole_s else sum(series) / whole_s


def steady(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows behind a session's first ones that neither compiled nor ran under a profiler."""
    taken: Counter[Any] = Counter()
    found = []
    for row in rows:
        taken[row.get("session")] += 1
        steady = not row.get("compile_s") and not row.get("traced")
        if taken[row.get("session")] > WARM_STEPS and steady:
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
        RunError: a line before the last one is no JSON object, or it is no text.
    """
    rows: list[dict[str, Any]] = []
    aside = f"mv {shell(file)} {shell(f'{file}.damaged')}"
    mend = f"{aside}; {again((file.parent, file.parent), verb='doctor')}"
    try:
        lines = [n for n in file.read_text().splitlines() if n.strip()] if file.exists() else []
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}", mend) from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        except RecursionError:
            told = f"{file} line {number} holds lists in lists too deep to be read"
            raise RunError(told, mend) from None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise RunError(f"{file} line {number} is damaged", mend)
    return rows


def of_run(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Window:
    """A run's window.

    Args:
        report: report.json, or what `headrace.watch` reports.
        rows: of metrics.jsonl.
    """
    kept, waste = steady(rows), report["wasted_token_fraction"]
    memory, watched = report["peak_memory_bytes"], report.get("signals") or {}
    measured = memory["method"] == "allocator"
    step_s = _step_s(kept)
    read: Callable[[str], tuple[float, ...] | None] = lambda key: series(kept, key)  # noqa: E731
    return Window(
        step_s=step_s,
        input_s=read("input_s"),
        forward_s=read("forward_s"),
        backward_s=read("backward_s"),
        communication_s=read("communication_exposed_s"),
        slack_s=read("slack_s"),
        dry=read("dry"),
        loss=series(rows, "loss"),
        grad_norm=series(rows, "grad_norm"),
        useful_share=None if waste is None else 1.0 - waste,
        recompile_s=_recompiles(rows, median(step_s)) if step_s else (),
        graph_breaks=watched.get("graph_breaks"),
        **_operations(watched),
        **_ranks(watched),
        allocated_bytes=memory["allocated"] if measured else None,
        reserved_bytes=memory["reserved"],
        capacity_bytes=watched.get("capacity_bytes"),
        alloc_retries=watched.get("alloc_retries"),
        savings=watched.get("savings") or {},
        untrained=watched.get("untrained_share") or 0.0,
        inactive=tuple(watched.get("lost_techniques") or ()),
        device=watched.get("device", ""),
        ended_by=report.get("error", "RunError") if report.get("status") == "failed" else "",
        message=report.get("message", "").partition("\n")[0],
    )


def _step_s(rows: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Of each step, without what a loop did between it and the next."""
    whole, between = series(rows, "step_s") or (), series(rows, "other_s") or (0.0,) * len(rows)
    return tuple(a - b for a, b in zip(whole, between, strict=False))


def _recompiles(rows: Sequence[Mapping[str, Any]], usual_s: float) -> tuple[float, ...]:
    """Seconds that steps behind a session's first ones took more because they compiled."""
    taken: Counter[Any] = Counter()
    found = []
    for row in rows:
        taken[row.get("session")] += 1
        if taken[row.get("session")] > WARM_STEPS and row.get("compile_s"):
            found.append(max(0.0, row["step_s"] - row.get("other_s", 0.0) - usual_s))
    return tuple(found)


def _operations(watched: Mapping[str, Any]) -> dict[str, Any]:
    """What was dispatched in the step that was looked at."""
    seen = watched.get("operations")
    if not seen:
        return {}
    flops, width = seen["product_flops"], WIDTHS[watched["precision"]]
    wide = {kind: n for kind, n in flops.items() if WIDTHS.get(kind, 0) > width}
    return {
        "tiny": seen["views"] + seen["tiny"], "host_s": seen["host_s"],
        "wide_flops": sum(wide.values()) / sum(flops.values()) if flops else None,
        "wider": max((WIDTHS[kind] for kind in wide), default=width) / width,
    }  # fmt: skip


def _ranks(watched: Mapping[str, Any]) -> dict[str, Any]:
    """How evenly ranks work."""
    told = watched.get("ranks")
    if not told:
        return {}
    return {**{name: told[name] for name in ("late_s", "last", "last_share")},
            "waited_s": told["waited_s"][0]}  # fmt: skip


# --- series of numbers -----------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """When a number jumps: deviations, the most numbers before it that tell them, the fewest."""

    sigmas: float
    window: int
    fewest: int


def jumps(values: Sequence[float], limits: Limits, least: float) -> int:
    """How many numbers lie far above those before them that did not, and by `least` of their level.

    Deviations come from the median absolute difference between neighbours, so neither a trend nor
    the jumps themselves widen them; numbers that jumped are left out of what later ones are
    compared with (as ZClip does, arXiv 2504.02507). What stays up for more than NEAR steps is a
    new level and no jump.
    """
    calm: list[float] = []
    count, up = 0, 0
    for value in values[-NEWEST_STEPS:]:
        level = median(calm[-NEAR:]) if calm else value
        if len(calm) >= limits.fewest:
            spread = deviation(calm[-limits.window :])
            if value > level + max(limits.sigmas * spread, least * abs(level)):
                count, up = count + 1, up + 1
                if up <= NEAR:
                    continue
                count, calm = count - up, []
        calm.append(value)
        up = 0
    return count


def deviation(values: Sequence[float]) -> float:
    """Of one number, by the median absolute difference of neighbours: robust, without the trend."""
    steps = [abs(b - a) for a, b in pairwise(values)]
    return median(steps) * NORMAL / 2**0.5 if steps else 0.0


def rises(values: Sequence[float], sigmas: float, least: float) -> bool:
    """Whether the last quarter lies above the first by more than scatter, and by `least` of it."""
    if len(values) < 16:
        return False
    quarter = len(values) // 4
    first, last = median(values[:quarter]), median(values[-quarter:])
    return last - first > max(sigmas * deviation(values), least * abs(first))


def relapsed(values: Sequence[float], sigmas: float, least: float, steps: int) -> int:
    """How many numbers lie far above the lowest level before them, at least `steps` in a row.

    A level is the median of three neighbours; far is by so many deviations and by `least` of it.
    """
    scatter = sigmas * deviation(values)
    best, count, run = float("inf"), 0, 0
    for index, value in enumerate((*values, -float("inf"))):
        if value > best + max(scatter, least * abs(best)):
            run += 1
        else:
            count, run = count + run * (run >= steps), 0
        best = min(best, median(values[max(0, index - 2) : index + 1] or (best,)))
    return count
