"""Show which pairs of techniques work in one plan, by the outcome of tests.

`pytest tests/distributed/test_matrix.py --matrix FILE` writes `matrix.json`, and nothing else does.
A pair is `equal` when a run with both computes what one process computes without the techniques
that must not change a number. It is `needs` when that is so once there is beside the two what one
of them acts on. It is `gpu` when its plan is refused on a CPU and not on an H200: the tests of the
matrix have no GPU, and do not run it. It is `refuses` when the plan is refused everywhere, with the
message that a user sees.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("matrix.json")
"""The file of outcomes."""
MARKS = {"equal": "=", "needs": "n", "gpu": "g", "refuses": "x"}
"""Maps an outcome to the character that stands for it in the triangle."""


def read_matrix() -> dict[str, Any]:
    """Return the outcome of every pair of techniques.

    The value is {"torch": version, "pairs": {"a b": {"outcome": ..., "why": ..., "needs": [...]}}},
    where "a b" holds the names of two techniques, "why" the message of a refusal, and "needs",
    where it is there, what stands beside the two: other techniques, and keys as they are typed.
    """
    return json.loads(SOURCE.read_text())


def needs_of(pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return what is asked for beside the others: techniques or pairs -> names and keys.

    A technique that asks for the same in all of its pairs that lack something is there once, and
    what else a pair asks for stands under the pair.
    """
    lacking = {pair: set(entry["needs"]) for pair, entry in pairs.items() if entry.get("needs")}
    of: dict[str, set[str]] = {}
    for pair, needs in lacking.items():
        for name in pair.split():
            there = needs.union(pair.split())
            of[name] = of.get(name, there) & there
    asked = {name: rest for name, needs in of.items() if (rest := needs - {name})}
    for pair, needs in lacking.items():
        if rest := needs.difference(*(asked.get(name, ()) for name in pair.split())):
            asked[pair.replace(" ", " + ")] = rest
    return {name: ", ".join(sorted(asked[name])) for name in sorted(asked)}


def count_outcomes(matrix: Mapping[str, Any]) -> str:
    """Return how many pairs have each outcome, as a sentence."""
    counts = Counter(pair["outcome"] for pair in matrix["pairs"].values())
    return (
        f"{counts['equal']} tested equal, {counts['needs']} stand once there is beside them what "
        f"one of them needs, {counts['gpu']} need a GPU, {counts['refuses']} refuse; "
        f"torch {matrix['torch']}"
    )


def explain_matrix(matrix: dict[str, Any]) -> str:
    """Return the matrix as text: a triangle of marks, counts, and each refusal with its reason."""
    pairs = matrix["pairs"]
    names = sorted({name for pair in pairs for name in pair.split()})
    wide = max(map(len, names))
    lines = [
        "pairs of techniques: = tested equal, n needs another technique or key (below), g needs a "
        "GPU, x refuses (why is below)",
        "",
    ]
    for row, name in enumerate(names):
        marks = [MARKS[pairs[f"{other} {name}"]["outcome"]] for other in names[:row]]
        lines.append(f"{row + 1:>3} {name:<{wide}} " + "".join(f"{mark:>3}" for mark in marks))
    lines.append(" " * (wide + 5) + "".join(f"{n + 1:>3}" for n in range(len(names) - 1)))
    lines += ["", count_outcomes(matrix), ""]
    lines += [f"{name} needs beside it: {needs}" for name, needs in needs_of(pairs).items()]
    lines.append("")
    lines += [
        f"{name.replace(' ', ' + ')}: {pair['why']}"
        for name, pair in sorted(pairs.items())
        if pair["outcome"] == "refuses"
    ]
    return "\n".join(lines)
