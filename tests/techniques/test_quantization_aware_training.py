"""Rounding begins where it is asked to, and what is measured before is not rounded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.assemble.context import make_context
from headrace.assemble.sockets import FAKE, Build
from headrace.compress.quantized_model import faking, quantize_model
from headrace.core.errors import ConfigError
from headrace.export.point import trained_spec
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.precision.quantization_aware_training import QuantizationAwareTraining
from headrace.train.evaluate import evaluate
from headrace.train.train import step

NAME = "quantization_aware_training"
KEYS = (f"techniques.{NAME}.group=8", "optimizer.lr=1e-30")


def test_it_begins_after_its_share_of_the_steps(make_tiny: Callable[..., Build]) -> None:
    """Steps before are the plain trainer's, bit for bit, and so is what is evaluated there."""
    more = ("schedule.steps=4", "model.output_init=zero")  # zeros look rounded at all times
    plain = make_tiny("optimizer.lr=1e-30", *more)
    late = make_tiny(*KEYS, f"techniques.{NAME}.start=0.5", *more)
    always = make_tiny(*KEYS, *more)
    technique = late.plan.techniques[NAME]
    for index in range(4):
        micros = late.loader.step(index).micros
        like = plain if index < 2 else always
        assert torch.equal(step(late, micros, index), step(like, micros, index))
        assert evaluate(late, 64).loss_nats == evaluate(like, 64).loss_nats
        evidence = technique.active(late)
        assert evidence.active and evidence.numbers["rounds"] == (index >= 2)
    assert evaluate(plain, 64).loss_nats != evaluate(always, 64).loss_nats
    spec = trained_spec(always.plan)
    assert spec is not None
    with faking(plain.model, spec, quantize_model(plain.model, spec)):
        assert evaluate(plain, 64).loss_nats == pytest.approx(evaluate(always, 64).loss_nats)
    late.now = late.values_after(0)
    assert not late.rounds_now and late.values_after(3)[FAKE] == 1.0
    assert not late.plan.checkpoint.keep_best and always.plan.checkpoint.keep_best


def test_a_rounding_that_is_gone_is_noticed(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(*KEYS)
    step(build, build.loader.step(0).micros, 0)
    assert build.plan.techniques[NAME].active(build).active
    linear: Any = build.model.get_submodule("blocks.0.mlp.down")
    del linear.forward
    evidence = build.plan.techniques[NAME].active(build)
    assert not evidence.active and evidence.numbers["rounded"] == evidence.numbers["matrices"] - 1


def test_refuses_a_share_of_nothing_and_groups_that_divide_no_row(
    tiny_plan: Callable[..., Plan], make_tiny: Callable[..., Build]
) -> None:
    plan = tiny_plan()

    def answer(plan: Plan, **knobs: Any) -> Supported | Unsupported:
        technique = QuantizationAwareTraining(**{"group": 8, **knobs})
        own = plan.replaced(techniques={NAME: technique})
        return technique.supports(make_context(own, torch.device("cpu")))

    assert isinstance(answer(plan, start=0.5), Supported)
    endless = plan.replaced(schedule={"kind": "constant"}, goal={"minutes": 1})
    refused = answer(endless, start=0.5)
    assert isinstance(refused, Unsupported) and "schedule.steps=1000" in refused.remedy.text
    assert isinstance(answer(endless), Supported)
    refused = answer(plan, group=7)
    assert isinstance(refused, Unsupported) and f"techniques.{NAME}.group=8" in refused.remedy.text
    assert isinstance(answer(plan, group=7, to="int8"), Supported), "whole rows have no groups"
    with pytest.raises(ConfigError, match="float8_linear"):
        make_tiny(*KEYS, "techniques.float8_linear.min_size=1")


def test_doubts_a_rate_that_does_not_end_at_zero(tiny_plan: Callable[..., Plan]) -> None:
    """Only weights of 4 bits under a rate that falls to more than a twentieth are doubted."""
    plan = tiny_plan("schedule.kind=cosine", "schedule.final_fraction=0.1")
    doubt = QuantizationAwareTraining(group=8).doubt(plan)
    assert doubt is not None and "ends at 10%" in doubt.reason and not doubt.meaningless
    key, _, value = doubt.remedy.text.partition("=")
    assert QuantizationAwareTraining(group=8).doubt(tiny_plan(f"{key}={value}")) is None
    assert QuantizationAwareTraining(to="int8").doubt(plan) is None
    endless = plan.replaced(schedule={"kind": "constant"})
    assert QuantizationAwareTraining(group=8).doubt(endless) is None
