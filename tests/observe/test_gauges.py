"""What is read of a GPU, from a library that is not there, or answers as it likes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.observe import gauges
from headrace.observe.gauges import Gauges

CUDA = torch.device("cuda", 0)
Read = Callable[[], dict[str, Any]]


class Library:
    """Imitate nvidia-ml-py, which reads a GPU at half its clock for heat and its limit of power."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0
    now_s, broken, knows_energy = 0.0, "", True

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, identity: str) -> str:
        assert identity == "GPU-12-ab"
        return identity

    def nvmlDeviceGetClockInfo(self, *_: Any) -> int:
        if self.broken:
            raise self.NVMLError(self.broken)
        return 990

    def nvmlDeviceGetMaxClockInfo(self, *_: Any) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, *_: Any) -> int:
        return 90

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, *_: Any) -> int:
        return 0x4 | 0x20 | 0x40 | 0x1

    def nvmlDeviceGetPowerUsage(self, *_: Any) -> int:
        return 300_000

    def nvmlDeviceGetEnforcedPowerLimit(self, *_: Any) -> int:
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, *_: Any) -> float:
        if not self.knows_energy:
            raise self.NVMLError
        return 500e3 * self.now_s  # 500 W


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(gauges, "time", SimpleNamespace(perf_counter=lambda: found.now_s))
    monkeypatch.setattr(gauges, "find_spec", lambda name: name)
    monkeypatch.setattr(gauges, "import_module", lambda name: found)
    card = SimpleNamespace(uuid="12-ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return found


@pytest.fixture
def read(library: Library, wait_until: Callable[..., None]) -> Callable[[], dict[str, Any]]:
    """What is told of two seconds."""

    def two_seconds() -> dict[str, Any]:
        made = Gauges(CUDA, every_s=0.004)
        made.start()
        made.start()  # once is enough
        wait_until(lambda: made.why_not or made.report()["samples"] >= 2)
        library.now_s += 2
        made.close()
        told = made.report()
        library.now_s += 1
        assert made.report() == told
        return told

    return two_seconds


def test_samples_are_told_as_shares_and_means(library: Library, read: Read) -> None:
    told = read()
    assert told["samples"] >= 2 and told["watched_s"] == 2
    assert told["sm_clock_hz"] == {"median": 990e6, "most": 1980e6}
    assert told["slowed"] == {"power limit": 1.0, "thermal slowdown": 1.0}
    assert told["power_w"] == pytest.approx(500, rel=0.01) and told["power_limit_w"] == 700
    assert told["temperature_c"] == 90
    library.knows_energy = False
    assert read()["power_w"] == 300


def test_what_cannot_be_read_is_told(
    library: Library, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = Gauges(torch.device("cpu"))
    cpu.start()
    assert cpu.report() == {"samples": 0, "why_not": "cpu is no NVIDIA GPU"}
    short = Gauges(CUDA)
    short.start()
    short.close()
    assert "shorter" in short.report()["why_not"]
    library.broken = "no permission"
    assert read() == {"samples": 0, "why_not": "NVMLError: no permission"}
    monkeypatch.setattr(gauges, "find_spec", lambda name: None)
    assert "pip install nvidia-ml-py" in read()["why_not"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu() -> None:
    pytest.importorskip("pynvml")
    made = Gauges(CUDA, every_s=0.05)
    made.start()
    x = torch.randn(8192, 8192, device=CUDA)
    for _ in range(50):
        x = x @ x * 1e-4
    torch.cuda.synchronize()
    made.close()
    told = made.report()
    assert told["samples"] > 2, told
    assert 1e8 < told["sm_clock_hz"]["median"] <= told["sm_clock_hz"]["most"]
    assert told["power_w"] > 50 and 10 < told["temperature_c"] < 110
