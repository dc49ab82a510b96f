"""Check loggers beside metrics.jsonl: off by default, and complete when asked for."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from facts import in_order
from tiny import metrics

from headrace.core.errors import UnsupportedError
from headrace.plan.plan import Plan
from headrace.train import track


def test_tensorboard_holds_every_loss(train: Callable[..., Path]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train("track.to=['tensorboard']")
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    found = {e.step: e.value for e in events.Scalars("loss")}
    assert found == {r["step"]: pytest.approx(r["loss"]) for r in metrics(run)}


@pytest.mark.parametrize("kept", [[], [4]])
def test_tensorboard_shows_lost_steps_once(train: Callable[..., Path], kept: list[int]) -> None:
    """A resume from an earlier step, or from none, goes over steps again: the first are purged."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train("track.to=['tensorboard']", "goal.steps=10", "checkpoint.keep_last=9")
    for step in {4, 8, 10} - {*kept}:
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    words = "track.to=['tensorboard']", "checkpoint.keep_last=9", "goal.steps=12"
    assert train(*words, resume=True) == run
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    found = [e.step for e in events.Scalars("loss")]
    assert found == list(range(1, 13)) == [r["step"] for r in metrics(run)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_gets_every_row_and_is_closed(
    name: str, train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the calls of its client that we make; the services themselves need a network."""
    told: list[dict[str, Any]] = []
    ended: list[bool] = []

    def log(values: dict[str, Any], step: int) -> None:
        told.append({**values, "step": step})

    client = SimpleNamespace(
        init=lambda **_: SimpleNamespace(log=log, finish=lambda: ended.append(True)),
        set_experiment=lambda name: None,
        start_run=lambda run_name: None,
        log_dict=lambda values, file: None,
        log_metrics=log,
        end_run=lambda: ended.append(True),
    )
    monkeypatch.setitem(sys.modules, name, client)
    monkeypatch.setattr(track, "find_spec", lambda package: client)
    run = train(f"track.to=['{name}']")
    assert [t["loss"] for t in told] == [r["loss"] for r in metrics(run)]
    assert ended == [True]


def test_one_that_is_not_installed_is_refused(
    tiny_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track, "find_spec", lambda package: None)
    with pytest.raises(UnsupportedError, match=in_order("wandb", "not installed")) as error:
        track.open_trackers(tiny_plan("track.to=['wandb']"), tmp_path)
    assert "headrace[track]" in error.value.remedy.text


def test_nothing_is_logged_unless_asked_for(train: Callable[..., Path]) -> None:
    assert not (train() / "tensorboard").exists()
