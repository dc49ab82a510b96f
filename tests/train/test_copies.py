"""Copies for a checkpoint go on beside kernels; a save that failed ends the run at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.errors import RunError
from headrace.train.checkpoint import Checkpoints
from headrace.train.copies import Copies
from headrace.train.interrupts import Interrupts
from headrace.train.session import Session

Train = Callable[..., Path]


def test_a_save_that_fails_ends_the_run_at_the_next_step(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Checkpoints.save

    def failing(self: Checkpoints, *work: Any) -> None:
        raise OSError("the disk is gone")

    def joined(self: Checkpoints, *given: Any) -> None:
        real(self, *given)
        assert self._thread is not None
        self._thread.join()  # it has failed by now, and nobody was told

    monkeypatch.setattr(Checkpoints, "_write", failing)
    monkeypatch.setattr(Checkpoints, "save", joined)
    steps: list[int] = []
    ended = Session.ended

    def counted(self: Session, stop: Interrupts) -> bool:
        steps.append(self.counters.step)
        return ended(self, stop)

    monkeypatch.setattr(Session, "ended", counted)
    with pytest.raises(RunError, match="the disk is gone; no earlier checkpoint exists"):
        train("goal.steps=40", "checkpoint.every_steps=4", "eval.every_steps=100")
    assert steps[-1] == 4  # and the fifth step told it


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_of_a_gpu_is_of_the_moment_and_holds_an_update_back() -> None:
    weights = torch.ones(64 << 20, device="cuda")
    before_change: list[Callable[[], None]] = []
    copies = Copies(before_change)
    host = copies.to_host(weights)
    copies.end()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):  # kernels that read nothing of what is copied
        busy = (busy @ busy).clamp_(-1, 1)
    (hold_back,) = before_change
    hold_back()
    weights.add_(1)
    copies.wait()
    assert host.is_pinned() and host.eq(1).all()
    alone = Copies()
    again = alone.to_host(weights)
    alone.end()
    assert again.eq(2).all()
