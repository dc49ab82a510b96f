"""Read what the GPU itself reports while a run goes: clock, what slows it, power, temperature.

Read through NVIDIA's management library, where nvidia-ml-py (`pynvml`) is installed; nothing else
needs it, and without it the report says that it was not measured, and why. A thread of its own asks
every `EVERY_S` seconds, so no step ever waits for an answer. Power is the energy counter's
difference over the whole time, for a single reading is an average over a part of a second only
(arXiv 2312.02741); where a GPU has no such counter it is the mean of the readings.

Left out: utilization, which is no evidence of use, and the counters of NVML's GPM.
"""

import threading
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from statistics import fmean, median
from typing import Any

import torch

EVERY_S = 10.0
"""Seconds between two samples."""
SLOWED = {
    0x02: "clocks that were set",
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "thermal slowdown",
    0x80: "power brake",
}
"""NVML's bit of a reason for a lower clock -> the reason; idling and others are left out."""


class Gauges:
    """Take the readings of one device from `start` to `close`; other devices than GPUs have none.

    Args:
        device: the device of the run.
        every_s: seconds between two samples.
    """

    def __init__(self, device: torch.device, *, every_s: float = EVERY_S) -> None:
        self.why_not = "not started"
        self._device, self._every_s = device, every_s
        self._library: Any = None
        self._handle: Any = None
        self._samples: list[dict[str, float]] = []
        self._slowed: Counter[str] = Counter()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._began: tuple[float, float | None] = (0.0, None)
        self._ended: tuple[float, float | None] = (0.0, None)

    def start(self) -> None:
        """Begin to read; do nothing where there is nothing to read from."""
        if self._thread is not None:
            return
        self.why_not = self._open()
        if not self.why_not:
            self._began = self._ended = self._energy()
            thread = threading.Thread(target=self._watch, daemon=True)
            thread.start()
            self._thread = thread  # one that could not start cannot be waited for

    def close(self) -> None:
        """Stop reading; what was read stays."""
        if self._thread is not None and not self._done.is_set():
            self._done.set()
            self._thread.join()
            self._ended = self._energy()

    def report(self) -> dict[str, Any]:
        """Return what was read, or why nothing was.

        With samples: their number, `watched_s`, the SM clock's median and its most in Hz, the share
        of samples in which something slowed it ("slowed", by cause), mean watts and the limit, the
        highest temperature. Else "samples" is 0 and "why_not" says why.
        """
        if not self._samples:
            return {"samples": 0, "why_not": self.why_not or "the run was shorter than a sample"}
        samples, ended = list(self._samples), self._ended
        if not self._done.is_set():
            ended = self._energy()
        (began_s, before), (ended_s, after) = self._began, ended
        watts = [s["watts"] for s in samples if "watts" in s]
        if before is not None and after is not None and ended_s > began_s:
            watts = [(after - before) / (ended_s - began_s)]
        return {
            "samples": len(samples),
            "watched_s": ended_s - began_s,
            "sm_clock_hz": {
                "median": median(s["clock"] for s in samples),
                "most": samples[-1]["most"],
            },
            "slowed": {why: count / len(samples) for why, count in self._slowed.items()},
            "power_w": fmean(watts) if watts else None,
            "power_limit_w": samples[-1].get("limit"),
            "temperature_c": max(s["celsius"] for s in samples),
        }

    def _open(self) -> str:
        """Find the device in the library; return why that failed, "" where it did not."""
        if self._device.type != "cuda":
            return f"{self._device.type} is no NVIDIA GPU"
        if find_spec("pynvml") is None:
            return "nvidia-ml-py is not installed: pip install nvidia-ml-py"
        try:
            self._library = library = import_module("pynvml")
            library.nvmlInit()
            identity = str(torch.cuda.get_device_properties(self._device).uuid)
            self._handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{identity.removeprefix('GPU-')}")
            self._sample()
        except Exception as error:  # whatever a driver refuses with
            return f"{type(error).__name__}: {error}"
        self._samples.clear()  # of before the first step
        self._slowed.clear()
        return ""

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            try:
                self._sample()
            except Exception as error:
                self.why_not = f"{type(error).__name__}: {error}"
                return

    def _sample(self) -> None:
        nvml, handle = self._library, self._handle
        sample = {
            "clock": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
            "most": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
            "celsius": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        with suppress(nvml.NVMLError):  # not every GPU knows its power
            sample["watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
            sample["limit"] = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
        self._slowed.update({why for bit, why in SLOWED.items() if bits & bit})
        self._samples.append(sample)

    def _energy(self) -> tuple[float, float | None]:
        """Return the time in seconds, and the joules since the driver was loaded."""
        joules = None
        with suppress(self._library.NVMLError):
            joules = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        return time.perf_counter(), joules
