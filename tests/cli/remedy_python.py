"""Errors that a caller in Python meets, and how each remedy is carried out."""

import sys
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
from headrace.assemble.ordered import order_rows
from headrace.cli.catalogue import catalogue
from headrace.data.loader import Loader
from headrace.data.tokenizer import train_tokenizer
from headrace.doctor.run import diagnose
from headrace.doctor.trace import file
from headrace.plan.plan import Goal, Plan
from headrace.techniques.adapt.lora import Lora
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


def settings(remedy: str) -> dict[str, str]:
    """Read the `key=value` words of a remedy as a user would type them."""
    return dict(word.split("=") for word in remedy.split())


def as_python(remedy: str) -> None:
    """Run a remedy that is an expression."""
    eval(remedy, loop()).close()


def spread() -> Any:
    """Return an object that looks like a distributed tensor that holds 1."""
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


def without_line(remedy: str) -> None:
    """Leave the line out that the message names."""
    assert remedy.endswith("leave that line out")
    assert Plan.read('name = "a"\n[goal]\nsteps = 1\n', catalogue()).name == "a"


def as_plan(remedy: str) -> None:
    """Make the plan that the remedy spells, whose dots stand for what was given."""
    names = {"Plan": lambda **tables: Plan(goal=Goal(steps=1), **tables)}
    assert eval(remedy.replace("...", "lora"), {**names, "lora": Lora()}).techniques["lora"]


def go_on(*, batch_tokens: int) -> None:
    """Go on behind a step of 8 rows of 16 tokens."""
    rows = SimpleNamespace(sequence_length=16, units=(64,))
    loader = Loader(rows, rows_per_step=batch_tokens // 16, micro_rows=2)  # pyright: ignore
    loader.load_state({"step": 1, "rows": 8, "stream_hash": "0"})
    assert loader.state()["rows"] == 8


def with_tokens(remedy: str) -> None:
    """Go on with the batch that the remedy names."""
    key, _, tokens = remedy.partition("=")
    assert key == "batch.tokens"
    go_on(batch_tokens=int(tokens))


def with_vocab(remedy: str) -> None:
    """Train a tokenizer as large as the remedy says."""
    key, _, vocab = remedy.partition("=")
    assert key == "data.vocab" and train_tokenizer(["the mill"], vocab=int(vocab)).vocab == 257


def without_rustbpe(patch: pytest.MonkeyPatch) -> None:
    """Ask for a trainer that is not installed."""
    patch.setitem(sys.modules, "rustbpe", None)
    train_tokenizer(["the mill"], vocab=300, trainer="rustbpe")


def installs_rustbpe(remedy: str) -> None:
    """Let be installed what the remedy installs; train again, now that it is there."""
    assert remedy == "pip install rustbpe" and find_spec("rustbpe")
    assert train_tokenizer(["the mill"], vocab=300, trainer="rustbpe").vocab > 256


def packed_otherwise(_: pytest.MonkeyPatch) -> None:
    """Ask for a curriculum where a packer does not say what its rows hold."""
    words = ["data.curriculum.until=3", "goal.steps=9"]
    plan = Plan.read("", catalogue(), overrides=words)
    prepared, packer = SimpleNamespace(scores=object(), train=()), SimpleNamespace(units=())
    build: Any = SimpleNamespace(plan=plan, prepared=prepared, filled={"pack": ["padded"]})
    order_rows(build, packer)  # pyright: ignore


def left_out(remedy: str) -> None:
    """Leave the packer out, as the remedy says."""
    assert remedy == "--without padded"


PYTHON = {
    "assemble/ordered:_paced#1": Call(packed_otherwise, left_out),
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
    "plan/plan:Plan._read#1": Call(
        lambda patch: Plan.read('name = "a"\nseed = [\n', catalogue()), without_line
    ),
    "plan/plan:_technique#1": Call(
        lambda patch: Plan(goal=Goal(steps=1), techniques={"muon": Lora()}), as_plan
    ),
    "data/loader:Loader._other_rows#1": Call(lambda patch: go_on(batch_tokens=64), with_tokens),
    "data/bpe:check_entries#2": Call(
        lambda patch: train_tokenizer(["the mill"], vocab=100), with_vocab
    ),
    "data/tokenizer:_learn#1": Call(without_rustbpe, installs_rustbpe),
}
"""Each error by its site."""
