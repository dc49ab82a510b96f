"""A run ends at the first limit of its goal, and its report says at which and when."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import report

Train = Callable[..., Path]
NO_STEPS = "goal.steps=1000000"


def test_steps(train: Train) -> None:
    told = report(train("goal.steps=7"))
    goal = told["goal"]
    assert (goal["ended_by"], goal["reached"], goal["step"]) == ("steps", True, 7)
    assert goal["asked"] == {"steps": 7}
    assert told["steps"] == 7 and told["tokens"] == 7 * 128 and told["status"] == "done"


def test_tokens(train: Train) -> None:
    goal = report(train(NO_STEPS, "goal.tokens=1000"))["goal"]
    assert (goal["ended_by"], goal["reached"], goal["step"]) == ("tokens", True, 8)
    assert goal["tokens"] == 1024


def test_minutes(train: Train) -> None:
    told = report(train(NO_STEPS, "goal.minutes=0.005"))
    assert told["goal"]["ended_by"] == "minutes" and told["goal"]["reached"]
    assert 0.3 <= told["goal"]["wall_s"] <= told["wall_s"] < 5
    assert told["dollars"] is None


def test_dollars(train: Train) -> None:
    told = report(train(NO_STEPS, "goal.dollars=0.3", "hardware.dollars_per_hour=3600"))
    assert told["goal"]["ended_by"] == "dollars" and told["goal"]["reached"]
    assert told["dollars"] == pytest.approx(told["wall_s"]) and told["dollars"] >= 0.3


def test_bits_per_byte(train: Train) -> None:
    told = report(train("goal.steps=400", "goal.bits_per_byte=2.9", "eval.every_steps=2"))
    goal = told["goal"]
    assert (goal["ended_by"], goal["reached"]) == ("bits_per_byte", True)
    assert 2 < goal["step"] == told["steps"] < 400
    assert told["val"][-1]["bits_per_byte"] <= 2.9 < told["val"][-2]["bits_per_byte"]
    assert goal["wall_s"] == told["val"][-1]["wall_s"]


def test_a_target_that_is_missed_says_what_ended_the_run(train: Train) -> None:
    goal = report(train("goal.steps=4", "goal.bits_per_byte=0.01"))["goal"]
    assert (goal["ended_by"], goal["reached"], goal["step"]) == ("steps", False, None)


def test_the_last_weights_are_always_validated_and_may_be_the_best(train: Train) -> None:
    run = train("goal.steps=8", "eval.every_steps=100", "checkpoint.every_steps=4")
    assert [v["step"] for v in report(run)["val"]] == [8]
    best = run / "checkpoints" / "best"
    assert best.resolve().name == "step-8"
    counters = json.loads((best / "checkpoint.json").read_text())["counters"]
    assert counters["val"] == report(run)["val"]


def test_a_resume_goes_on_counting_time(train: Train) -> None:
    before = report(train("goal.steps=8"))["wall_s"]
    assert report(train("goal.steps=9", resume=True))["wall_s"] > before
