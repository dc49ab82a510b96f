"""Explain which techniques stand beside which, by the outcome of tests.

`matrix.json` is written by `pytest tests/distributed/test_matrix.py --matrix FILE` and by nothing
else: a pair is `equal` when its run equals the same plan without what computes the baseline's
numbers, in one process; `refuses` with the message that a user sees; `gpu` when this pair needs a
device that the tests of the matrix do not have.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("matrix.json")
MARKS = {"equal": "=", "refuses": "x", "gpu": "g"}


def read_matrix() -> dict[str, Any]:
    """Return the outcome of every pair.

    The value is {"torch": ..., "pairs": {"a b": {"outcome": ..., "why": ...}}}.
    """
    return json.loads(SOURCE.read_text())


def explain_matrix(matrix: dict[str, Any]) -> str:
    """Render the matrix as text: a triangle, then every refusal with its reason."""
    pairs = matrix["pairs"]
    names = sorted({name for pair in pairs for name in pair.split()})
    wide = max(map(len, names))
    lines = ["pairs of techniques: = tested equal, x refuses (why is below), g needs a GPU", ""]
    for row, name in enumerate(names):
        marks = [MARKS[pairs[f"{other} {name}"]["outcome"]] for other in names[:row]]
        lines.append(f"{row + 1:>3} {name:<{wide}} " + "".join(f"{mark:>3}" for mark in marks))
    lines.append(" " * (wide + 5) + "".join(f"{n + 1:>3}" for n in range(len(names) - 1)))
    counts = Counter(pair["outcome"] for pair in pairs.values())
    lines += [
        "",
        f"{counts['equal']} tested equal, {counts['refuses']} refuse, "
        f"{counts['gpu']} need a GPU; torch {matrix['torch']}",
        "",
    ]
    lines += [
        f"{name.replace(' ', ' + ')}: {pair['why']}"
        for name, pair in sorted(pairs.items())
        if pair["outcome"] == "refuses"
    ]
    return "\n".join(lines)
