"""Read the configurations that the planner is judged by, as plans/held_out*.toml lists them.

A list names shapes, sets of techniques, and choices: one workload whose candidates are some of the
sets. `foresight.py` predicts and measures them, and `residuals.py` learns widths from what came.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from headrace.cli.catalogue import catalogue
from headrace.plan.changes import parse
from headrace.plan.plan import Plan

LISTS = sorted((Path(__file__).parent / "plans").glob("held_out*.toml"))


@dataclass(frozen=True)
class Configuration:
    """Describe one plan of the list.

    Args:
        id: its name in the rows.
        choice: the workload whose candidate it is; "" for those of memory alone.
        shape: of the model.
        words: its changes of the shape's recipe.
        text: the recipe.
    """

    id: str
    choice: str
    shape: str
    words: tuple[str, ...]
    text: str

    @property
    def plan(self) -> Plan:
        """Return the checked plan."""
        return parse(self.words).plan(self.text, catalogue())


def configurations(files: Sequence[Path] = LISTS) -> Iterator[Configuration]:
    """Yield every configuration of the lists, in their order."""
    for file in files:
        yield from _of_list(tomllib.loads(file.read_text()))


def _of_list(table: dict[str, Any]) -> Iterator[Configuration]:
    for choice in table["choices"]:
        length, rows = choice["length"], choice["rows"]
        name = f"{choice['shape']}-{length}x{rows}"
        for kind in choice["sets"]:
            yield _configuration(table, f"{name}/{kind}", name, choice["shape"], length, rows, kind)
    memory = table.get("memory", {"shapes": ()})
    for shape in memory["shapes"]:
        for rows in memory["rows"]:
            for kind in memory["sets"]:
                name = f"memory/{shape}-{memory['length']}x{rows}/{kind}"
                yield _configuration(table, name, "", shape, memory["length"], rows, kind)


def _configuration(
    table: dict[str, Any], name: str, choice: str, shape: str, length: int, rows: int, kind: str
) -> Configuration:
    tables = {
        **table["common"],
        "name": shape,
        "model": table["shapes"][shape],
        "data": {"sequence_length": length},
        "batch": {"tokens": length * rows},
    }
    words = tuple(table["sets"][kind].split())
    return Configuration(name, choice, shape, words, tomli_w.dumps(tables))


def firsts(files: Sequence[Path] = LISTS) -> dict[str, Configuration]:
    """Return the candidate of each choice by which the others are predicted."""
    chosen: dict[str, Configuration] = {}
    for one in configurations(files):
        if one.choice:
            chosen.setdefault(one.choice, one)
    return chosen
