"""A Hugging Face Trainer that is watched: its callback's events in order, and a real one."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from watched_loop import ROWS, TOKENS, setup

import headrace
from headrace.core.errors import UnsupportedError
from headrace.observe.signals import HostClock
from headrace.watch import Watched, trainer


class Accelerated(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: a subclass that was never initialized as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.step_was_skipped = optimizer, False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.step_was_skipped:
            self.optimizer.step()


def test_a_trainers_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the events of a Trainer, in their order, through its own handler."""
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    model, inner, loader = setup()
    optimizer = Accelerated(inner)
    watched = headrace.watch()
    assert watched.report()["steps"] == 0
    callbacks = [DefaultFlowCallback(), watched.callback()]
    handler = CallbackHandler(callbacks, model, None, optimizer, None)
    handler.train_dataloader = loader
    args: Any = SimpleNamespace(
        max_grad_norm=1.0,
        logging_first_step=False,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
    )
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


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("saves", [True, False])
def test_what_a_trainer_does_between_steps_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, logs: bool, evaluates: bool, saves: bool
) -> None:
    """Times are logging 1 s, an evaluation of 2 + 4 s, its own log 8 s, a save with its push 16 s.

    The callbacks' protocol alone, on a clock that stands still but there.
    """
    now = [0.0]
    monkeypatch.setattr(HostClock, "record", lambda self: setattr(self, "at_s", now[0]))
    monkeypatch.setattr(trainer, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(TrainerCallback=object))
    model, optimizer, loader = setup()
    watched = headrace.watch()
    heard = watched.callback()

    def passes(seconds: float) -> None:
        now[0] += seconds

    args: Any = SimpleNamespace(max_grad_norm=1.0)
    control = SimpleNamespace(should_log=False, should_evaluate=False, should_save=False)
    own = {"model": model, "optimizer": optimizer, "train_dataloader": loader}
    heard.on_train_begin(args, None, control, **own)
    for batch in loader:
        passes(32.0)  # until the forward, which is the wait for data
        model(**batch)["loss"].backward()
        heard.on_log(args, None, control, logs={})  # a trainer may log in its loss
        optimizer.step()
        heard.on_optimizer_step(args, None, control, optimizer=optimizer)
        control = SimpleNamespace(should_log=logs, should_evaluate=evaluates, should_save=saves)
        heard.on_step_end(args, None, control)
        if logs:
            passes(1.0)
            control.should_log = False
            heard.on_log(args, None, control, logs={"loss": 1.0})
        if evaluates:
            passes(2.0)  # its loader starts
            with torch.no_grad():
                model(**batch)
            passes(4.0)
            heard.on_log(args, None, control, logs={"eval_loss": 1.0})
            passes(8.0)
            control.should_evaluate = False
            heard.on_evaluate(args, None, control)
        if saves:
            passes(16.0)
            heard.on_save(args, None, control)
        control = SimpleNamespace(should_log=False, should_evaluate=False, should_save=False)
    heard.on_train_end(args, None, control)
    report = watched.report()
    steps, phase_s = report["steps"], report["phase_s"]
    between = steps - 1  # what follows the last step belongs to none
    assert phase_s["other"] == between * 1.0 * logs
    assert phase_s.get("eval", 0.0) == between * 14.0 * evaluates
    assert phase_s["checkpoint"] == between * 16.0 * saves
    assert phase_s["input"] == steps * 32.0 and report["steady_step_s"] == 32.0 + logs
    assert not any("checkpoints" in sentence for sentence in report["not_measured"])


def test_a_real_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate puts a loader of its own in place of the user's, whose class it hides.

    Saving and evaluating take long, and nothing else is blamed for them.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **size
        )
    )
    ids = torch.arange(12)
    row = {
        "input_ids": ids,
        "attention_mask": (ids < 9).long(),
        "labels": ids.where(ids < 9, torch.tensor(-100)),
    }
    watched, save = headrace.watch(), transformers.Trainer._save_checkpoint

    def slow(*given: Any, **how: Any) -> Any:
        time.sleep(0.5)
        return save(*given, **how)

    class Held(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.1)
            return row

    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", slow)
    transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=2,
            logging_steps=1,
            gradient_accumulation_steps=2,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[row] * 40,
        eval_dataset=Held(),
        callbacks=[watched.callback()],
    ).train()
    report = watched.report()
    assert (report["status"], report["steps"]) == ("done", 6)
    assert report["tokens"] == 6 * 2 * 2 * 12 and report["loss"]["first"] > 2
    phase_s = report["phase_s"]
    assert phase_s["checkpoint"] > 2 * 0.5 and 0.2 < phase_s["eval"] < phase_s["checkpoint"]
    assert phase_s["other"] < 0.5, "neither is blamed on what a loop does between steps"
    assert all(row["wait_s"] > 0 for row in report["rows"])
    assert report["trainer"]["max_grad_norm"] == 1.0 and report["loader"]["num_workers"] == 0
