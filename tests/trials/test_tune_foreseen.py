"""The tuner on an H200 that is made up: its steps are those foreseen, off by what no plan knows."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headrace.techniques.loss
from headrace.cli import catalogue
from headrace.context import elsewhere, make_context
from headrace.core.machine import Machine as Rates
from headrace.core.plan import Plan
from headrace.planner.candidates import Asking
from headrace.planner.foresight import Foresight
from headrace.planner.sweep import sweep
from headrace.trials import proposals, turns
from headrace.trials.judge import Rules
from headrace.trials.pairs import measure_with
from headrace.trials.proposals import sources
from headrace.trials.store import fingerprint
from headrace.trials.tune import tune

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
tuner = import_module("tuner")

GPU, GIB = "NVIDIA H200", 2**30
OFF = 0.03
"""Standard deviation of what each technique does to a step beyond what is foreseen."""


@pytest.fixture
def H200(Machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A made-up machine with a plan's foreseen steps; foreseeing them is on nobody's clock."""

    class Foreseen(Machine):
        def __init__(self, start: Plan) -> None:
            super().__init__({}, room_bytes=139 * GIB, build_s=8.0)
            self.compile_s, self.seen = {"torch_compile": 45.0}, dict[str, Foresight]()
            self.context = elsewhere(make_context(start, torch.device("cpu")), GPU)
            self.asking = Asking(start, self.context, Rates.assumed(GPU), catalogue())
            monkeypatch.setattr(turns, "time", SimpleNamespace(time=self.clock))

        def foresee(self, plan: Plan) -> Foresight:
            if (key := fingerprint(plan)) not in self.seen:
                self.seen[key] = self.asking.answer(plan).foresight
            return self.seen[key]

        def step_s(self, plan: Plan) -> float:
            off = sum(random.Random(name).gauss(0, OFF) for name in plan.techniques)
            return (self.foresee(plan).step_s or 0.0) * (1 + off)

        def peak(self, plan: Plan) -> float:
            return self.foresee(plan).peak_bytes

    return Foreseen


@pytest.mark.parametrize("workload", ["lora", "long"])
def test_eight_minutes_find_what_is_as_fast_as_the_best_plan_known(
    H200: Any, workload: str
) -> None:
    naive, best = tuner.plans_of(workload, SimpleNamespace(plan=None, best=None, set=[]))
    machine = H200(naive)
    found = tune(
        naive, "time", 8.0,
        sources("time", machine.context, Rates.assumed(GPU), catalogue()),
        measure_with(machine), Rules(device="cuda", precision="bf16"), clock=machine.clock,
    )  # fmt: skip
    assert machine.now_s < 480
    assert machine.step_s(best) / machine.step_s(found.plan) > 0.97
    assert machine.step_s(naive) / machine.step_s(found.plan) > 1.35
    assert sum(step.verdict == "refused" for step in found.path) <= 3


NEW = '''
"""A technique that the tuner has never heard of."""

from typing import ClassVar

from headrace.core.ledger import Ledger
from headrace.core.technique import Card, Context, Evidence, Stage, Supported, Technique
from headrace.sockets import Build


class HalfTheBytes(Technique[Build]):
    """Move half of the bytes of every stream."""

    room: ClassVar[str] = "loss"
    stage: ClassVar[Stage] = Stage.STEP
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    timed: ClassVar[bool] = True
    symptoms: ClassVar[tuple[str, ...]] = ("memory bandwidth",)
    card: ClassVar[Card] = Card("bytes", "a thought", "all", "none", "this test")

    def supports(self, context: Context) -> Supported:
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        return ledger.reworked(
            lambda _, w: w.compiled().whole(w.compiled().bytes / 2) if w.kind == "stream" else w
        )

    def apply(self, build: Build) -> None:
        """Nothing."""

    def active(self, build: Build) -> Evidence:
        return Evidence(True, "")
'''


@pytest.fixture
def half_the_bytes(tmp_path: Path) -> Iterator[str]:
    """One more file in a room, and nothing else touched."""
    (tmp_path / "half_the_bytes.py").write_text(NEW)
    room = headrace.techniques.loss
    room.__path__.append(str(tmp_path))
    try:
        yield "half_the_bytes"
    finally:
        room.__path__.remove(str(tmp_path))
        sys.modules.pop("headrace.techniques.loss.half_the_bytes", None)
        delattr(room, "half_the_bytes")


def test_a_new_technique_is_tuned_and_ranked_by_its_own_words(
    H200: Any, half_the_bytes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file: a sweep ranks it, and the tuner proposes, foresees, measures and keeps it."""
    naive, best = tuner.plans_of("160m", SimpleNamespace(plan=None, best=None, set=[]))
    machine, rates, known = H200(naive), Rates.assumed(GPU), catalogue()
    few = {*naive.techniques, *best.techniques, half_the_bytes}  # all would take longer
    known = replace(known, techniques={n: t for n, t in known.techniques.items() if n in few})
    ranked = sweep(naive, machine.context, rates, known)
    assert half_the_bytes in ranked.ranked[0].plan.techniques
    monkeypatch.setattr(proposals, "sweep", lambda *given: ranked)  # once is enough
    found = tune(
        naive, "time", 8.0, sources("time", machine.context, rates, known),
        measure_with(machine), Rules(device="cuda", precision="bf16"), clock=machine.clock,
    )  # fmt: skip
    assert half_the_bytes in found.plan.techniques
    (row,) = [step for step in found.kept if f"+{half_the_bytes}" in step.changes]
    assert row.stage == "accept" and row.ratio is not None and row.predicted is not None
    assert row.ratio.value == pytest.approx(row.predicted, rel=3 * OFF)
