"""Stages of a pipeline that are not alike are named, with layers that even them out."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.assemble.build import make_context
from headrace.assemble.context import elsewhere
from headrace.cli.catalogue import catalogue
from headrace.costs.machine import Machine
from headrace.doctor.across_ranks import pipeline_imbalance
from headrace.doctor.findings import Kind
from headrace.doctor.forecast import MeasuredRun
from headrace.doctor.observation import Observation
from headrace.doctor.remedies import PlanRemedy, remedies
from headrace.doctor.rules import faults
from headrace.doctor.stages import StageTimes
from headrace.doctor.words import describe
from headrace.plan.plan import Plan

UNEVEN = StageTimes((0.6, 0.3), (6, 2), 8.0, 1 / 9, 1)
SEEN = Observation(step_s=(1.0,) * 12, stages=UNEVEN, communication_s=(0.2,) * 12, device="cuda")
TEXT = """
[model]
layers = 8
dim = 512
[data]
vocab = 2048
sequence_length = 512
[batch]
tokens = 16384
micro_sequences = 4
[goal]
steps = 9
[mesh]
pipeline = 2
[techniques.pipeline_parallel]
layers = [6, 2]
"""


def test_a_slow_stage_is_named_by_what_the_others_wait() -> None:
    finding = pipeline_imbalance(SEEN)
    assert finding is not None and finding.kind is Kind.PIPELINE_IMBALANCE
    assert finding.share == pytest.approx(7 / 8 * 0.15), "one micro-batch alone waits for none"
    words = describe(finding)
    assert "rank 0 of 2 takes 33% more" in words.sentence and "13% of the time" in words.sentence
    assert "600 ms on 6 layers, 300 ms on 2 layers" in words.evidence


@pytest.mark.parametrize(
    "stages",
    [None, replace(UNEVEN, own_s=(0.45, 0.45)), replace(UNEVEN, micro_batches=1.0)],
    ids=["no pipeline", "alike", "one micro-batch"],
)
def test_stages_that_cost_nothing_are_not_named(stages: StageTimes | None) -> None:
    assert pipeline_imbalance(replace(SEEN, stages=stages)) is None


def test_waits_for_other_stages_are_no_communication() -> None:
    """The first rank waits for what the second computes, and for the schedule."""
    alike = replace(SEEN, stages=replace(UNEVEN, own_s=(0.3, 0.6)), communication_s=(0.36,) * 12)
    assert alike.stages is not None and alike.stages.waited_s == pytest.approx(0.3375)
    assert [f.kind for f in faults(alike)] == [Kind.PIPELINE_IMBALANCE]
    sends = replace(alike, communication_s=(0.5,) * 12)
    assert Kind.EXPOSED_COMMUNICATION in [f.kind for f in faults(sends)]


def test_a_report_without_stages_has_none() -> None:
    assert StageTimes.of(None) is None and StageTimes.of({"own_s": []}) is None
    signal = {"own_s": [0.6, 0.3], "layers": [6, 2], "micro_batches": 8, "head": 1}
    assert StageTimes.of({**signal, "idle_share": 1 / 9}) == UNEVEN
    assert StageTimes.of({**signal, "own_s": [0.0, 0.3], "idle_share": 0.1}) is None


def test_layers_move_until_the_slowest_gains_no_more() -> None:
    even = UNEVEN.even()
    assert even.layers == (5, 3) and even.own_s == pytest.approx((0.5, 0.4))
    assert max(even.own_s) < max(UNEVEN.own_s) and even.passes_s < UNEVEN.passes_s
    assert replace(UNEVEN, own_s=(0.2, 0.6), layers=(1, 1)).even().layers == (1, 1)
    slow = StageTimes((0.8, 0.4, 0.4), (4, 4, 4), 8.0, 0.2, 2)
    assert slow.even().layers == (2, 5, 5), "a slow device has fewer layers than its like"


def test_the_head_goes_where_a_schedule_puts_it() -> None:
    there = UNEVEN.with_layers((4, 4), 8.0, 0.0, 0)
    assert there.own_s == pytest.approx((0.5, 0.4)), "two layers take 0.2 s, so that a head is 0.1"


def asked(measured: MeasuredRun) -> dict[str, PlanRemedy]:
    """Return the remedies of two H200s, by their words."""
    plan = Plan.read(TEXT, catalogue())
    finding = pipeline_imbalance(SEEN)
    assert finding is not None
    context: Any = elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")
    machine = Machine.assumed("NVIDIA H200")
    every = remedies(finding, plan, context, machine, catalogue(), measured)
    return {" ".join(one.change): one for one in every}


def test_layers_that_even_stages_out_are_a_remedy_with_a_forecast() -> None:
    known = asked(MeasuredRun.of(SEEN))
    moved = known["techniques.pipeline_parallel.layers=[5, 3]"]
    saved = UNEVEN.passes_s - UNEVEN.even().passes_s
    assert moved.gain is not None and moved.gain.high == pytest.approx(1 / (1 - saved) - 1)
    assert moved.forecast_from == "share" and moved.equality == "exact"
    assert "techniques.pipeline_parallel.layers to [5, 3] instead of [6, 2]" in moved.what
    assert all(one.gain is not None and one.gain.value > 0 for one in known.values())
    other = "techniques.pipeline_parallel.schedule=interleaved"
    assert any(other in words and "pipeline_parallel.layers=[]" in words for words in known)


def test_without_measured_stages_nothing_is_proposed() -> None:
    assert asked(MeasuredRun()) == {}
