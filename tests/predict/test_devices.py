"""Plans on devices that are not here: what precision they run in, and what is told of memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.assemble.build import make_ledger
from headrace.assemble.context import check_supported, elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import UnsupportedError
from headrace.costs.footprint import RESTS, WORKSPACE, Footprint, make_footprint
from headrace.costs.hardware import NAMES, lookup
from headrace.costs.machine import Machine
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.predict.prediction import predict

OLD = ("T4", "V100")
"""GPUs without units for bf16."""


def on(plan: Plan, device_name: str) -> Context:
    """Where the plan would run on a GPU of that name."""
    return elsewhere(make_context(plan, torch.device("cpu")), device_name)


@pytest.mark.parametrize("name", NAMES)
def test_a_small_plan_is_foreseen_on_every_device(
    name: str, tiny_plan: Callable[..., Plan]
) -> None:
    plan = tiny_plan("device=auto")
    context = on(plan, name)
    found = predict(plan, context, Machine.assumed(name))
    assert context.precision == ("fp32" if name.startswith(OLD) else "bf16")
    assert context.capability == lookup(name).capability
    assert found.time.step_s is not None and found.time.step_s > 0 and found.memory.fits == "yes", (
        found.time.unknown
    )


@pytest.mark.parametrize("name", OLD)
def test_bf16_is_refused_where_no_unit_multiplies_it(
    name: str, tiny_plan: Callable[..., Plan]
) -> None:
    plan = tiny_plan("device=auto", "model.precision=bf16")
    with pytest.raises(UnsupportedError, match="bf16 products need 8") as error:
        check_supported([], on(plan, name))
    assert name in error.value.message and "model.precision=fp32" in error.value.remedy.text
    check_supported([], on(plan, "L4"))
    check_supported([], make_context(plan, torch.device("cpu")))


def test_a_report_predicts_what_a_plan_does(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tiny_plan: Callable[..., Plan]
) -> None:
    plan = tiny_plan("device=auto")
    context = on(plan, "H100")
    held = make_footprint(make_ledger(plan, context), "cuda", "bf16", context.capability)
    assert held.beside[WORKSPACE] == 64 * 2**20 and held.beside[RESTS] > 0
    found = predict(plan, context, Machine.assumed("H100"))
    assert found.memory.peak_bytes == pytest.approx(
        held.ledger.peak()[1] + sum(held.beside.values())
    )

    def with_workspace(ledger: Any, *place: Any) -> Footprint:
        return Footprint(ledger, 7 * 2**20, None)

    monkeypatch.setattr("headrace.train.summary.make_footprint", with_workspace)
    report = json.loads((train("goal.steps=1") / "report.json").read_text())
    lines = {line["name"]: line["bytes"] for line in report["memory_lines"]}
    assert lines[WORKSPACE] == 7 * 2**20
    assert sum(lines.values()) == pytest.approx(report["peak_memory_bytes"]["predicted"])


def test_a_small_plan_on_an_h100_holds_what_was_measured() -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "plans" / "small.toml").read_text()
    plan = Plan.read(text, catalogue(), overrides=["device=auto"])
    found = predict(plan, on(plan, "NVIDIA H100 80GB HBM3"), Machine.assumed("H100"))
    assert found.memory.peak_bytes == pytest.approx(
        985303552, rel=0.001
    )  # torch 2.11.0, 2026-11-25
    assert sum(found.memory.owners.values()) == pytest.approx(found.memory.peak_bytes)
