"""The clock of a step: what stands outside of it is not counted into it."""

import torch

from headrace.signals import Signals

PHASES = ("input", "forward", "backward", "optimizer")


def test_an_evaluation_is_no_part_of_the_next_step() -> None:
    signals = Signals(torch.device("cpu"))
    with torch.no_grad():
        signals.mark("forward")
    assert not signals._marks
    for phase in PHASES:
        signals.mark(phase)
    signals.end_step(1, torch.tensor([1.0, 1.0, 1.0, 4.0]), {})
    (row,) = signals.drain(keep=0)
    assert row["step_s"] == sum(row[f"{phase}_s"] for phase in PHASES)
