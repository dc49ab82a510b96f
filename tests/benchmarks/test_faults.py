"""Planted faults end to end on a tiny model: the row is one that `headrace truth` counts."""

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.data.loader import Loader, Micro
from headrace.model.decoder import Block
from headrace.truth import compute
from headrace.truth.rows import DOCTOR

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

faults, hooks, planted, times, workloads = (
    import_module(n)
    for n in ("faults", "fault_hooks", "faults_planted", "fault_times", "fault_workloads")
)


@pytest.fixture
def examine(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The program in this process on a tiny form of a workload; its rows come back."""

    def run(*words: Any, sets: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        small = ("model.dim=64", "model.ffn=256", "model.layers=4", "model.heads=2",
                 "data.vocab=300", "data.workers=0", "data.sequence_length=16",
                 "batch.tokens=512", "goal.steps=16",
                 f"data.sources={corpus}", f"data.directory={prepared_folder}")  # fmt: skip
        given = [*words, "--results", tmp_path, "--here", "--set", *small, *sets]
        monkeypatch.setattr(sys, "argv", ["faults.py", *map(str, given)])
        faults.main()
        file = tmp_path / "doctor.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    return run


def test_a_fault_a_healthy_run_and_their_rows(
    examine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workloads", "cpu_dense", "--severities", 0.4, "--held-out", "cpu_dense", "--faults"]
    before = Loader.step
    healthy, slow, padded = examine(*words, "slow_loader", "padded_batches", "full_memory")
    assert Loader.step is before
    assert (healthy["measurement"], healthy["workload"]) == ("healthy", "cpu_dense")
    assert (slow["expected"], slow["verdict"], slow["held_out"]) == ("input", "input", True)
    assert slow["severity"] > 0.1 and not slow["abstained"] and slow["steps"] == 16
    assert "wasted tokens" in dict(padded["findings"])  # whether first is the judge's to say
    assert padded["severity"] == pytest.approx(7 / 16)
    assert "full_memory in cpu_dense: no row" in capsys.readouterr().out
    assert len(DOCTOR.read(tmp_path).rows) == 3
    found = compute(tmp_path)
    right = 1 + (padded["verdict"] == "wasted tokens")
    assert (found["doctor_top1"]["value"], found["doctor_top1"]["n"]) == (right / 2, 2)
    assert found["doctor_false_alarms"]["n"] == 1
    again = examine(*words, "padded_batches", "--missing", tmp_path)
    assert len(again) == 3


def test_a_run_that_failed_is_refused_and_seeds_are_healthy_rows(
    examine: Any, tmp_path: Path
) -> None:
    broken = ("data.sources=nowhere",)
    (refused,) = examine("--workloads", "cpu_dense", "--faults", "spikes", "--severities", 0.2,
                         sets=broken)  # fmt: skip
    assert "nowhere" in refused["refused"] and refused["severity"] is None
    rows = examine("--workloads", "cpu_dense", "--healthy", 2, sets=("goal.steps=4",))
    assert [row["seeds"] for row in rows[1:]] == [[1], [2]]
    assert DOCTOR.read(tmp_path).refused == 1


def test_held_out_faults_take_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted, and nothing of them run: no threshold may know them."""
    case = hooks.Case(workloads.WORKLOADS["cpu_dense"].plan, ("goal.steps=20",), severity=0.25,
                      step_s=1.0, ranks=2)  # fmt: skip
    ids = torch.ones(2, 8, dtype=torch.int64)
    monkeypatch.setattr(planted.train, "step", lambda build, micros, index: micros)
    with planted.FAULTS["empty_rows"].plant(case):
        first, last = planted.train.step(None, [Micro(ids, ids), Micro(ids, ids)], 3)
    kept = torch.cat([first.targets_BT, last.targets_BT]) == 1
    assert kept.sum(1).tolist() == [8, 8, 8, 0]

    weight = torch.nn.Linear(1, 1)
    with planted.FAULTS["overflows"].plant(case) as facts:
        for index in range(8):
            planted.train.step(SimpleNamespace(model=weight), [], index)
            weight.zero_grad()
            weight(torch.ones(1)).sum().backward()
            assert weight.weight.grad is not None
            assert weight.weight.grad.isinf().any() == (index in (3, 7))
    assert facts["share"] == 2 / 20

    slept: list[float] = []
    monkeypatch.setattr(times.time, "sleep", slept.append)
    monkeypatch.setattr(Loader, "step", lambda loader, *given: None)
    with planted.FAULTS["stalling_loader"].plant(case) as facts:
        for _ in range(10):
            Loader.step(None)  # type: ignore[arg-type]
    assert [n for n, s in enumerate(slept) if s] == [4, 9]
    assert sum(slept) / 10 == pytest.approx(case.extra_s)

    slept.clear()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(Block, "__call__", lambda block, x: x, raising=False)
    with planted.FAULTS["changing_straggler"].plant(case):
        for index in range(3):
            planted.train.step(None, [], index)
            Block.__call__(None, torch.ones(1))  # type: ignore[arg-type]
    assert [s > 0 for s in slept] == [False, True, False]
    assert set(planted.HELD_OUT) <= set(planted.FAULTS)
    assert set(workloads.UNSEEN) <= set(workloads.WORKLOADS)


def test_severity_is_a_share_of_what_the_fault_takes() -> None:
    def ran(losses: list[float | None], step_s: float = 1.0, **more: Any) -> Any:
        rows = [{"loss": x, "step_s": step_s, "compile_s": 0.0} for x in losses]
        return faults.Ran(Path(), rows=rows, **more)

    healthy = ran([10.0 - i for i in range(10)])
    behind = ran([10.0 - i / 2 for i in range(10)])
    # Over five steps it ends at 6.5, which the healthy one has passed after 7 of 10.
    assert faults.severity_of("progress", behind, healthy) == pytest.approx(0.3)
    assert faults.severity_of("progress", healthy, healthy) == 0.0
    assert faults.severity_of("progress", ran([10.0, None]), healthy) == 1.0
    assert faults.severity_of("time", ran([1.0] * 10, 2.0), healthy) == pytest.approx(0.5)
    again = ran([1.0] * 12)
    again.rows[5] |= {"compile_s": 8.0, "step_s": 11.0}
    assert faults.severity_of("time", again, healthy) == pytest.approx(0.5)
    assert faults.severity_of("steps", ran([1.0], facts={"share": 0.3}), healthy) == 0.3
    assert faults.severity_of("memory", ran([1.0]), healthy) is None


def test_every_workload_is_a_plan_that_each_fault_can_change() -> None:
    devices = {name: w.device for name, w in workloads.WORKLOADS.items()}
    assert list(devices.values()).count("cpu") >= 5 <= list(devices.values()).count("cuda")
    assert len(planted.FAULTS) >= 12
    for workload in workloads.WORKLOADS.values():
        plain = hooks.Case(workload.plan, ()).plan()
        for fault in planted.FAULTS.values():
            if workload.device not in fault.devices:
                assert fault.why_not
                continue
            more = planted.settings_of(fault, workload.device)
            ranks = (f"mesh.data={fault.ranks}",)
            changes = {planted.change_of(fault, s, plain) for s in faults.SEVERITIES}
            for change in changes:
                case = hooks.Case(workload.plan, (*more, *ranks, *change))
                assert case.block_calls() >= plain.model.layers // fault.ranks


def test_a_hook_is_taken_out_again() -> None:
    owner = SimpleNamespace(value=1)
    with hooks.patched(owner, "value", lambda was: was + 1):
        assert owner.value == 2
    assert owner.value == 1

    class Base:
        def told(self) -> int:
            return 1

    class Own(Base):
        pass

    with hooks.patched(Own, "told", lambda was: lambda self: was(self) + math.inf):
        assert Own().told() == math.inf
    assert "told" not in vars(Own) and Own().told() == 1
