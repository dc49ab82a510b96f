"""The clock of a step, and its memory: what stands outside of it is not counted into it."""

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from headrace.signals import Signals, TrackedMemory

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


def test_the_peak_is_torchs_own() -> None:
    """Our tracker looks at no module; torch's looks at all of them."""
    found = []
    for torchs in (False, True):
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        tracked = TrackedMemory(model, [optimizer])
        if torchs:
            tracked._tracker = MemTracker()
            tracked._tracker.track_external(model, optimizer)
        with tracked:
            model(torch.ones(16, 8)).square().sum().backward()
            optimizer.step()
        found.append(tracked.peak_bytes())
    assert found[0] == found[1] and found[0]["Total"] > 4 * 4 * 8 * 64
