"""Tiny plans, a machine that is made up, and readings of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import READ

from headrace.cli.catalogue import catalogue
from headrace.core.errors import RefusalKind
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.train.guard import ALL, MEAN, First
from headrace.tuner.paired_blocks import (
    FITS,
    MARGIN,
    STEADY,
    TIMED,
    TRAINED,
    SampleSize,
    take_blocks,
    train_on,
    visit_steps,
)
from headrace.tuner.pairs import time_pair
from headrace.tuner.proposals import Sources
from headrace.tuner.readings import NOT_DONE, OUT_OF_MEMORY, Reading

PLAN = 'directory = "{runs}"\n' + READ
KNOWN = catalogue()
LOSSES = [50 - 0.05 * i + 0.03 * (-1) ** i for i in range(60)]


@pytest.fixture
def plan(tmp_path: Path, corpus: Path, prepared_folder: Path) -> Plan:
    """Return a tiny plan without techniques."""
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
        noise: technique -> share by which it enlarges the gradients' norm at the same weights.
        bytes: technique -> factor of the peak.
        base_s: a step without any.
        build_s: that building and warming a plan takes.
        compile_s: technique -> seconds more; a half from then on, for caches.
        drift: share by which each block that was ever timed makes the next one slower.
        off: how many blocks are off as a whole, by half.
        shaken: how many pairs have a block of four off by a tenth, on both sides.
    """

    costs: dict[str, float]
    losses: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    base_s: float = 0.1
    build_s: float = 5.0
    compile_s: dict[str, float] = field(default_factory=dict)
    room_bytes: float = 1e9
    now_s: float = 0.0
    drift: float = 0.0
    off: int = 0
    shaken: int = 0
    ran: int = 0
    asked: list[tuple[Plan, Plan, SampleSize]] = field(default_factory=list)
    visits: list[Plan] = field(default_factory=list)
    interrupt_at: int | None = None

    def clock(self) -> float:
        """Return the seconds that the made-up clock shows."""
        return self.now_s

    def step_s(self, plan: Plan) -> float:
        """Return the seconds of a step of this plan."""
        return self.base_s * self._times(self.costs, plan)

    def peak(self, plan: Plan) -> float:
        """Return the peak memory of this plan in bytes."""
        return 1e6 * self._times(self.bytes, plan)

    @staticmethod
    def _times(factors: dict[str, float], plan: Plan) -> float:
        found = 1.0
        for name in plan.techniques:
            found *= factors.get(name, 1.0)
        return found

    def measure(
        self, first: Plan, second: Plan, *, size: SampleSize, together: bool, limit_s: float
    ) -> Reading:
        """Return the reading of a pair of plans, as from one process."""
        self.asked.append((first, second, size))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        return self.ask(time_pair, first, second, size=size, limit_s=limit_s, limit=None)

    def begin(self, what: Any) -> None:
        """There is no process."""

    def ask(self, what: Any, *plans: Plan, limit_s: float, size: SampleSize, **how: Any) -> Reading:
        """As a process would: a pair, or one visit."""
        began_s, visited = self.now_s, what is not time_pair
        limit, left_s = how["limit"], lambda share=FITS: share * limit_s - (self.now_s - began_s)
        sides = [Made(self, plan) for plan in plans]
        sides[-1].reading.ready_s = self.now_s - began_s
        for place, side in enumerate(sides[: 2 if self.shaken else 0]):
            side.slow = 1 + 2 * place
        self.shaken = max(0, self.shaken - 1)
        found = sides[-1].reading
        found.beside = None if visited else sides[0].reading
        if all(not side.reading.refused for side in sides) and self.now_s - began_s < limit_s:
            if visited:
                room_s = how["share"] * limit.left_s()
                found.steps = visit_steps(sides[0].step_s, how["blocks"], size, room_s, limit)
                sides[0].run(how["blocks"], found.steps)
                sides[0].train_to(how["train"])
                found.steps *= how["blocks"]
                self.visits.append(plans[0])
            else:
                found.shares_state = size.worth is not None
                take_blocks(sides[0], sides[1], size, left_s, TIMED * limit_s, MARGIN["cuda"])
                train_on(sides[0], sides[1], size, lambda: left_s(STEADY), TRAINED * limit_s)
        if self.now_s - began_s > limit_s:
            self.now_s = began_s + limit_s
            return Reading(refused=f"{NOT_DONE} {limit_s:.0f} s", refusal=RefusalKind.TIME)
        return found

    def proposal(self, plan: Plan, predicted_s: float | None, fits: str = "yes") -> Any:
        """Return a plan with its prediction."""
        memory = SimpleNamespace(
            peak_bytes=self.peak(plan), capacity_bytes=self.room_bytes, fits=fits
        )
        seen = SimpleNamespace(time=SimpleNamespace(step_s=predicted_s), memory=memory)
        return SimpleNamespace(plan=plan, prediction=seen)

    def sources(
        self, whole: Sequence[Any], *, start_s: float | None = None, names: Sequence[str] = ()
    ) -> Sources:
        """Propose the plans of `whole`, and each named technique as a single change of the best."""

        def single(best: Plan) -> list[Any]:
            more = [f"+{name}" for name in names if name not in best.techniques]
            return [self.proposal(changed(best, [word], KNOWN), None) for word in more]

        return Sources(lambda p: (self.proposal(p, start_s), whole), single, lambda p: [])


