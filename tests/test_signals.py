"""The clock of a step: what stands outside of it is not counted into it."""

import time

import torch

from headrace.signals import Signals


def test_an_evaluation_is_no_part_of_the_next_step() -> None:
    signals = Signals(torch.device("cpu"))
    with torch.no_grad():
        signals.mark("forward")
    time.sleep(0.05)
    for phase in ("input", "forward", "backward", "optimizer"):
        signals.mark(phase)
    signals.end_step(1, torch.tensor([1.0, 1.0, 1.0, 4.0]), {})
    (row,) = signals.drain(keep=0)
    assert row["step_s"] < 0.05
    assert row["step_s"] == sum(
        row[f"{p}_s"] for p in ("input", "forward", "backward", "optimizer")
    )
