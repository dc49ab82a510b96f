"""Weights that have diverged: what is saved of them is told, and numbers that are none are."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from remedy_weights import MIXER, huge
from tiny import resealed

from headrace.core.errors import Diverged
from headrace.inference.sample import draw
from headrace.train.evaluate import Validation, finite

PLAIN = ("--without", "muon", "model.head_init=normal")
"""Changes of the demo with which a wild rate gives no number at once."""
WILD = ("optimizer.lr=1e20", "optimizer.clip_norm=0", "checkpoint.every_steps=1")


def test_a_checkpoint_that_diverged_unseen_is_no_place_to_go_on_from(
    call: Callable[..., Any], tiny_demo: list[str]
) -> None:
    told = call("train", *tiny_demo, *PLAIN, *WILD, "goal.steps=1", "name=wild", code=1)
    assert "step 1 is nan" in told["error"] and "no checkpoint is known" in told["error"]
    assert "--resume" not in told["remedy"] and "name=wild-again" in told["remedy"]


def test_numbers_that_are_none_are_one_message() -> None:
    with pytest.raises(Diverged, match="validation loss is nan"):
        finite(Validation(float("nan"), float("nan"), 1, 1))
    assert finite(Validation(2.0, 1.0, 1, 1)).loss_nats == 2
    logits = torch.zeros(2, 5)
    for wrong in (float("nan"), float("inf")):
        logits[1, 3] = wrong
        for temperature in (0.0, 1.0):
            with pytest.raises(Diverged, match="logits are no numbers"):
                draw(logits, temperature, 0, 1.0, torch.Generator())
    logits[1, 3] = -float("inf")  # an entry that is ruled out
    assert draw(logits, 0.0, 0, 1.0, torch.Generator()).tolist() == [0, 0]


def test_the_last_checkpoint_that_was_evaluated_is_named(
    call: Callable[..., Any], tiny_demo: list[str], workshop: Path
) -> None:
    call("train", *tiny_demo, *PLAIN, "goal.steps=3", "name=tame", "checkpoint.every_steps=1")
    plan = str(workshop / "runs" / "tame" / "plan.toml")
    wild = str(workshop / "runs" / "tame-2" / "plan.toml")
    begun = ("--resume", "--checkpoint", "step-3")  # another rate is a new run that begins there
    told = call("train", plan, *WILD, "goal.steps=4", *begun, code=1)
    assert "step-3 is the last" in told["error"]
    assert "--resume --checkpoint step-3 " in told["remedy"]
    words = told["remedy"].removeprefix("headrace ").split()
    words = [wild if word.endswith("tame-2/plan.toml") else word for word in words]
    again = call(*[w for w in words if "lr=" not in w], "optimizer.lr=1e-3", "goal.steps=4")
    assert again["status"] == "done" and again["val"][-1]["loss_nats"] == pytest.approx(5, abs=2)


def test_weights_too_large_to_compute_with_are_named_with_a_checkpoint_that_was_tried(
    call: Callable[..., Any], tiny_demo: list[str], workshop: Path
) -> None:
    steps = ("goal.steps=4", "checkpoint.every_steps=1", "checkpoint.keep_last=4")
    call("train", *tiny_demo, *steps, "name=large", "eval.every_steps=1000")
    run = workshop / "runs" / "large"
    huge(3, 4)(run)  # numbers, so that only what is computed with them is none
    for verb in (("eval", "large"), ("sample", "large", "--prompt", "river", "--tokens", "4")):
        told = call(*verb, "--checkpoint", "step-4", code=1)
        assert f"is 3e+38, in {MIXER} of " in told["error"] and "step-2 is sound" in told["error"]
        words = shlex.split(told["remedy"])
        assert words[:3] == ["headrace", *verb[:2]] and words[-2:] == ["--checkpoint", "step-2"]
        assert call(*words[1:])["exit_code"] == 0
    huge(1, 2)(run)
    told = call("eval", "large", "--checkpoint", "step-4", code=1)
    assert "no earlier checkpoint" in told["error"] and "--checkpoint" not in told["remedy"]
    assert told["remedy"].startswith("headrace train ") and "name=large-again" in told["remedy"]


def test_a_run_does_not_go_on_from_the_weights_that_gave_no_number(
    call: Callable[..., Any], tiny_demo: list[str], workshop: Path
) -> None:
    """Check that a resume goes back to step 2 where the weights of step 3 gave no finite loss."""
    steps = ("eval.every_steps=1", "checkpoint.every_steps=1", "checkpoint.keep_last=4")
    call("train", *tiny_demo, *steps, "goal.steps=3", "name=stuck")
    plan = str(workshop / "runs" / "stuck" / "plan.toml")
    huge(3)(workshop / "runs" / "stuck")
    told = call("train", plan, "--resume", "goal.steps=5", code=1)
    assert "step-3 holds these weights" in told["error"] and " 3e+38, in " in told["error"]
    assert "--checkpoint step-2 " in told["remedy"]
    assert call(*shlex.split(told["remedy"])[1:])["status"] == "done"


def test_a_checkpoint_of_weights_that_are_no_numbers_is_named_with_the_last_sound_one(
    call: Callable[..., Any], tiny_demo: list[str], workshop: Path
) -> None:
    steps = ("goal.steps=4", "checkpoint.every_steps=1", "checkpoint.keep_last=4")
    call("train", *tiny_demo, *steps, "name=ends", "eval.every_steps=1000")
    for step in (4, 3):  # as a run leaves them that diverged without being looked at
        spoil(workshop / "runs" / "ends" / "checkpoints" / f"step-{step}")
    for verb in (("eval", "ends"), ("sample", "ends", "--prompt", "river", "--tokens", "4")):
        told = call(*verb, "--checkpoint", "step-4", code=1)
        assert "step-4 holds weights" in told["error"] and "NaN" in told["error"], told
        assert "2 numbers of " in told["error"] and "in model/" in told["error"]
        assert "step-2 is sound" in told["error"]
        words = shlex.split(told["remedy"])
        assert words[:3] == ["headrace", *verb[:2]] and words.count("--checkpoint") == 1
        assert call(*words[1:])["exit_code"] == 0
    for step in (2, 1):
        spoil(workshop / "runs" / "ends" / "checkpoints" / f"step-{step}")
    told = call("eval", "ends", "--checkpoint", "step-4", code=1)
    assert "no earlier one" in told["error"] and "--checkpoint" not in told["remedy"]
    assert told["remedy"].startswith("headrace train ") and "name=ends-again" in told["remedy"]


def spoil(checkpoint: Path) -> None:
    """Make two numbers of a checkpoint's weights NaN, and its seals anew."""

    def change(tensors: dict[str, Any], part: dict[str, Any]) -> None:
        name = next(n for n in tensors if n.startswith("model/") and tensors[n].ndim == 2)
        tensors[name][0, :2] = float("nan")

    resealed(checkpoint, change)