class Made:
    """A plan that is built on a machine, with a little noise that is the same each time."""

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self.machine, self.step_s, self.peak = machine, machine.step_s(plan), machine.peak(plan)
        self.reading = Reading(norms=[1.0 for _ in LOSSES], peak_bytes=self.peak)
        self.slow: int | None = None
        off = sum(machine.losses.get(name, 0.0) for name in plan.techniques)
        self.moved = off
        self.reading.losses = [loss + off for loss in LOSSES]
        noise = sum(machine.noise.get(name, 0.0) for name in plan.techniques)
        self.reading.firsts = [First(loss + off, 1.0 + noise, {}) for loss in LOSSES[:3]]
        self.reading.limits = {"": 1e-3, MEAN: 1e-4, ALL: 0.1 if noise else 1e-3}
        if self.peak > machine.room_bytes:
            self.reading.refusal = RefusalKind.MEMORY
            self.reading.refused = f"{OUT_OF_MEMORY}: tried to allocate {self.peak:.0f} bytes"
        machine.now_s += machine.build_s
        for name in plan.techniques:
            machine.now_s += machine.compile_s.get(name, 0.0)
            self.reading.compile_s += machine.compile_s.get(name, 0.0)
            machine.compile_s[name] = machine.compile_s.get(name, 0.0) / 2

    def train_to(self, steps: int) -> None:
        """Add falling, scattered losses up to `steps`, and advance the clock by their time."""
        have = len(self.reading.losses)
        self.machine.now_s += max(0, steps - have) * self.step_s
        self.reading.losses += [
            50 - 0.05 * i + self.moved * (1 + 0.5 * (-1) ** (i // 3)) for i in range(have, steps)
        ]
        self.reading.norms += [1.0] * (steps - have)

    def take_over(self, other: "Made") -> None:
        """Take over a state; what moves the losses moves them as before."""

    def loss_with(self, other: "Made") -> float:
        """Return the loss of the next step as the other moves it, after the time of one."""
        self.machine.now_s += self.step_s
        return 50 - 0.05 * len(self.reading.losses) + other.moved

    def run(self, blocks: int, steps: int) -> None:
        """Run blocks of steps, note their seconds, and advance the clock by them."""
        self.machine.now_s += (1 + blocks * steps) * self.step_s
        for _ in range(blocks):
            noise = 0.001 * (len(self.reading.seconds) % 3)
            noise += 0.1 * (len(self.reading.seconds) % 4 == self.slow)
            self.machine.ran += 1
            self.reading.seconds.append(
                self.step_s * (1 + noise + self.machine.drift * self.machine.ran)
            )
        if self.machine.off and len(self.reading.seconds) == 4 and blocks == 1:
            self.machine.off -= 1
            self.reading.seconds[-1] *= 1.5


@pytest.fixture(name="Machine", scope="session")
def _machine() -> type[Machine]:
    return Machine
