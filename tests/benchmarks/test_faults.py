"""Planted faults end to end on a tiny model: the row is one that `benchmarks/truth.py` counts."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fault_doses as doses
import fault_hooks as hooks
import fault_products as products
import fault_times as times
import fault_workloads as workloads
import faults
import faults_planted as planted
import pytest
import torch
from facts import tells
from scoring import compute
from scoring.rows import DOCTOR

from headrace.data.loader import Loader, Micro
from headrace.doctor.rules import FEWEST_STEPS, LOST
from headrace.model.decoder import Block


@pytest.fixture
def examine(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Return a function that runs the program here on a tiny workload and returns its rows."""

    def run(*words: Any, sets: tuple[str, ...] = (), here: bool = True) -> list[dict[str, Any]]:
        small = (
            "model.dim=64",
            "model.ffn=256",
            "model.layers=4",
            "model.heads=2",
            "data.vocab=300",
            "data.workers=0",
            "data.sequence_length=16",
            "batch.tokens=512",
            "goal.steps=16",
            f"data.sources={corpus}",
            f"data.directory={prepared_folder}",
        )
        given = [*words, "--results", tmp_path, *["--here"] * here, "--set", *small, *sets]
        monkeypatch.setattr(sys, "argv", ["faults.py", *map(str, given)])
        faults.main()
        file = tmp_path / "doctor.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    return run


@pytest.mark.slow
def test_a_fault_a_healthy_run_and_their_rows(
    examine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workloads", "cpu_dense", "--severities", 0.4, "--held-out", "cpu_dense", "--faults"]
    before = Loader.step
    faults_ = ["slow_loader", "padded_batches", "full_memory"]
    healthy, slow, padded = examine(*words, *faults_, "--keep")
    assert Loader.step is before
    assert (healthy["measurement"], healthy["workload"]) == ("healthy", "cpu_dense")
    assert (slow["expected"], slow["verdict"], slow["held_out"]) == ("input", "input", True)
    assert slow["severity"] > 0.1 and not slow["abstained"] and slow["steps"] == 16
    assert "wasted tokens" in dict(padded["findings"])  # whether first is the judge's to say
    assert padded["severity"] == pytest.approx(7 / 16)
    assert tells(capsys.readouterr().out, "full_memory", "cpu_dense", "no row")
    assert len(DOCTOR.read(tmp_path).rows) == 3
    found = compute(tmp_path)
    right = 1 + (padded["verdict"] == "wasted tokens")
    assert (found["doctor_top1"]["value"], found["doctor_top1"]["n"]) == (right / 2, 2)
    assert found["doctor_false_alarms"]["n"] == 1
    again = examine(*words, "padded_batches", "--missing", tmp_path)
    assert len(again) == 3
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "runs").rename(kept / "runs")
    (tmp_path / "doctor.jsonl").rename(kept / "doctor.jsonl")
    anew = examine("--again", kept)
    assert [{**row, "thresholds": ""} for row in anew] == [{**r, "thresholds": ""} for r in again]


@pytest.mark.slow
def test_a_slow_stage_of_two_ranks_is_named(examine: Any) -> None:
    words = ["--workloads", "cpu_dense", "--severities", 0.2, "--faults", "slow_stage"]
    (row,) = examine(*words, sets=("model.layers=2",), here=False)
    assert (row["expected"], row["ranks"], row.get("refused")) == ("pipeline imbalance", 2, None)
    assert row["verdict"] == "pipeline imbalance" and row["severity"] == pytest.approx(0.23)


def test_each_rank_of_a_case_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def plan_with_weights(folder: Path) -> Any:
        folders.append(folder)
        return SimpleNamespace(device="meta")

    monkeypatch.setattr(planted.train, "run", lambda *given, **how: None)
    what = {"fault": "", "foreign": False, "resumed": False}
    case: Any = SimpleNamespace(plan_with_weights=plan_with_weights, **what)
    for name in ("case-1.json", "case-1.other"):
        planted.train_case(case, tmp_path / name)
    assert len({*folders}) == 2 and all(folder.is_dir() for folder in folders)


