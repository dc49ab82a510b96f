"""Find the newest profiler window of a run, and list its kernels for a reader.

The verdicts on the same traces are those of `headrace.doctor.trace`; here is no threshold.
"""

from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.units import format_seconds
from headrace.doctor.trace.ranks import measure_traces
from headrace.observe.profiler import traces

LONGEST = 12
"""Kernels that a reader sees."""
HEAD = ["kernel", "class", "a step", "share", "bound"]


def newest(folder: Path) -> list[Path]:
    """Return the traces of the newest window, one a rank, of a run or of a folder of traces."""
    paths = traces(folder / "traces") or traces(folder)
    last = max((step for step, _ in paths), default=None)
    return [path for (step, _), path in paths.items() if step == last]


def kernel_lines(folder: Path) -> list[list[str]]:
    """Return the longest kernels of the newest window's first rank, as in HEAD.

    There are none without a window that can be read, or without a step on a device.
    """
    paths = newest(folder)
    try:
        ranks = measure_traces(paths).ranks if paths else ()
    except ConfigError:
        return []  # damaged: `diagnose_run` says so
    first = next((rank for rank in ranks if rank.steps), None)
    if first is None:
        return []
    lines = []
    for row in first.kernels[:LONGEST]:
        bound = row.bound + (f" {row.of_roof:.0%}" if row.of_roof is not None else "")
        name = row.name if len(row.name) <= 60 else f"{row.name[:57]}..."
        spent_s = row.total_s / len(first.steps)
        lines.append([name, row.family, format_seconds(spent_s), f"{row.share:.1%}", bound])
    return lines
