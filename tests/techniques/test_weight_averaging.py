"""Averaged weights: the papers' formulas, evaluations, and runs that hand them out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_same_run, metrics, report
from torch import Tensor

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.inference.load import open_model
from headrace.plan.technique import Unsupported
from headrace.techniques.schedule.weight_averaging import WeightAveraging
from headrace.train.checkpoint import Saved
from headrace.train.evaluate import evaluate
from headrace.train.train import step

NAME = "weight_averaging"
Make = Callable[..., Build]


def weights_of(build: Build) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in build.model.named_parameters()}


def steps_of(build: Build, count: int) -> list[dict[str, Tensor]]:
    """Take steps, and return the weights after each."""
    seen = []
    for index in range(count):
        step(build, build.loader.step(index).micros, index)
        seen.append(weights_of(build))
    return seen


def averaged(build: Build) -> dict[str, Tensor]:
    (standing,) = build.weights_for_eval
    with standing(build):
        return weights_of(build)


def test_an_exponential_average_is_the_recursion(make_tiny: Make) -> None:
    """Begin with the first weights; then a <- d a + (1 - d) w, d = min(0.3, (1 + n) / (10 + n))."""
    build = make_tiny(f"techniques.{NAME}.decay=0.3")
    seen = steps_of(build, 5)
    wanted = dict(seen[0])
    for n, weights in enumerate(seen[1:], 1):
        decay = min(0.3, (1 + n) / (10 + n))
        wanted = {k: decay * wanted[k] + (1 - decay) * w for k, w in weights.items()}
    assert decay == 0.3 and (1 + 1) / (10 + 1) < 0.3, "both halves of the rule have been tried"
    torch.testing.assert_close(averaged(build), wanted)
    assert all(w.equal(seen[-1][k]) for k, w in weights_of(build).items()), "put back to the bit"
    build.notes[NAME].blend(0.3, torch.zeros(()))
    torch.testing.assert_close(averaged(build), wanted, msg="a skipped step moves nothing")


def test_latest_weights_are_averaged_evenly(make_tiny: Make) -> None:
    keys = (f"techniques.{NAME}.{key}" for key in ("kind=lawa", "every=2", "keep=2"))
    build = make_tiny(*keys)
    first = steps_of(build, 1)[0]
    assert all(w.equal(first[k]) for k, w in averaged(build).items()), "no copy was made yet"
    seen = [first]
    for index in range(1, 7):
        step(build, build.loader.step(index).micros, index)
        seen.append(weights_of(build))
    wanted = {k: (seen[3][k] + seen[5][k]) / 2 for k in first}
    torch.testing.assert_close(averaged(build), wanted)
    assert WeightAveraging(kind="lawa").active(build).numbers["copies"] == 3


def test_a_run_resumes_to_the_bit_and_hands_out_the_average(train: Callable[..., Path]) -> None:
    words = (f"techniques.{NAME}.decay=0.9", "eval.every_steps=4")
    whole = train("name=whole", "goal.steps=8", *words)
    train("name=parts", "goal.steps=4", *words)
    parts = train("name=parts", "goal.steps=8", *words, resume=True)
    assert_same_run(whole, parts)
    assert [v["loss_nats"] for v in report(whole)["val"]] == [
        v["loss_nats"] for v in report(parts)["val"]
    ]
    saved = Saved(whole / "checkpoints" / "step-8")
    opened = open_model(whole, catalogue(), checkpoint="step-8")
    for name, weight in opened.model.named_parameters():
        average, raw = torch.empty_like(weight), torch.empty_like(weight)
        saved.fill_(f"technique/{NAME}/{name}", average)
        saved.fill_(f"model/{name}", raw)
        assert weight.equal(average) and not weight.equal(raw)
    with_data = open_model(whole, catalogue(), checkpoint="step-8", with_data=True)
    assert evaluate(with_data, 512).loss_nats == report(whole)["val"][-1]["loss_nats"]


def test_averages_of_slices_are_those_of_the_whole(
    zygote: Any, plan_file: Path, tmp_path: Path
) -> None:
    """Two ranks, whose gathered embedding must not be the average's when training goes on."""
    cwd = plan_file.parent
    words = ["guard=false", "goal.steps=6", "eval.every_steps=2", f"techniques.{NAME}.decay=0.9"]
    two = ["mesh.data=2", "--with", "fsdp", "name=two"]
    ended = zygote.ranks(2, cwd, "train", "tiny.toml", *words, *two)
    assert [e.code for e in ended] == [0, 0], ended[0].err
    ended = [zygote.run(cwd, "train", "tiny.toml", *words, "name=one")]
    ended += zygote.ranks(2, cwd, "train", "tiny.toml", *words[:3], *two[:3], "name=plain")
    assert not any(e.code for e in ended), ended[0].err
    one, two, plain = (cwd / "runs" / name for name in ("one", "two", "plain"))
    for a, b in zip(report(one)["val"], report(two)["val"], strict=True):
        assert a["loss_nats"] == pytest.approx(b["loss_nats"], rel=1e-5)
    assert [r["loss"] for r in metrics(two)] == [r["loss"] for r in metrics(plain)]
    saved = [Saved(run / "checkpoints" / "step-6") for run in (one, two)]
    for name in saved[0].names_under(f"technique/{NAME}/"):
        pair = [torch.empty(s.shape_of(name)[0]) for s in saved]
        for s, tensor in zip(saved, pair, strict=True):
            s.fill_(name, tensor)
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6)


def test_says_what_would_average_nothing(tiny_plan: Callable[..., Any]) -> None:
    plan = tiny_plan()
    answer = WeightAveraging(decay=0).supports(make_context(plan, torch.device("cpu")))
    assert isinstance(answer, Unsupported) and answer.remedy.text.endswith("decay=0.999")
    doubt = WeightAveraging(kind="lawa").doubt(plan)
    assert doubt is not None and doubt.remedy.text == f"techniques.{NAME}.every=1"
    assert WeightAveraging(kind="lawa", every=6).doubt(plan) is None


def test_what_is_handed_out_does_not_ask_for_the_runs_optimizers(
    train: Callable[..., Path],
) -> None:
    """Muon takes some matrices and Lion the rest, and neither holds what the average needs."""
    words = ("techniques.muon={}", "techniques.lion={}", f"techniques.{NAME}.decay=0.9")
    run = train("name=others", "goal.steps=3", "eval.every_steps=3", *words)
    opened = open_model(run, catalogue(), with_data=True)
    found = evaluate(opened, opened.plan.eval.tokens)
    assert found.loss_nats == pytest.approx(report(run)["val"][-1]["loss_nats"], rel=1e-6)


def test_two_averages_of_one_evaluation_are_refused(make_tiny: Make) -> None:
    with pytest.raises(ConfigError, match="cannot stand beside schedule_free"):
        make_tiny(f"techniques.{NAME}={{}}", "techniques.schedule_free={}")
