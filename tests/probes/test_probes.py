"""Check that probes measure this machine, keep what they found, and clean up when interrupted."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts import in_order, tells

from headrace import probes
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.progress import Progress
from headrace.costs.machine import Machine
from headrace.costs.rates import MatmulPoint, MatmulRates
from headrace.probes import at_hand
from headrace.probes.clock import Clock

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """Set HOME to a new folder, so that the probes keep their cache there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def measured(folder: None) -> Machine:
    """Return this CPU as measured in a moment."""
    return probes.measure(CPU, budget_s=1.5)


def test_a_cpu_is_measured(measured: Machine) -> None:
    machine = measured
    assert (machine.name, machine.kind, machine.source) == ("cpu", "cpu", "probes")
    assert machine.torch == torch.__version__ and machine.memory_bytes > 2**30
    assert 1e-7 < machine.launch_s < 1e-3
    assert machine.matmuls[0].precision == "fp32"
    absent = {one.what for one in machine.absent}
    assert {"products in fp8", "attention by cudnn", "captured graphs"} <= absent


def test_its_points_are_met(measured: Machine) -> None:
    machine = measured
    for known in machine.matmuls:
        for point in known.points:
            told_s = machine.matmul_s(known.precision, *point.sizes)
            assert told_s == pytest.approx(point.seconds, rel=1e-6)
    assert machine.traffic_s(2**34) > 10 * machine.traffic_s(2**20)
    assert machine.link_s(2**30, True) > machine.link_s(2**20, True)
    long_s, short_s = (machine.matmul_s("fp32", n, n, n) for n in (2048, 128))
    assert long_s > 100 * short_s


def test_it_is_kept_by_device_torch_and_driver(
    measured: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probes.cached(CPU) == measured
    file = probes.path(CPU)
    assert file.parent.parts[-2:] == ("headrace", "machines") and "torch-2" in file.name
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert probes.cached(CPU) is None


def test_home_keeps_it_without_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert probes.path(CPU).parent == tmp_path / ".cache" / "headrace" / "machines"
    assert probes.cached(CPU) is None
    probes.path(CPU).parent.mkdir(parents=True)
    probes.path(CPU).write_text("{}")
    with pytest.raises(ConfigError, match="format None"):
        probes.cached(CPU)


def test_no_time_leaves_the_most_important_and_says_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    machine = probes.measure(CPU, budget_s=1e-9)
    assert [(p.precision, len(p.points)) for p in machine.matmuls] == [("fp32", 1)]
    assert machine.traffic.points and machine.to_host.points
    assert any(text.startswith("products in bf16 (") for text in machine.skipped)
    with pytest.raises(UnsupportedError, match=in_order("probes", "no attention", "flash")):
        machine.attention_s(
            "flash",
            rows=1,
            heads=1,
            kv_heads=1,
            length=64,
            features=64,
            causal=True,
            backward=False,
        )


def test_the_shapes_of_a_plan_are_added(
    measured: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before, shape = measured, (2, 2, 2, 96, 16)
    known = before.matmuls[0].points[0].sizes
    after = probes.add(
        before,
        CPU,
        matmuls=[("fp32", 96, 80, 72), ("fp32", *known)],
        attention=[("flash", shape, True), ("cudnn", shape, True)],
    )
    (new,) = set(after.matmuls[0].points) - set(before.matmuls[0].points)
    assert new.sizes == (96, 80, 72)
    assert after.matmul_s("fp32", *new.sizes) == pytest.approx(new.seconds, rel=1e-6)
    assert [len(a.points) for a in after.attention if a.kernel == "flash"] == [
        1 + len(a.points) for a in before.attention if a.kernel == "flash"
    ]
    assert "cudnn" not in after.kernels(False) and len(after.absent) == len(before.absent)
    assert probes.cached(CPU) == after and after.traffic == before.traffic


class Interrupted(Progress):
    """Interrupt, as Ctrl-C does, at the first probe."""

    def task(self, description: str, done: float, total: float | None) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_leaves_nothing_and_restores_what_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(KeyboardInterrupt):
            probes.measure(CPU, budget_s=1, progress=Interrupted())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not list(tmp_path.rglob("*.json*"))


def test_rates_of_an_unknown_cpu_are_measured_once_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_probe: None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert at_hand.rates(CPU).source == "datasheet", "nothing is measured unless it is asked for"
    assert not list(tmp_path.rglob("*.json"))
    progress = Progress()
    machine = at_hand.rates(CPU, lambda: progress)
    assert machine.source == "probes" and probes.cached(CPU) == machine
    assert tells(progress.notes[0], "nothing is known", "processor")
    assert str(probes.path(CPU)) in progress.notes[1]
    assert at_hand.rates(CPU, not_again) == machine == at_hand.rates(CPU)


def not_again() -> Progress:
    """It is known."""
    raise AssertionError("measured twice")


def test_rates_that_cannot_be_kept_count_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_probe: None
) -> None:
    (tmp_path / ".cache").write_text("a file where a folder has to be")
    monkeypatch.setenv("HOME", str(tmp_path))
    progress = Progress()
    assert at_hand.rates(CPU, lambda: progress).source == "probes"
    assert "could not be kept" in progress.notes[1]


class Gpu(SimpleNamespace):
    """What torch tells of a GPU that is not here."""

    total_memory, multi_processor_count = 23 * 2**30, 59


def test_a_gpu_at_hand_is_assumed_where_it_is_published_and_else_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cuda, found = torch.device("cuda"), replace(Machine.assumed("L4"), source="probes")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Gpu())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    known = at_hand.rates(cuda, not_again)
    assert (known.source, known.memory_bytes, known.processors) == ("datasheet", 23 * 2**30, 59)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (17 * 2**30, 23 * 2**30))
    assert at_hand.rates(cuda, not_again, sure=True) == known, "another program has a part of it"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (22 * 2**30, 23 * 2**30))
    assert at_hand.rates(cuda, sure=True) == known, "a user waits for another answer"
    budgets: list[float] = []

    def measured(device: torch.device, *, budget_s: float, progress: Progress) -> Machine:
        budgets.append(budget_s)
        return found

    monkeypatch.setattr("headrace.probes.at_hand.measured", measured)
    monkeypatch.setattr("headrace.probes.at_hand.keep", lambda machine, device: tmp_path)
    progress = Progress()
    assert at_hand.rates(cuda, lambda: progress, sure=True) == found and budgets == [40.0]
    assert tells(progress.notes[0], "datasheet", "NVIDIA L4")
    budgets.clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX 6000D")
    with pytest.raises(UnsupportedError, match=in_order("nothing is known", "NVIDIA RTX 6000D")):
        at_hand.rates(cuda)
    assert at_hand.rates(cuda, Progress) == found and budgets == [40.0]


