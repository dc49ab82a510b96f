"""The clock of a step, and its memory: what stands outside of it is not counted into it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from headrace.data.loader import Loader
from headrace.doctor.observation import read_rows
from headrace.observe.signals import HostClock, Operations, Signals, TrackedMemory
from headrace.train import train as training

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


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A clock that stands still but in what is given: `passes(call, seconds)` lasts so long."""
    now = [0.0]
    monkeypatch.setattr(HostClock, "record", lambda self: setattr(self, "at_s", now[0]))

    def lasting(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def called(*given: Any, **how: Any) -> Any:
            now[0] += seconds
            return call(*given, **how)

        return called

    return lasting


@pytest.mark.parametrize(("device", "input_s"), [("cpu", 1.0), ("mps", 5.0)])
def test_a_copy_is_waited_for_where_there_is_one_and_the_rest_is_the_steps_own(
    device: str, input_s: float, passes: Callable[..., Any]
) -> None:
    signals = Signals(torch.device("cpu"))
    signals.device = torch.device(device)
    marks = ("input", "prepare", "copy", "prepare", "forward", "backward", "optimizer")
    for count, mark in enumerate(marks):
        signals.mark(mark)
        passes(lambda: None, 2.0**count)()
    signals.end_step(1, torch.tensor([1.0, 1.0, 1.0, 4.0]), {})
    (row,) = signals.drain(keep=0)
    assert row["input_s"] == input_s and row["input_s"] + row["forward_s"] == 31.0
    assert (row["backward_s"], row["optimizer_s"], row["step_s"]) == (32.0, 64.0, 127.0)
    assert not {"copy_s", "prepare_s"} & {*row}


def test_a_step_waits_for_its_loader_and_not_for_its_own_work(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, passes: Callable[..., Any]
) -> None:
    """On a CPU nothing is copied: what stands between the loader and the forward is no wait."""
    make_build = training.make_build

    def made(*given: Any, **how: Any) -> Any:
        build = make_build(*given, **how)
        build.place, build.passes = passes(build.place, 16.0), passes(build.passes, 32.0)
        return build

    monkeypatch.setattr(training, "make_build", made)
    monkeypatch.setattr(Loader, "step", passes(Loader.step, 1.0))
    rows = read_rows(train("goal.steps=4", "guard=false", "batch.tokens=64") / "metrics.jsonl")
    assert [row["input_s"] for row in rows] == [1.0] * 4
    assert [row["forward_s"] for row in rows] == [48.0] * 4


class Moment(HostClock):
    """An event of a device that is through with it, or not."""

    done = True

    def query(self) -> bool:
        return self.done


def test_a_step_that_begins_on_an_idle_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once a step, when its first work comes; of nothing pending nothing is known."""
    signals, seen = Signals(torch.device("cpu")), []
    signals.cuda = True
    monkeypatch.setattr(signals, "_new_moment", Moment)
    for step, done in enumerate((True, True, False, True)):
        signals._free_reads.append(torch.empty(4))
        monkeypatch.setattr(Moment, "done", done)
        for phase in ("input", "forward", "backward", "forward", "backward", "optimizer"):
            signals.mark(phase)
        monkeypatch.setattr(Moment, "done", False)
        signals.end_step(step, torch.tensor([1.0, 1.0, 1.0, 4.0]), {})
        seen += signals.drain(keep=1)
    seen += signals.drain(keep=0)
    assert [row["dry"] for row in seen] == [0, 1, 0, 1]


def test_the_peak_is_torchs_own() -> None:
    """Our tracker looks at no module; torch's does look at all of them."""
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


def test_operations_of_a_step_are_counted_by_what_they_do() -> None:
    model = nn.Linear(64, 64, bias=False)
    tracked = TrackedMemory(model, [])
    with tracked:
        out = model(torch.ones(512, 64))
        before = tracked.operations.tiny
        for _ in range(100):
            _ = out.detach()[0, :1] + 1.0
        (out.double() @ model.weight.double()).sum().backward()
    found = tracked.operations.report()
    assert tracked.operations.tiny - before >= 100 and found["views"] >= 300
    flops = 2 * 512 * 64 * 64
    assert found["product_flops"] == {"float32": 2 * flops, "float64": 3 * flops}
    assert 0 < found["host_s"] < 1


def test_products_of_the_update_are_not_the_models() -> None:
    """Muon's are in fp32 under autocast on a CPU, as it wants them: no fault of the plan."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), ns_steps=3)
    tracked = TrackedMemory(model, [optimizer])
    with tracked:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(512, 64)).float().sum()
        loss.backward()
        before = tracked.operations.count
        optimizer.step()
        assert tracked.operations.count > before + 3
    flops = 2 * 512 * 64 * 64
    assert tracked.operations.matmul_flops == {"bfloat16": 2 * flops}


def test_a_step_that_compiled_is_compiling_but_for_what_stands_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(HostClock, "record", lambda self: setattr(self, "at_s", now[0]))
    signals = Signals(torch.device("cpu"))
    for phase in ("forward", "optimizer", "other"):
        signals.mark(phase)
        now[0] += 2.0
    signals.end_step(1, torch.tensor([1.0, 1.0, 1.0, 4.0]), {"compile_s": 0.5})
    (row,) = signals.drain(keep=0)
    assert (row["compile_s"], row["other_s"], row["step_s"]) == (4.0, 2.0, 6.0)
    assert row["forward_s"] == row["optimizer_s"] == 0.0


@pytest.mark.parametrize(("keep", "slack"), [(None, {}), (1, {"slack_s": 0.0})])
def test_slack_is_told_where_the_host_asked(keep: int | None, slack: dict[str, float]) -> None:
    """Check that slack is reported on a GPU, and only where the host asked for it."""
    signals = Signals(torch.device("cpu"))
    signals.mark("forward")
    signals.end_step(1, torch.tensor([1.0, 1.0, 1.0, 4.0]), {})
    signals.cuda = True
    (row,) = signals.drain(keep=keep)
    assert {name: value for name, value in row.items() if name == "slack_s"} == slack


def test_an_operation_is_tiny_if_all_that_it_touches_is() -> None:
    def kind(name: str) -> Any:
        return SimpleNamespace(is_view=False, overloadpacket=SimpleNamespace(__name__=name))

    seen, one, wide = Operations(), torch.ones(1), torch.ones(5000)
    seen.note(kind("add"), (one, one), one)
    seen.note(kind("add"), (wide, one), wide)
    assert (seen.count, seen.tiny) == (2, 1)
    seen.note(kind("addmm"), (torch.ones(7), torch.ones(3, 5), torch.ones(5, 7)), torch.ones(3, 7))
    assert seen.matmul_flops == {"float32": 2 * 3 * 5 * 7}
