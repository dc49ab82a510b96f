"""Models that cannot learn longer rows, or not from this text, and how each remedy is followed."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from remedy_inputs import GOOD, weights
from shell import Case

LONG = "The mill stands by the river and grinds corn. " * 200


def texts(_: Path) -> None:
    """Write a text of short documents, and one of a long one, in two halves."""
    Path("x.jsonl").write_text(GOOD)
    Path("long.txt").write_text(LONG)
    Path("other.txt").write_text(LONG.replace("corn", "wheat"))
    Path("short.txt").write_text("The mill.")


def learned(patch: pytest.MonkeyPatch) -> None:
    """Let every model have learned positions."""
    config = SimpleNamespace(position="learned")
    patch.setattr("headrace.model.adapter.read_config", lambda path, key: config)


EXTEND = {
    "cli/extend:_refuse_changes#1": Case("extend demo --dry-run", fills={"--to N": "--to 32"}),
    "cli/extend:_plan#1": Case(
        "extend demo --to 64",
        fake=learned,
        fills={"FOLDER": "demo", ", with a model of model.position = 'rope'": " --dry-run"},
        lifted=True,
    ),
    "cli/extend:_plan#2": Case("extend demo --to 16 --dry-run"),
    "cli/extend:_plan#3": Case(
        "extend hf --to 32",
        weights(texts),
        fills={"PATH": "long.txt data.validation=other.txt --dry-run"},
    ),
    "cli/extend:_check_text#1": Case(
        "extend demo --to 128 --dry-run data.sources=x.jsonl",
        texts,
        fills={"PATH of longer texts": "long.txt data.validation=other.txt"},
    ),
    "cli/extend:_check_text#2": Case(
        "extend demo --to 64 --dry-run data.sources=long.txt data.validation=short.txt",
        texts,
        fills={"PATH of a longer text": "other.txt", "a larger share as ": ""},
    ),
    "inference/extension:trained_length#1": Case(
        "extend demo", fills={"--to 32": "--to 32 --dry-run"}
    ),
}
"""Each error by its site."""
