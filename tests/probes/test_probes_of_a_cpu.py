"""What a CPU's probe times is what the ledger names; nothing is timed here."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace import probes
from headrace.core.model_config import ModelConfig
from headrace.core.progress import Progress
from headrace.costs.decoder_work import baseline_work
from headrace.costs.rates import MatmulPoint
from headrace.probes import host
from headrace.probes.clock import Clock
from headrace.probes.host import LINEAR_MATMULS
from headrace.probes.points import Probe, Readings
from headrace.probes.small_decoders import PLAIN, Small

LEAST = Small(16, 1, 2, 64, 2, 8)


class Counted(Clock):
    """Calls once what it is asked for, and says that it took a millisecond."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 1e9)
        self.threads: list[int] = []

    def seconds(self, call: Callable[[], Any]) -> float:
        self.threads.append(torch.get_num_threads())
        call()
        return 1e-3


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Readings]:
    """Nothing measured yet, of decoders that are as small as can be."""
    monkeypatch.setattr(host, "SIZES", (LEAST,))
    monkeypatch.setattr(host, "STEPS", (LEAST,) * 3)
    monkeypatch.setattr(host, "bf16_units", lambda: False)  # whose steps are others
    monkeypatch.setattr(host, "LINEARS", ((8, 6, 4),))
    before = torch.get_num_threads()
    yield Readings(Counted(), torch.Generator().manual_seed(0))
    assert torch.get_num_threads() == before


def run(readings: Readings) -> Readings:
    for probe in host._of_a_step(readings, []):
        if probe.group != "compiled steps":
            probe.run()
    return readings


def test_a_disturbed_reading_does_not_count(readings: Readings) -> None:
    """What else runs during a probe slows all that it times, and is over by the second time."""
    disturbed = iter([5e-3, 1e-3, 2.05e-3, 1e-3, 4e-3, 1.95e-3])
    readings.clock.seconds = lambda call: next(disturbed)  # type: ignore[method-assign]
    ran = list(host.linear_probes(readings, 8, 6, 4))
    for probe in ran:
        probe.run()
    probes._reread(readings, ran, Progress())
    assert {key: [round(p.seconds, 6) for p in of] for key, of in readings.linears.items()} == {
        ("result", "fp32"): [1e-3],
        ("input", "fp32"): [1e-3],
        ("weight", "fp32"): [2e-3],
    }


def test_what_fails_a_second_time_keeps_its_first_reading(readings: Readings) -> None:
    times = iter([1e-3, 2e-3, 3e-3])

    def seconds(call: Callable[[], Any]) -> float:
        if (taken := next(times, None)) is None:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return taken

    readings.clock.seconds = seconds  # type: ignore[method-assign]
    ran = list(host.linear_probes(readings, 8, 6, 4))
    for probe in ran:
        probe.run()
    probes._reread(readings, ran, Progress())
    assert [of[0].seconds for of in readings.linears.values()] == [1e-3, 2e-3, 3e-3]


def test_what_compiles_or_copies_is_read_once(readings: Readings) -> None:
    for group in ("compiled steps", "copies", "products in fp32"):
        calls: list[int] = []
        probe = Probe(group, "one", 1.0, 0.0, lambda calls=calls: calls.append(1))
        probes._reread(readings, [probe], Progress())
        assert not calls, group


def test_every_piece_of_a_ledger_is_timed_by_its_name(readings: Readings) -> None:
    names = {piece.name: piece for piece in host.pieces_of(run(readings))}
    config = ModelConfig(dim=16, layers=1, heads=2, vocab=64, qk_norm=True)
    work = baseline_work(config, rows=2, length=8, precision="fp32", micro_batches=2.0)
    streams = {n: p for n, p in work.items() if p.kind == "stream" and p.count and p.bytes}
    assert streams.keys() <= names.keys()
    for name, piece in streams.items():
        assert names[name].points[0].bytes == int(piece.bytes)
    fused = {name for name, piece in streams.items() if piece.fused is not None}
    assert fused == {n for n, piece in names.items() if not piece.whole and n in streams}
    others = names.keys() - streams.keys()
    assert {name.partition("/")[0] for name in others} == set(PLAIN)


def test_linears_are_timed_in_the_three_layouts_of_a_step(readings: Readings) -> None:
    run(readings)
    sizes = {matmul: points[0].sizes for matmul, points in readings.linears.items()}
    shapes = {"result": (8, 6, 4), "input": (8, 4, 6), "weight": (6, 4, 8)}
    assert sizes == {(matmul, "fp32"): size for matmul, size in shapes.items()}
    assert tuple(matmul for matmul, _ in sizes) == LINEAR_MATMULS
    assert isinstance(readings.linears["input", "fp32"][0], MatmulPoint)


def test_steps_are_timed_as_they_are_and_with_what_helps(
    readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "thread_counts", lambda: [2])
    run(readings)
    told = {(step.keeps, step.threads) for step in readings.steps if not step.compiled}
    now = torch.get_num_threads()
    assert (False, now) in told and (False, 2) in told
    clock: Any = readings.clock
    assert clock.threads.count(2) >= 1
    assert all(step.shape == (16, 1, 2, 64, 2, 8) for step in readings.steps)
