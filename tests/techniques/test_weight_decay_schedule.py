"""The weight decay follows its curve in every optimizer's update."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.plan.technique import Unsupported
from headrace.techniques.schedule.weight_decay_schedule import WeightDecaySchedule, decay_share
from headrace.train.train import step

NAME = "weight_decay_schedule"


def test_the_curve_goes_from_one_to_its_end_and_stays() -> None:
    even, round_ = (decay_share(shape, 0.2, 10) for shape in ("linear", "cosine"))
    assert [even(n) for n in (0, 5, 10, 30)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert [round_(n) for n in (0, 5, 10, 30)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert round_(2) > even(2), "a cosine begins slowly"
    assert decay_share("cosine", 10.0, 10)(10) == pytest.approx(10.0), "DINO's rise"


def test_two_updates_are_those_with_the_decay_written_in(make_tiny: Callable[..., Build]) -> None:
    """Compare with two runs of one step, bit for bit, whose plan has the decay of that step."""
    decays = (0.4, 0.3)
    build = make_tiny("optimizer.weight_decay=0.4", "schedule.steps=4", f"techniques.{NAME}={{}}")
    plain = make_tiny("optimizer.weight_decay=0.4", "schedule.steps=4")
    for index, decay in enumerate(decays):
        micros = build.loader.step(index).micros
        step(build, micros, index)
        for optimizer in plain.optimizers.values():
            for group in optimizer.param_groups:
                group["weight_decay"] = decay if group["weight_decay"] else 0.0
        step(plain, micros, index)
    for one, two in zip(build.model.parameters(), plain.model.parameters(), strict=True):
        assert one.equal(two)
    evidence = WeightDecaySchedule().active(build)
    assert evidence.active and evidence.numbers["share"] == 0.75


def test_refuses_what_would_change_nothing(tiny_plan: Callable[..., Any]) -> None:
    def answer(*words: str, **knobs: Any) -> Any:
        plan = tiny_plan(*words)
        return WeightDecaySchedule(**knobs).supports(make_context(plan, torch.device("cpu")))

    for refused, remedy in (
        (answer(final=1), f"techniques.{NAME}.final=0"),
        (answer("optimizer.weight_decay=0"), "optimizer.weight_decay=0.1"),
    ):
        assert isinstance(refused, Unsupported) and refused.remedy.text == remedy
    plan = tiny_plan().replaced(schedule={"kind": "constant"}, goal={"minutes": 1})
    refused = WeightDecaySchedule().supports(make_context(plan, torch.device("cpu")))
    assert isinstance(refused, Unsupported) and refused.remedy.text == "schedule.steps=1000"
