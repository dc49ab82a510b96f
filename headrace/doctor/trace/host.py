"""What a trace without a device tells: to which operations a CPU's time went.

An operation's own time is its time less that of the operations which it calls on the same thread.
Threads of one operation are not in a trace, and neither is what stands between operations; so this
is a split of what was computed, and no verdict.
"""

import json
from pathlib import Path
from typing import Any

from headrace.doctor.trace.file import KINDS, text_of, times_of

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear")
FAMILIES = {"attention": ("attention",), "optimizer": ("_fused_", "_foreach_")}
"""family -> parts of its operations' names; the first that fits, after products"""


def host_families(path: Path) -> dict[str, float]:
    """Shares of all operations' own time, the largest first.

    Empty without operations, and where the time of one cannot be read.

    Raises:
        ConfigError: the file cannot be read.
    """
    spans: dict[Any, list[tuple[float, float, str]]] = {}
    odd: list[Any] = []

    def take(found: dict[str, Any]) -> dict[str, Any] | None:
        if KINDS.get(str(found.get("cat")).lower()) != "op" or found.get("ph") != "X":
            return None
        if (times := times_of(found)) is None:
            odd.append(found.get("name"))
        else:
            start, spent = times
            thread = spans.setdefault((str(found.get("pid")), str(found.get("tid"))), [])
            thread.append((start, start + spent, str(found.get("name"))))
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
    """Each operation's name and its time less its children's, on one thread."""
    found: list[tuple[str, float]] = []
    inside: list[list[Any]] = []  # end, name, own
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while inside and inside[-1][0] <= start:
            _, done, own = inside.pop()
            found.append((done, own))
        if inside:
            inside[-1][2] -= min(end, inside[-1][0]) - start  # another tool's may overlap
        inside.append([end, name, end - start])
    return found + [(name, own) for _, name, own in inside]


def _family(name: str) -> str:
    low = name.lower()
    if low in PRODUCTS:
        return "products"
    for family, parts in FAMILIES.items():
        if any(part in low for part in parts):
            return family
    return "elementwise" if low.startswith("aten::") else "other"