def test_a_slow_stage_sleeps_for_what_the_others_shall_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = workloads.WORKLOADS["cpu_dense"].plan
    slept: list[float] = []
    monkeypatch.setattr(times.time, "sleep", slept.append)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(Block, "__call__", lambda block, x: x, raising=False)
    for severity in faults.SEVERITIES:
        case = hooks.Case(plan, planted.STAGES, severity=severity, step_s=1.0, ranks=2)
        slept.clear()
        with planted.FAULTS["slow_stage"].plant(case) as facts:
            for _ in range(case.block_calls() // 2):  # its half of the layers
                Block.__call__(None, torch.ones(1))  # type: ignore[arg-type]
        assert sum(slept) == pytest.approx(facts["sleep_s"])
        micro_batches = case.plan().rows_per_step / case.plan().micro_rows
        lost_s = (1 - 1 / micro_batches) * facts["sleep_s"] / 2
        assert facts["share"] == pytest.approx(lost_s / (1.0 + facts["sleep_s"]))
        assert facts["share"] == pytest.approx(min(hooks.MARGIN * severity, facts["share"]))


def test_a_run_that_failed_is_refused_and_seeds_are_healthy_rows(
    examine: Any, tmp_path: Path
) -> None:
    broken = ("data.sources=nowhere",)
    (refused,) = examine(
        "--workloads", "cpu_dense", "--faults", "spikes", "--severities", 0.2, sets=broken
    )
    assert "nowhere" in refused["refused"] and refused["severity"] is None
    rows = examine("--workloads", "cpu_dense", "--healthy", 2, sets=("goal.steps=4",))
    assert [row["seeds"] for row in rows[1:]] == [[1], [2]]
    assert DOCTOR.read(tmp_path).refused == 1


def test_held_out_faults_take_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that held-out faults take effect, by planting them without running a workload."""
    case = hooks.Case(
        workloads.WORKLOADS["cpu_dense"].plan,
        ("goal.steps=20",),
        severity=0.25,
        step_s=1.0,
        ranks=2,
    )
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
    assert set(planted.UNSEEN_FAULTS) <= set(planted.FAULTS)
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
    assert faults.severity_of("steps", ran([1.0], error="ended"), healthy) == 1.0
    assert faults.severity_of("memory", ran([1.0]), healthy) is None
    stalled = ran([1.0] * 12)
    stalled.rows[6]["step_s"] = stalled.rows[11]["step_s"] = 6.0  # of 10 that count
    assert faults.severity_of("time", stalled, healthy) == 0.0
    assert faults.severity_of("stalls", stalled, healthy) == pytest.approx(0.5)


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


@pytest.mark.parametrize("wanted", [0.113, 0.13, 0.185])
@pytest.mark.parametrize(
    ("issued_s", "unit"), [(0.02, 1.0), (0.045, 1.0), (0.045, 2.4), (0.09, 0.7), (0.101, 1.3)]
)
def test_a_dose_is_found_behind_the_lead_of_the_host(
    wanted: float, issued_s: float, unit: float
) -> None:
    """A device of 100 ms a step; half of the launches fit into its queue."""

    def period(dose: float) -> float:
        halves = (max(0.05, issued_s / 2 + unit * dose), max(0.05, issued_s / 2))
        return sum(halves)

    near = doses.NEAR * (wanted - 0.1)
    found, tried = doses.search(period, wanted, near)
    assert len(tried) <= doses.TRIES and period(found) == pytest.approx(wanted, abs=near)


def test_a_step_is_repeated_without_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    build = SimpleNamespace(values={"lr": lambda index: 1.0}, device=torch.device("cpu"))

    def step(build: Any, micros: Any, index: int) -> None:
        rates.append(build.values["lr"](index))

    monkeypatch.setattr(planted.train, "step", step)
    asked: list[float] = []

    def find(build: Any, once: Any) -> None:
        assert doses.steps_s(build.device, once, lambda: asked.append(1.0)) >= 0
        assert doses.issue_s(build.device, once) >= 0

    with doses.repeating(find):
        for index in range(3):
            planted.train.step(build, [], index)
    assert rates == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0] and len(asked) == doses.REPEATED


def test_acts_are_as_many_as_the_dose_buys(monkeypatch: pytest.MonkeyPatch) -> None:
    case = hooks.Case(workloads.WORKLOADS["gpu_160m"].plan, (), severity=0.1, step_s=1.0)
    dose, acted = doses.Dose(case), list[int]()
    assert dose.on_gpu and dose.seconds == 0.0
    monkeypatch.setattr(doses, "unit_s", lambda act, out: 0.01)
    do = dose.spending(lambda out: acted.append(1))
    do(torch.ones(1))
    assert not acted  # nothing before the dose is found
    dose.seconds = 0.3
    for _ in range(12):
        do(torch.ones(1))
    assert len(acted) in (29, 30)


def test_a_linear_is_computed_in_fp32_in_both_directions() -> None:
    linear = torch.nn.Linear(8, 6, bias=False)
    x_BTD = torch.randn(2, 5, 8).bfloat16().requires_grad_()
    for count in (3, 5):
        wide = products.widened(linear, count, torch.bfloat16)
        linear.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = wide(x_BTD)
            y.backward(torch.ones_like(y))  # autocast would make it bf16 again
        assert y.dtype == torch.bfloat16
        exact = x_BTD.detach().float() @ linear.weight.detach().T
        torch.testing.assert_close(y[:, :count].float(), exact[:, :count].bfloat16().float())
        if count == 5:
            ones = torch.ones(10, 6)
            wanted = ones.T @ x_BTD.detach().float().flatten(0, 1)
            torch.testing.assert_close(linear.weight.grad, wanted)


def test_pieces_leave_a_large_device_room_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 and runs that hold a tenth and a third of it; nothing is allocated."""
    whole, empty = 150_109_880_320, torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype, device="meta")
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 1})
    monkeypatch.setattr(planted.train, "step", lambda build, micros, index: micros)
    for name, held in ((n, h) for n in ("fragments", "full_memory") for h in (0.1, 0.33)):
        free = int((1 - held) * whole)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, whole))
        for severity in faults.SEVERITIES:
            case = hooks.Case(workloads.WORKLOADS["gpu_30m"].plan, (), severity=severity)
            with planted.FAULTS[name].plant(case) as facts:
                for index in range(3):
                    planted.train.step(None, [], index)
            if name == "fragments":  # holes alone are more than the judge's tenth
                assert facts["share"] >= 0.13 and facts["share"] == pytest.approx(severity, rel=0.4)
            else:
                assert 0.6 < facts["share"] < 1 - held


def test_a_gpus_healthy_variants_are_plans_of_its_workloads() -> None:
    for workload in (w for w in workloads.WORKLOADS.values() if w.device == "cuda"):
        plain = hooks.Case(workload.plan, ()).plan()
        assert plain.rows_per_step >= 8  # a tenth of the rows is a row
        assert (
            plain.goal.steps
            and plain.goal.steps - 2 - 5 >= 2 * FEWEST_STEPS
            and plain.trace.every_steps
        )
        for name in workloads.variants("cuda"):
            hooks.Case(workload.plan, workloads.VARIANTS[name]).plan()
    assert set(workloads.NOT_ON_GPU) < set(workloads.VARIANTS)
    for name in ("overflows", "spikes"):  # a tenth of the steps is more than the rules let pass
        (longer,) = planted.settings_of(planted.FAULTS[name], "cuda")
        begins = planted.FROM_STEP["cuda"] if name == "spikes" else 0
        assert (int(longer.partition("=")[2]) - begins) // 10 >= (LOST if begins else LOST + 1)
