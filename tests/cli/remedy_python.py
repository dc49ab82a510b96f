"""Errors that a caller in Python meets, and how each remedy is carried out."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from remedy_doctor import rank, record
from torch import nn

import headrace
from headrace.doctor.run import diagnose
from headrace.doctor.trace import file
from headrace.watch import trainer


@dataclass(frozen=True)
class Call:
    """A call that ends in an error.

    Args:
        fails: makes it, where its argument has changed what the call finds.
        mends: does what the remedy says, given as it is printed; what it returns is not checked.
    """

    fails: Callable[[pytest.MonkeyPatch], Any]
    mends: Callable[[str], Any]


def loop() -> dict[str, Any]:
    """The names that a remedy about a loop speaks of."""
    model = nn.Linear(4, 1)
    return {
        "headrace": headrace,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [torch.randn(2, 4)] * 3,
    }


def as_python(remedy: str) -> None:
    """Run a remedy that is an expression."""
    eval(remedy, loop()).close()


def spread() -> Any:
    """What looks like a distributed tensor."""
    return SimpleNamespace(full_tensor=lambda: torch.tensor(1.0))


def noted(remedy: str) -> None:
    """Note what the remedy says, of a tensor that is spread."""
    names = loop()
    with headrace.watch(names["model"], names["optimizer"]) as watched:
        eval(remedy, {"watched": watched, "loss": spread(), "grad_norm": spread()})


def note_spread(_: pytest.MonkeyPatch) -> None:
    """Note a distributed tensor."""
    names = loop()
    with headrace.watch(names["model"], names["optimizer"]) as watched:
        watched.note(loss=spread(), grad_norm=spread())


def without_transformers(patch: pytest.MonkeyPatch) -> None:
    """Ask for a Trainer's callback where transformers is not installed."""
    patch.setattr(trainer, "find_spec", lambda name: None)
    headrace.watch().callback()


def installs(remedy: str) -> None:
    """Let be installed what the remedy installs; ask again, now that it is there."""
    assert remedy == "pip install 'headrace[hf]'" and find_spec("transformers")
    assert headrace.watch().callback()


def too_large(patch: pytest.MonkeyPatch) -> None:
    """Judge a trace of more bytes than are read."""
    rank(0, "t.json")
    patch.setattr(file, "MOST_BYTES", Path("t.json").stat().st_size - 1)
    diagnose([Path("t.json")])


def recorded(remedy: str) -> None:
    """Record as the remedy says; the newest file is judged."""
    record(remedy.partition(" around the loop")[0])
    assert remedy.endswith("headrace doctor traces/*.json")
    assert diagnose([*Path("traces").glob("*.json")])


PYTHON = {
    "watch/__init__:watch#1": Call(lambda patch: headrace.watch(nn.Linear(4, 1)), as_python),
    "watch/__init__:watch#2": Call(
        lambda patch: headrace.watch(torch.add, object(), []),  # pyright: ignore
        as_python,
    ),
    "watch/clock:with_hooks#1": Call(
        lambda patch: headrace.watch(nn.Linear(4, 1), SimpleNamespace(step=print)), as_python
    ),
    "watch/watched:Watched.note#1": Call(note_spread, noted),
    "watch/trainer:trainer_callback#1": Call(without_transformers, installs),
    "doctor/trace/file:text_of#4": Call(too_large, recorded),
}
"""Each error by its site."""
