"""Show which pairs of techniques work in one plan, by the outcome of tests.

`pytest tests/distributed/test_matrix.py --matrix FILE` writes `matrix.json`, and nothing else does.
A pair is `equal` when a run with both computes what one process computes without the techniques
that must not change a number. It is `refuses` when the plan is refused, with the message that a
user sees. It is `gpu` when it needs a device that the tests of the matrix do not have.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("matrix.json")
"""The file of outcomes."""
MARKS = {"equal": "=", "refuses": "x", "gpu": "g"}
"""Maps an outcome to the character that stands for it in the triangle."""


def read_matrix() -> dict[str, Any]:
    """Return the outcome of every pair of techniques.

    The value is {"torch": version, "pairs": {"a b": {"outcome": ..., "why": ...}}}, where "a b"
    holds the names of two techniques and "why" the message of a refusal.
    """
    return json.loads(SOURCE.read_text())


def explain_matrix(matrix: dict[str, Any]) -> str:
    """Return the matrix as text: a triangle of marks, counts, and each refusal with its reason."""
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