def test_of_apples_gpus_the_memory_alone_is_known(tmp_path: Path) -> None:
    machine = at_hand.rates(torch.device("mps"), not_again)
    assert machine.name == "mps" and machine.memory_bytes == Machine.assumed("cpu").memory_bytes


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="not meta"):
        probes.measure(torch.device("meta"))


def test_the_clock_tells_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    took, now = cycle([0.01, 0.01, 0.03]), [0.0]
    monkeypatch.setattr("headrace.probes.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call() -> None:
        now[0] += next(took)

    assert Clock(CPU, 1.0).seconds(call) == pytest.approx(0.01)


def between(call: Callable[[], Any], calls: int, cycles: int = 0) -> float:
    """A GPU's seconds: 7.5 us around all calls, each as long as it says, 60 us for a copy."""
    took = call()
    return 7.5e-6 + calls * (took if isinstance(took, float) else 60e-6)


def test_what_timing_adds_is_found_and_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(CPU, 1.0)
    clock.device, clock.flush = torch.device("cuda"), torch.empty(2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(clock, "_between_events", between)
    clock.edge_s = clock._edge_s()
    assert clock.edge_s == pytest.approx(7.5e-6)
    assert clock.seconds(lambda: 50e-6) == pytest.approx(50e-6)
    assert clock.seconds(lambda: 1e-6) == pytest.approx(1e-6, rel=0.1)  # in a burst
    assert clock.in_a_row(lambda: 50e-6, 1000) == pytest.approx(50e-6, rel=1e-3)


def test_products_that_heat_a_gpu_are_no_points() -> None:
    times = (1e-3, 5e-3)
    mixed, hot = (
        MatmulRates("bf16", 1e12, tuple(MatmulPoint(n, n, n, s) for n, s in enumerate(which, 1)))
        for which in (times, times[1:])
    )
    cool = probes._cool((mixed, hot), "gpu")
    assert [[p.seconds for p in one.points] for one in cool] == [[1e-3], [5e-3]]
    assert probes._cool((mixed, hot), "cpu") == (mixed, hot)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    device = torch.device("cuda")
    machine = probes.measure(device, budget_s=60)
    assert probes.cached(device) == machine
    assert machine.matmuls[0].precision == "bf16" and "flash" in machine.kernels(True)
    assert 1e-6 < machine.launch_s < 1e-4 and 1e-7 < machine.traffic.floor_s < 1e-5
    assert 2**26 < machine.context_bytes < 4 * 2**30
    assert 5e9 < 2**30 / machine.link_s(2**30, True) < 1e12
    assert all(p.seconds < probes.HOT_S for p in machine.matmuls[0].points)
    if "H200" in machine.name:
        assert 0 < Clock(device, 1.0).edge_s < 1e-5  # 0.9 to 7.5 us on four hosts
        assumed = Machine.assumed(machine.name)
        sizes = (8192, 8192, 8192)
        for precision in ("bf16", "fp8", "tf32", "fp32"):
            told = assumed.matmul_s(precision, *sizes)
            assert machine.matmul_s(precision, *sizes) == pytest.approx(told, rel=0.1)
        for kernel, kv_heads in (("cudnn", 8), ("flash", 8), ("efficient", 32)):
            how = {"rows": 4, "heads": 32, "kv_heads": kv_heads, "length": 8192, "features": 128}
            for backward in (False, True):
                times = [
                    one.attention_s(kernel, **how, causal=True, backward=backward)
                    for one in (machine, assumed)
                ]
                assert times[0] == pytest.approx(times[1], rel=0.1), (kernel, backward)
        assert machine.context_bytes == pytest.approx(assumed.context_bytes, rel=0.3)
        assert machine.traffic_s(2**31) == pytest.approx(assumed.traffic_s(2**31), rel=0.1)
        assert machine.memory_bytes == pytest.approx(assumed.memory_bytes, rel=0.01)
