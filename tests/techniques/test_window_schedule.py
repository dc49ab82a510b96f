"""Widen the window step by step: each step is that of a plan with its window."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.sliding_window import SlidingWindow
from headrace.techniques.schedule.window_schedule import WindowSchedule
from headrace.train.evaluate import evaluate
from headrace.train.train import step

NAME, WINDOW = "window_schedule", "techniques.sliding_window.window"


def test_each_step_is_that_of_a_plan_with_its_window(make_tiny: Callable[..., Build]) -> None:
    """Compare loss and gradients bit for bit, and the evaluation between with the whole window."""
    build = make_tiny(
        f"{WINDOW}=8",
        f"techniques.{NAME}.start=2",
        f"techniques.{NAME}.until=4.0",
        "optimizer.lr=1e-30",
    )
    whole = make_tiny(f"{WINDOW}=8", "optimizer.lr=1e-30")
    for index, window in enumerate([2, 2, 4, 4, 8, 8]):
        own = make_tiny(f"{WINDOW}={window}", "optimizer.lr=1e-30")
        micros = build.loader.step(index).micros
        assert torch.equal(step(build, micros, index), step(own, micros, index))
        for one, two in zip(build.model.parameters(), own.model.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            assert torch.equal(one.grad, two.grad)
        assert evaluate(build, 64).loss_nats == evaluate(whole, 64).loss_nats
    evidence = WindowSchedule(start=2, until=4.0).active(build)
    assert evidence.active
    assert evidence.numbers == {"steps_of_2": 2, "steps_of_4": 2, "steps_of_8": 2}
    build.model.mask = replace(build.model.mask, window=2)
    assert not WindowSchedule(start=2, until=4.0).active(build).active, "evaluated with it too"


def answer(plan: Plan, window: int = 8, **knobs: Any) -> Supported | Unsupported:
    technique, beside = WindowSchedule(**knobs), {"sliding_window": SlidingWindow(window=window)}
    own = plan.replaced(techniques={**beside, NAME: technique})
    return technique.supports(make_context(own, torch.device("cpu")))


def test_refuses_what_it_cannot_widen(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan()
    assert isinstance(answer(plan, start=2), Supported)
    for window, start, remedy in ((8, 8, f"techniques.{NAME}.start=2"), (1, 1, f"{WINDOW}=4")):
        refused = answer(plan, window, start=start)
        assert isinstance(refused, Unsupported) and refused.remedy.text == remedy
    alone = WindowSchedule().supports(make_context(plan, torch.device("cpu")))
    assert isinstance(alone, Unsupported) and alone.remedy.text == "--with sliding_window"
    endless = plan.replaced(schedule={"kind": "constant"}, goal={"minutes": 1})
    refused = answer(endless, start=2)
    assert isinstance(refused, Unsupported) and "until" in refused.remedy.text
    assert isinstance(answer(endless, start=2, until=50.0), Supported)


def test_refuses_rows_that_ranks_share(tiny_plan: Callable[..., Plan]) -> None:
    beside = {"sliding_window": SlidingWindow(window=8), NAME: WindowSchedule(start=2)}
    context = make_context(tiny_plan().replaced(techniques=beside), torch.device("cpu"))
    split = replace(context, plan=context.plan.model_copy(update={"mesh": MeshConfig(context=2)}))
    refused = WindowSchedule(start=2).supports(split)
    assert isinstance(refused, Unsupported) and "mesh.context=1" in refused.remedy.text


def test_doubts_a_window_that_no_step_has(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan("goal.steps=10")
    assert WindowSchedule(start=2, until=5.0).doubt(plan) is None
    doubt = WindowSchedule(start=2, until=30.0).doubt(plan)
    assert doubt is not None and doubt.remedy.text == f"techniques.{NAME}.until=3"
