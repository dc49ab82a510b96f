"""Remedies and forecasts of a run on a CPU, whose rates are made up."""

from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch
from probed_cpu import probed_cpu

from headrace.assemble.context import make_context
from headrace.cli.catalogue import catalogue
from headrace.costs.machine import Machine
from headrace.costs.rates import MeasuredStep
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.forecast import ERROR, ON_CPU, MeasuredRun, by_ledger
from headrace.doctor.remedies import PlanRemedy, remedies
from headrace.plan.plan import Plan
from headrace.predict.prediction import Prediction, predict

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"dim": 64, "layers": 1, "heads": 4, "vocab": 512},
    "data": {"sources": ["made-up.txt"], "sequence_length": 32},
    "batch": {"tokens": 64},
    "goal": {"steps": 10},
}


def plan_of(**tables: Any) -> Plan:
    """Return the tiny plan, with tables in the place of its own."""
    return Plan.model_validate({**TINY, **tables}, context={"catalogue": catalogue()})


def foreseen(plan: Plan, machine: Machine) -> Prediction:
    return predict(plan, make_context(plan, torch.device("cpu")), machine)


def test_no_pause_of_a_gpu_stands_between_steps_of_a_cpu() -> None:
    """A step of a tenth of a GPU's pause gains what its ledger says, of a plan and of a run."""
    machine = probed_cpu()
    plan = plan_of()
    before = foreseen(plan, machine)
    assert before.time.step_s is not None and before.time.step_s < 2e-3
    half_s = before.time.step_s / 2
    halved = replace(
        before, time=replace(before.time, step_s=half_s, parts_s={"matrix products": half_s})
    )
    assert halved.time.device_s == pytest.approx(before.time.step_s / 2)
    for measured in (MeasuredRun(), MeasuredRun(before.time.step_s)):
        gain = by_ledger(before, halved, measured).gain
        assert gain is not None and gain.value == pytest.approx(1.0)
        half = ERROR.least + (ERROR.share + log(ON_CPU)) * log(2)
        assert (gain.low, gain.high) == pytest.approx((2 * exp(-half) - 1, 2 * exp(half) - 1))


def remedies_of(machine: Machine, plan: Plan) -> list[PlanRemedy]:
    finding = Finding(Kind.COMPUTES, 0.9)
    context = make_context(plan, torch.device("cpu"))
    return remedies(finding, plan, context, machine, catalogue(), MeasuredRun())


def test_two_techniques_together_are_a_remedy_on_a_cpu() -> None:
    """Compiling and kept memory gain more together than each; neither is known by name."""
    small = {"dim": 128, "layers": 2, "heads": 4, "vocab": 2048, "rows": 32, "length": 128}
    step = MeasuredStep(**small, compiled=False, keeps=False, threads=2, seconds=0.3)
    machine = probed_cpu(step, replace(step, keeps=True, seconds=0.24))
    plan = plan_of(
        model={"dim": 128, "layers": 2, "heads": 4, "vocab": 2048},
        data={"sources": ["made-up.txt"], "sequence_length": 128},
        batch={"tokens": 4096},
    )
    found = remedies_of(machine, plan)
    gains = {one.change: one.gain.value for one in found if one.gain is not None}
    pair = ("+kept_memory", "+torch_compile")
    alone = gains[("+torch_compile",)]
    assert next(iter(gains)) == pair, gains
    assert gains[pair] > 1.02 * (1 + alone) - 1
    both = next(one for one in found if one.change == pair)
    for name in ("torch_compile", "kept_memory"):
        assert catalogue().find(name).line() in both.what
