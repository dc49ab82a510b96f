"""Share out a CPU's time to operations, in a trace without a device.

An operation's own time is its time less that of the operations which it calls on the same thread.
Threads of one operation are not in a trace, and neither is what stands between operations; so this
is a split of what was computed, and no verdict.
"""

import json
from pathlib import Path
from typing import Any

from headrace.doctor.trace.file import CATEGORIES, text_of, times_of

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear")
FAMILIES = {"attention": ("attention",), "optimizer": ("_fused_", "_foreach_")}
"""Family -> parts of its operations' names; the first that fits, after MATMULS."""


def host_families(path: Path) -> dict[str, float]:
    """Return shares of all operations' own time, the largest first.

    There are none without operations, or where the time of one cannot be read.

    Raises:
        ConfigError: the file cannot be read.
    """
    spans: dict[Any, list[tuple[float, float, str]]] = {}
    odd: list[Any] = []

    def take(event: dict[str, Any]) -> dict[str, Any] | None:
        if CATEGORIES.get(str(event.get("cat")).lower()) != "op" or event.get("ph") != "X":
            return None
        if (times := times_of(event)) is None:
            odd.append(event.get("name"))
        else:
            start, spent = times
            thread = spans.setdefault((str(event.get("pid")), str(event.get("tid"))), [])
            thread.append((start, start + spent, str(event.get("name"))))
        return None

    try:
        json.loads(text_of(path), object_hook=take, strict=False)
    except (ValueError, RecursionError):
        return {}
    if odd:
        return {}
    sums: dict[str, float] = {}
    for thread in spans.values():
        for name, own in _own(thread):
            family = _family(name)
            sums[family] = sums.get(family, 0.0) + own
    whole = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda pair: -pair[1])
    return {family: spent / whole for family, spent in ordered} if whole else {}


def _own(spans: list[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """Return each operation's name and its time less its children's, on one thread."""
    own_times: list[tuple[str, float]] = []
    inside: list[list[Any]] = []  # end, name, own
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while inside and inside[-1][0] <= start:
            _, done, own = inside.pop()
            own_times.append((done, own))
        if inside:
            inside[-1][2] -= min(end, inside[-1][0]) - start  # another tool's may overlap
        inside.append([end, name, end - start])
    return own_times + [(name, own) for _, name, own in inside]


def _family(name: str) -> str:
    low = name.lower()
    if low in MATMULS:
        return "products"
    for family, parts in FAMILIES.items():
        if any(part in low for part in parts):
            return family
    return "elementwise" if low.startswith("aten::") else "other"
