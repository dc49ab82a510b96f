"""Find on the device how much of a fault a step needs so that the fault takes the wanted time.

On a CPU a second that is spent is a second more. On a GPU the host is ahead of the device, at most
by the launches that fit into a queue, and what it spends costs nothing until its lead is used up;
so neither a sleep nor the time of one small operation predicts what a step will take. There the
dose is found in the run's second step, which the doctor leaves out as it does the first: the step
is repeated at a learning rate of 0, with the fault in it, until steps take as long as is wanted.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from fault_hooks import Case, patched
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.observe.signals import HostClock
from headrace.train import train

SECOND = 1
"""The step in which a dose is found; `window.WARM_STEPS` are not judged."""
REPEATED, TRIES = 3, 6
"""Steps by which a dose is timed, the first of which only fills the queue; and the most doses."""
NEAR = 0.12
"""A dose is right when steps miss the wanted time by at most this share of the added time."""
TIMED = 100
"""How many small acts are run to time one of them."""
SLOPES = (0.2, 5.0)
"""Credible seconds that one second of the dose adds to a step, from and to.

Less is hidden by the host's lead, and more is noise.
"""


class Dose:
    """Hold the host seconds that a fault adds to a step, and the facts that were measured.

    Args:
        case: gives the time that a step should take.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.on_gpu = case.plan().device == "cuda"
        self.seconds = 0.0 if self.on_gpu else case.extra_s
        self.lead_s = 0.0
        """Seconds that the host may spend in a step before the device waits for it; 0 on a CPU."""
        self.facts: dict[str, Any] = {}

    def calibrated(
        self, act: Callable[[float], None] | None = None
    ) -> AbstractContextManager[None]:
        """Calibrate the dose in the second step of the run that the context encloses.

        Args:
            act: spends the dose before a step; without it, hooks inside the step spend it.
        """

        def find(build: Build, once: Callable[[], None]) -> None:
            def period(seconds: float) -> float:
                self.seconds = seconds
                return steps_s(build.device, once, partial(act, seconds) if act else None)

            wanted_s = self.case.step_s + self.case.extra_s
            self.seconds, tried = search(period, wanted_s, NEAR * self.case.extra_s)
            self.facts |= {"dose_s": self.seconds, "tried": tried}

        return repeating(find, self.on_gpu)

    def led(self) -> AbstractContextManager[None]:
        """Measure how far the host is ahead, in the second step of the run inside the context."""

        def find(build: Build, once: Callable[[], None]) -> None:
            issued_s = min(issue_s(build.device, once) for _ in range(2))
            self.lead_s = max(0.0, self.case.step_s - issued_s)
            self.facts |= {"lead_s": self.lead_s}

        return repeating(find, self.on_gpu)

    def spending(
        self, act: Callable[[Tensor], Any], calls: int | None = None
    ) -> Callable[[Tensor], None]:
        """Return a function that repeats `act` so that its calls in a step take the dose.

        One act is timed at the first call. A fraction of an act is carried to the next call.
        """
        calls, owed = calls or self.case.block_calls(), 0.0

        def do(out: Tensor) -> None:
            nonlocal owed
            if "unit_s" not in self.facts:
                self.facts["unit_s"] = unit_s(act, out)
            owed += self.seconds / calls / self.facts["unit_s"]
            for _ in range(times := int(owed)):
                act(out)
            owed -= times

        return do


def repeating(
    find: Callable[[Build, Callable[[], None]], None], wanted: bool = True
) -> AbstractContextManager[None]:
    """Call `find` in step two with a function that runs that step and changes no weight."""

    def make(step: Any) -> Any:
        def stepped(build: Build, micros: Any, index: int, *rest: Any) -> Tensor:
            if wanted and index == SECOND:
                rate = build.values["lr"]
                build.values["lr"] = lambda _: 0.0
                try:
                    find(build, lambda: step(build, micros, index))
                finally:
                    build.values["lr"] = rate
            return step(build, micros, index, *rest)

        return stepped

    return patched(train, "step", make)


def steps_s(
    device: torch.device, once: Callable[[], Any], before: Callable[[], None] | None = None
) -> float:
    """Return the seconds between the ends of two steps, with the host one step ahead."""
    ends: list[Any] = []
    wait(device)
    for number in range(REPEATED):
        if before is not None:
            before()
        once()
        ends.append(torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostClock())
        ends[-1].record()
        if number:
            ends[-2].synchronize()
    wait(device)
    return ends[0].elapsed_time(ends[-1]) / 1e3 / (REPEATED - 1)


def issue_s(device: torch.device, once: Callable[[], Any]) -> float:
    """Return the seconds in which the host issues a step to an idle device."""
    wait(device)
    began_s = time.perf_counter()
    once()
    spent_s = time.perf_counter() - began_s
    wait(device)
    return spent_s


def unit_s(act: Callable[[Tensor], Any], out: Tensor) -> float:
    """Return the seconds of one act on a device that is idle otherwise."""
    act(out)
    wait(out.device)
    began_s = time.perf_counter()
    for _ in range(TIMED):
        act(out)
    wait(out.device)
    return (time.perf_counter() - began_s) / TIMED


def search(
    period: Callable[[float], float], wanted_s: float, near_s: float
) -> tuple[float, list[tuple[float, float]]]:
    """Return the dose at which steps take `wanted_s`, or the nearest; and all doses tried.

    The first dose is the wanted time itself. After it a second of the dose is assumed to cost a
    second, until two doses give a slope. A slope outside of `SLOPES` is not used.

    Args:
        period: dose -> seconds of a step; it is flat while the host is ahead, then rises.
        wanted_s: the wanted seconds of a step.
        near_s: the error in seconds that is accepted.
    """
    tried: list[tuple[float, float]] = []
    low, high, dose = 0.0, math.inf, wanted_s
    for _ in range(TRIES):
        tried.append((dose, period(dose)))
        spent_s = tried[-1][1]
        if abs(spent_s - wanted_s) <= near_s:
            break
        low, high = (low, dose) if spent_s > wanted_s else (dose, high)
        near = sorted(tried, key=lambda one: abs(one[1] - wanted_s))[:2]
        slope = 1.0
        if len(near) == 2 and near[0][0] != near[1][0]:
            slope = (near[1][1] - near[0][1]) / (near[1][0] - near[0][0])
            slope = slope if SLOPES[0] < slope < SLOPES[1] else 1.0
        dose = near[0][0] + (wanted_s - near[0][1]) / slope
        if math.isinf(high):
            dose = max(dose, 1.2 * low)
        else:
            dose = min(max(dose, low + 0.1 * (high - low)), high - 0.05 * (high - low))
    return min(tried, key=lambda one: abs(one[1] - wanted_s))[0], tried


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work; a CPU has none queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
