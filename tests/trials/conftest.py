"""Tiny plans, a machine that is made up, and readings of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import READ

from headrace.changes import changed
from headrace.cli import catalogue
from headrace.core.plan import Plan
from headrace.core.statistics import order_abba
from headrace.trials.pairs import Size
from headrace.trials.proposals import Sources
from headrace.trials.readings import NOT_DONE, OUT_OF_MEMORY, Reading

PLAN = 'directory = "{runs}"\n' + READ
KNOWN = catalogue()
LOSSES = [6.0 - 0.01 * i + 0.03 * (-1) ** i for i in range(60)]


@pytest.fixture
def plan(tmp_path: Path, corpus: Path, prepared_folder: Path) -> Plan:
    """A plan without techniques."""
    text = PLAN.format(runs=tmp_path / "runs", corpus=corpus, prepared=prepared_folder)
    return Plan.read(text, KNOWN)


@pytest.fixture(scope="session")
def change() -> Callable[..., Plan]:
    """A plan with changes in words."""
    return lambda plan, *words: changed(plan, words, KNOWN)


@dataclass
class Machine:
    """A device on which each technique makes a step so many times as long.

    Args:
        costs: technique -> factor.
        losses: technique -> nats that it moves every loss by.
        bytes: technique -> factor of the peak.
        reading_s: that a pair takes on the clock.
    """

    costs: dict[str, float]
    losses: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    reading_s: float = 10.0
    room_bytes: float = 1e9
    now_s: float = 0.0
    drifts: int = 0
    asked: list[tuple[Plan, Plan, Size]] = field(default_factory=list)
    interrupt_at: int | None = None

    def clock(self) -> float:
        """Seconds."""
        return self.now_s

    def step_s(self, plan: Plan) -> float:
        """Of a plan."""
        return self._times(self.costs, plan)

    def peak(self, plan: Plan) -> float:
        """Of a plan."""
        return 1e6 * self._times(self.bytes, plan)

    @staticmethod
    def _times(factors: dict[str, float], plan: Plan) -> float:
        found = 1.0
        for name in plan.techniques:
            found *= factors.get(name, 1.0)
        return found

    def measure(
        self, first: Plan, second: Plan, *, size: Size, together: bool, limit_s: float
    ) -> Reading:
        """A pair's reading."""
        self.asked.append((first, second, size))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        self.now_s += min(self.reading_s, limit_s)
        if self.reading_s > limit_s:
            return Reading(refused=f"{NOT_DONE} {limit_s:.0f} s", beside=Reading())
        one, two = self.reading(first, size), self.reading(second, size)
        if self.drifts:
            self.drifts -= 1
            one.seconds[-1] *= 1.5
        two.beside = one
        return two

    def reading(self, plan: Plan, size: Size) -> Reading:
        """Of one plan, with a little noise that is the same each time."""
        peak = self.peak(plan)
        if peak > self.room_bytes:
            return Reading(refused=f"{OUT_OF_MEMORY}: tried to allocate {peak:.0f} bytes")
        n = len(order_abba(size.rounds)) // 2
        off = sum(self.losses.get(name, 0.0) for name in plan.techniques)
        return Reading(
            seconds=[self.step_s(plan) * (1 + 0.001 * (i % 3)) for i in range(n)],
            losses=[loss + off for loss in LOSSES], norms=[1.0 for _ in LOSSES], peak_bytes=peak,
        )  # fmt: skip

    def proposal(self, plan: Plan, predicted_s: float | None, fits: str = "yes") -> Any:
        """A plan with its foresight."""
        seen = SimpleNamespace(
            step_s=predicted_s, peak_bytes=self.peak(plan), capacity_bytes=self.room_bytes,
            fits=fits,
        )  # fmt: skip
        return SimpleNamespace(plan=plan, foresight=seen)

    def sources(
        self, whole: Sequence[Any], *, start_s: float | None = None, names: Sequence[str] = ()
    ) -> Sources:
        """Those plans; and as single changes of the best each of the techniques by name."""

        def single(best: Plan) -> list[Any]:
            more = [f"+{name}" for name in names if name not in best.techniques]
            return [self.proposal(changed(best, [word], KNOWN), None) for word in more]

        return Sources(lambda p: (self.proposal(p, start_s), whole), single, lambda p: [])


@pytest.fixture(name="Machine", scope="session")
def _machine() -> type[Machine]:
    return Machine
