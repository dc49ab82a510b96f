"""`distill` trains a student on a teacher: a plan from scratch, or a run that is there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KEPT = "techniques.distillation.top_k=8"


def test_a_plan_learns_from_a_run_and_another_from_what_it_said(
    call: Callable[..., Any], tiny_demo: list[str], tmp_path: Path
) -> None:
    """Both begin with the loss measured; the second student finds the teacher's words there."""
    keys = [word for word in tiny_demo[1:] if not word.startswith(("data.vocab", "goal."))]
    keys += [f"data.directory={tmp_path / 'data'}", "goal.steps=2", KEPT]
    first = call("distill", "runs/demo", *tiny_demo[:1], *keys, "name=first")
    second = call("distill", "demo", "demo", *keys, "name=second", "model.dim=32")
    for report in (first, second):
        assert report["before"]["loss_nats"] > 0 and report["val"][-1]["step"] == 2
        assert report["costs"]["bytes_per_token"] == 8 * 6 + 4
        assert report["costs"]["share_of_step"] == 0.0
    assert any("reads the text once" in line for line in first["told"])
    assert any("as they were written before" in line for line in second["told"])
    assert len([*(tmp_path / "data").glob("*/teacher-*")]) == 1
    small, large = (one["costs"]["student_parameters"] for one in (first, second))
    assert small == first["costs"]["teacher_parameters"] < large


def test_a_run_is_trained_on_for_epochs(call: Callable[..., Any], tiny_demo: list[str]) -> None:
    text = next(word for word in tiny_demo if word.startswith("data.sources="))
    words = ("distill", "demo", "runs/demo", text.partition("=")[2], "--dry-run")
    shown = call(*words, "--epochs", "2")
    plan, costs = shown["plan"], shown["costs"]
    assert plan["goal"]["steps"] == plan["schedule"]["steps"] > 2
    assert plan["model"]["pretrained"] == costs["student"] == costs["teacher"]
    assert plan["techniques"]["distillation"]["teacher"] == costs["teacher"]
    assert plan["data"]["sequence_length"] == 16, "the teacher's rows"
    forward = costs["teacher_forward_flops"]
    assert forward == pytest.approx(costs["student_forward_flops"])
    assert costs["share_of_step"] == pytest.approx(forward / (4 * forward), rel=0.05)
    adapted = call(*words, "--with", "lora")["plan"]
    assert adapted["optimizer"]["lr"] == 2e-4 and "lora" in adapted["techniques"]
