"""A layout of ranks that is clearly slower than another is named, with the command of the other."""

from typing import Any

import pytest
import torch
from rank_sizes import SIZES

from headrace.assemble.build import make_context
from headrace.assemble.context import elsewhere
from headrace.cli.catalogue import catalogue
from headrace.costs.machine import Machine
from headrace.doctor.advice import Advice, advised
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.forecast import MeasuredRun
from headrace.doctor.layout import wrong_layout
from headrace.doctor.words import describe
from headrace.plan.changes import parse
from headrace.plan.plan import Plan
from headrace.predict.prediction import predict

TEXT = f"""{SIZES}micro_sequences = 1
[techniques.torch_compile]
"""
TENSOR = "[mesh]\ntensor = 4\n[techniques.tensor_parallel]\n"
REPLICAS = "[mesh]\ndata = 4\n[techniques.data_parallel]\n"


def where(text: str, device: str) -> tuple[Plan, Any, Machine, Any]:
    """Return a plan and where it runs."""
    plan = Plan.read(TEXT + text, catalogue())
    context: Any = make_context(plan, torch.device("cpu"))
    context = context if device == "cpu" else elsewhere(context, device)
    return plan, context, Machine.assumed(context.device_name), catalogue()


def look(
    text: str, times: float | None = 1.0, device: str = "NVIDIA H200"
) -> tuple[Finding | None, Advice]:
    """Judge a run that took so many times what is predicted of it, None where nothing was read."""
    plan, context, machine, known = where(text, device)
    step_s = predict(plan, context, machine).time.step_s or 1.0
    measured = MeasuredRun(None if times is None else times * step_s)
    finding = wrong_layout(plan, context, machine, known, measured)
    found = [] if finding is None else [finding]
    return finding, advised(found, plan, context, machine, known, measured)


def test_a_layout_that_is_clearly_slower_is_named_with_the_faster_one() -> None:
    finding, advice = look(TENSOR)
    assert finding is not None and finding.kind is Kind.WRONG_LAYOUT
    words = describe(finding)
    assert "predicted, not measured" in words.sentence and "tensor=4" in words.evidence
    (remedy,) = advice.findings[0].remedies
    assert advice.first is remedy and remedy.gain is not None and remedy.gain.value > 0.1
    assert remedy.forecast_from == "share" and "mesh.tensor=1" in remedy.words
    other = parse(remedy.change).plan(TEXT + TENSOR, catalogue())
    assert other.mesh.ranks == 4 and "tensor_parallel" not in other.techniques


@pytest.mark.parametrize(
    ("text", "times", "device"),
    [
        (REPLICAS, 1.0, "NVIDIA H200"),
        (TENSOR, None, "NVIDIA H200"),
        (TENSOR, 0.1, "NVIDIA H200"),
        (TENSOR, 1.0, "cpu"),
        ("", 1.0, "NVIDIA H200"),
    ],
    ids=["a good layout", "nothing measured", "faster than predicted", "no time", "one rank"],
)
def test_where_nothing_is_clear_nothing_is_said(
    text: str, times: float | None, device: str
) -> None:
    assert look(text, times, device)[0] is None
