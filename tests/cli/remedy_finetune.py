"""Fine-tunings and conversations that cannot begin, and how each remedy is followed."""

from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from remedy_inputs import GOOD
from remedy_python import Call
from shell import Case

from headrace.cli.finetune import MethodPredicted
from headrace.data.chat.template import CHATML_TEXT, ChatTemplate
from headrace.data.tokenizer import train_tokenizer
from headrace.inference.chat import Chat


def examples(_: Path) -> None:
    """Write a text to train on."""
    Path("x.jsonl").write_text(GOOD)


FINETUNE = {
    "cli/finetune:_choose#1": Case("finetune other", fills={"FILE.jsonl": "x.jsonl"}),
    "cli/finetune:too_large#1": Case(
        "finetune demo x.jsonl goal.steps=1",
        examples,
        fake=lambda patch: patch.setattr(MethodPredicted, "fits", property(lambda self: "no")),
        fills={" or a smaller data.sequence_length": " data.sequence_length=8 batch.tokens=64"},
        lifted=True,
    ),
    "cli/finetune:with_steps#1": Case(
        "finetune demo x.jsonl goal.steps=1 batch.tokens=64 --epochs 2 --with full --dry-run",
        examples,
    ),
    "train/general:prepare_general.opened#1": Case(
        "train {tiny} eval.general=gone.txt",
        examples,
        fills={"PATH of another text": "x.jsonl"},
    ),
    "export/start:beginning#2": Case("finetune x.jsonl x.jsonl", examples),
    "cli/chat:chat#1": Case("chat demo", fills={"TEXT": "x"}),
    "inference/chat:Chat.of#1": Case("chat demo --prompt x", fills={"TEXT": "x"}),
}
"""Each error by its site."""


def refused(_: pytest.MonkeyPatch) -> None:
    """Say something under a system prompt by a template that takes none."""
    raises = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = train_tokenizer(["the mill"], vocab=300)
    build: Any = SimpleNamespace(prepared=SimpleNamespace(tokenizer=tokenizer))
    template = ChatTemplate(raises + CHATML_TEXT, {}, date(2024, 7, 26))
    Chat(build, template, [{"role": "system", "content": "x"}]).reply("y", new_tokens=1)


def without_system(remedy: str) -> None:
    """Hold that the remedy leaves the system prompt out."""
    assert remedy == "--system ''"


TALKING = {"inference/chat:Chat.reply#1": Call(refused, without_system)}
"""Each error of a caller in Python by its site."""
