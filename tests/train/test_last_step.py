"""What a run says of its techniques where its last step has no target; see also test_failures."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import report

from headrace.core.errors import Stopped
from headrace.data.loader import Loader, StepBatch
from headrace.model.head import IGNORED
from headrace.train import session

Train = Callable[..., Path]
STEPS = 4


@pytest.mark.parametrize("within", [4, 100])
@pytest.mark.parametrize(
    ("beside", "blind"),
    [
        (["techniques.lora.rank=2"], True),
        (["techniques.qlora={rank = 2, base = 'int8'}", "model.dim=32"], True),
        (["techniques.distillation={}"], True),
        (["techniques.z_loss={}"], False),
    ],
)
def test_a_last_step_without_a_target_loses_nothing(
    train: Train,
    given: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    beside: list[str],
    blind: bool,
    within: int,
) -> None:
    """No gradient reached what is healthy; what can be seen is still looked at."""
    whole = Loader.step

    def step(loader: Loader, index: int) -> StepBatch:
        batch = whole(loader, index)
        if index + 1 < STEPS:
            return batch
        none = [replace(m, targets_BT=m.targets_BT.fill_(IGNORED)) for m in batch.micros]
        return replace(batch, micros=none)

    monkeypatch.setattr(Loader, "step", step)
    start = given(*beside[1:])
    run = report(train(*beside, start, f"goal.steps={STEPS}", f"eval.every_steps={within}"))
    (name,) = run["techniques"]
    assert run["status"] == "done" and run["techniques"][name]["active"]
    assert run["steps"] == STEPS and run["signals"]["lost_techniques"] == []
    why = {name: "the last step counted no target"} if blind else {}
    assert run["signals"]["unseen_techniques"] == why


def test_the_report_has_what_was_counted_until_the_end(train: Train) -> None:
    """Check that the report counts all steps, not the first alone: rows grow in the third."""
    run = report(
        train(
            "data.sequence_length=32",
            "techniques.sequence_length_schedule.start=16",
            "techniques.sequence_length_schedule.until=2",
            f"goal.steps={STEPS}",
        )
    )
    (told,) = run["techniques"].values()
    assert told["active"] and "16 and 32" in told["detail"], told["detail"]
    assert told["numbers"]["micro_batches_of_16"] < told["numbers"]["micro_batches_of_32"] + 1


def test_a_run_that_is_stopped_has_what_was_counted_until_then(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = Loader.step

    def step(loader: Loader, index: int) -> StepBatch:
        if index == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(loader, index)

    monkeypatch.setattr(Loader, "step", step)
    with pytest.raises(Stopped):
        train("techniques.fp16_loss_scaling={}", f"goal.steps={STEPS}", "eval.every_steps=100")
    run = report(tmp_path / "runs" / "tiny")
    assert (run["status"], run["steps"]) == ("interrupted", 3)
    assert run["techniques"]["fp16_loss_scaling"]["numbers"]["good_steps"] == 3


def test_what_is_lost_in_a_step_with_targets_is_told(
    train: Train, given: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = session.last_look

    def look(build: Any, counted: bool) -> Any:
        for name, parameter in build.model.named_parameters():
            if name.endswith("lora_b"):
                parameter.grad = None
        for optimizer in build.optimizers.values():
            optimizer.state.clear()
        return taken(build, counted)

    monkeypatch.setattr(session, "last_look", look)
    run = report(train("techniques.lora.rank=2", given(), f"goal.steps={STEPS}"))
    assert run["signals"]["lost_techniques"] == ["lora"]
    assert run["signals"]["unseen_techniques"] == {}
