"""The tuner on an H200 that is made up: its steps are those predicted, off by noise."""

import random
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.costs.machine import Machine as Rates
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.predict.candidates import Asking
from headrace.predict.prediction import Prediction
from headrace.predict.sweep import sweep
from headrace.tuner import paired_blocks, proposals
from headrace.tuner.judge import Rules
from headrace.tuner.pairs import measure_with
from headrace.tuner.proposals import sources
from headrace.tuner.store import fingerprint
from headrace.tuner.tune import tune

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
tuner = import_module("tuner")

GPU, GIB = "NVIDIA H200", 2**30
OFF = 0.03
"""Standard deviation of what each technique does to a step beyond what is predicted."""


@pytest.fixture
def H200(Machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A made-up machine with a plan's predicted steps; predicting them is on nobody's clock."""

    class Foreseen(Machine):
        def __init__(self, start: Plan) -> None:
            super().__init__({}, room_bytes=139 * GIB, build_s=8.0)
            self.compile_s, self.seen = {"torch_compile": 45.0}, dict[str, Prediction]()
            self.context = elsewhere(make_context(start, torch.device("cpu")), GPU)
            self.asking = Asking(start, self.context, Rates.assumed(GPU), catalogue())
            monkeypatch.setattr(paired_blocks, "time", SimpleNamespace(time=self.clock))

        def predict(self, plan: Plan) -> Prediction:
            if (key := fingerprint(plan)) not in self.seen:
                self.seen[key] = self.asking.answer(plan).prediction
            return self.seen[key]

        def step_s(self, plan: Plan) -> float:
            off = sum(random.Random(name).gauss(0, OFF) for name in plan.techniques)
            return (self.predict(plan).time.step_s or 0.0) * (1 + off)

        def peak(self, plan: Plan) -> float:
            return self.predict(plan).memory.peak_bytes

    return Foreseen


def naive_and_best(workload: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, Plan]:
    """A workload's naive plan, and its last candidate, which any GPU runs; here is none."""
    monkeypatch.setattr(tuner, "runs_here", lambda plan: True)
    naive, plans = tuner.plans_of(workload, SimpleNamespace(plan=None, best=None, set=[]))
    return naive, [*plans.values()][-1]


@pytest.mark.parametrize(("workload", "faster"), [("lora", 1.35), ("long", 1.25)])
@pytest.mark.slow  # the quick one below finds as much among fewer techniques
def test_eight_minutes_find_what_is_as_fast_as_the_best_plan_known(
    H200: Any, workload: str, faster: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight minutes of long rows, 2 s a step, are too few to show what rounds otherwise."""
    naive, best = naive_and_best(workload, monkeypatch)
    if workload == "long":
        rounds = [n for n, t in best.techniques.items() if t.equality == "approximate"]
        best = changed(best, [f"-{n}" for n in rounds if n not in naive.techniques], catalogue())
    machine = H200(naive)
    found = tune(
        naive,
        "time",
        8.0,
        sources("time", machine.context, Rates.assumed(GPU), catalogue()),
        measure_with(machine),
        Rules(device="cuda", precision="bf16"),
        clock=machine.clock,
    )
    assert machine.now_s < 480
    assert machine.step_s(best) / machine.step_s(found.plan) > 0.97
    assert machine.step_s(naive) / machine.step_s(found.plan) > faster  # as predicted today
    assert sum(step.verdict == "refused" for step in found.path) <= 3
    if workload == "long":
        assert found.up and found.wanted > 8, "and says how many minutes would show it"


def test_a_new_technique_is_tuned_and_ranked_by_its_own_words(
    H200: Any, fewer_bytes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file: a sweep ranks it, and the tuner proposes, foresees, measures and keeps it."""
    naive, best = naive_and_best("160m", monkeypatch)
    machine, rates, known = H200(naive), Rates.assumed(GPU), catalogue()
    few = {*naive.techniques, *best.techniques, fewer_bytes}  # all would take longer
    known = replace(known, techniques={n: t for n, t in known.techniques.items() if n in few})
    ranked = sweep(naive, machine.context, rates, known)
    assert fewer_bytes in ranked.ranked[0].plan.techniques
    monkeypatch.setattr(proposals, "sweep", lambda *given: ranked)  # once is enough
    found = tune(
        naive,
        "time",
        8.0,
        sources("time", machine.context, rates, known),
        measure_with(machine),
        Rules(device="cuda", precision="bf16"),
        clock=machine.clock,
    )
    assert fewer_bytes in found.plan.techniques
    assert machine.step_s(best) / machine.step_s(found.plan) > 0.97
    (row,) = [step for step in found.kept if f"+{fewer_bytes}" in step.changes]
    assert row.stage == "accept" and row.ratio is not None and row.predicted is not None
    off = 3 * OFF * len(found.plan.techniques) ** 0.5  # each has its own
    assert row.ratio.value == pytest.approx(row.predicted, rel=off)
