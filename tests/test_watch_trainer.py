"""A Hugging Face Trainer that is watched: its callback's events in order, and a real one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from watched_loop import ROWS, TOKENS, setup

import headrace
from headrace.core.errors import UnsupportedError
from headrace.watch import Watched, trainer


class Accelerated(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: a subclass that was never initialized as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.step_was_skipped = optimizer, False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.step_was_skipped:
            self.optimizer.step()


def test_a_trainers_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of a Trainer, in its order, through its own handler."""
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    model, inner, loader = setup()
    optimizer = Accelerated(inner)
    watched = headrace.watch()
    assert watched.report()["steps"] == 0
    callbacks = [DefaultFlowCallback(), watched.callback()]
    handler = CallbackHandler(callbacks, model, None, optimizer, None)
    handler.train_dataloader = loader
    args: Any = SimpleNamespace(max_grad_norm=1.0, logging_first_step=False, logging_strategy="no",
                                eval_strategy="no", save_strategy="no")  # fmt: skip
    state: Any = SimpleNamespace(global_step=0, max_steps=9, logging_steps=1)
    control: Any = SimpleNamespace()
    handler.on_train_begin(args, state, control)
    batches = iter(loader)
    for step in range(3):
        taken = [next(batches) for _ in range(2)]  # a Trainer takes a step's batches at once
        for batch in taken:
            (model(**batch, num_items_in_batch=torch.tensor(12))["loss"] / 2).backward()
        optimizer.step_was_skipped = step == 2
        optimizer.step()
        handler.on_optimizer_step(args, state, control)
        inner.zero_grad()
        handler.on_step_end(args, state, control)
        handler.on_log(args, state, control, {"loss": 1.0, "grad_norm": 2.0})
    handler.on_train_end(args, state, control)
    report = watched.report()
    assert (report["status"], report["steps"], report["skipped_steps"]) == ("done", 3, 1)
    assert report["clip_rate"] == 1.0 and report["rows"][1]["grad_norm"] == 2.0
    assert report["tokens"] == 3 * 2 * ROWS * TOKENS and type(loader) is DataLoader
    assert report["loss"]["first"] > 3  # two shares add up
    monkeypatch.setattr(trainer, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="transformers"):
        Watched().callback()


def test_a_real_trainer(tmp_path: Path) -> None:
    """accelerate puts a loader of its own in place of the user's, whose class it hides."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **size
    ))  # fmt: skip
    ids = torch.arange(12)
    row = {"input_ids": ids, "attention_mask": (ids < 9).long(),
           "labels": ids.where(ids < 9, torch.tensor(-100))}  # fmt: skip
    watched = headrace.watch()
    transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=2, logging_steps=1,
            gradient_accumulation_steps=2, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[row] * 40,
        callbacks=[watched.callback()],
    ).train()  # fmt: skip
    report = watched.report()
    assert (report["status"], report["steps"]) == ("done", 6)
    assert report["tokens"] == 6 * 2 * 2 * 12 and report["loss"]["first"] > 2
    assert all(row["wait_s"] > 0 for row in report["rows"])
    assert report["trainer"]["max_grad_norm"] == 1.0 and report["loader"]["num_workers"] == 0
