"""What a plan's prediction says to a reader: all of a step, what fits, and what is not known."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from typer.testing import CliRunner

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.core.units import format_bytes, format_count
from headrace.costs.ledger import WORDS
from headrace.costs.machine import Machine
from headrace.costs.step import StepTime
from headrace.costs.work import EDGE_S
from headrace.data.tokenizer import train_tokenizer
from headrace.plan.plan import Plan
from headrace.predict.calibration import Calibration, MeasuredPlan
from headrace.predict.intervals import (
    ASSUMED,
    NATURAL,
    PROBED,
    SAME_CHIP,
    STEP,
    STEPPED,
    widening,
)
from headrace.predict.page import format_prediction
from headrace.predict.prediction import DATA, LAUNCHES, predict
from headrace.recipes import recipes

ROOT = Path(__file__).parents[2]
H200 = Machine.assumed("NVIDIA H200")


def on_h200(*overrides: str) -> tuple[Plan, Any]:
    """The plan of 1b and where it would run."""
    text = (ROOT / "benchmarks" / "plans" / "1b.toml").read_text()
    plan = Plan.read(text, catalogue(), overrides=list(overrides))
    return plan, elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")


def test_what_fits_into_minutes_is_told() -> None:
    plan, context = on_h200("goal.minutes=30", "goal.steps=10000000")
    found = predict(plan, context, H200)
    assert (
        found.time.step_s and found.run.steps and found.run.steps == int(1800 / found.time.step_s)
    )
    last = format_prediction(plan, found).splitlines()[-1]
    tokens = format_count(found.run.steps * plan.batch.tokens)
    assert tells(last, "30 minutes", f"{format_count(found.run.steps)} steps", f"{tokens} tokens")
    plan, context = on_h200("goal.steps=24")
    found = predict(plan, context, H200)
    assert found.run.steps == 24 and "room for" not in format_prediction(plan, found)


def test_intervals_are_wider_on_a_gpu_that_no_step_was_measured_on() -> None:
    plan, _ = on_h200("goal.minutes=30", "goal.steps=10000000")
    context = elsewhere(make_context(plan, torch.device("cpu")), "RTX 4090")
    machine = Machine.assumed("RTX 4090")
    found = predict(plan, context, machine)
    assert (
        found.time.step_s
        and found.time.tokens_per_s
        and found.run.hours == 0.5
        and not found.time.no_interval
    )
    ends, own = found.time.step_between, STEP["no_gpu"]
    assert found.rates.widening.times == ASSUMED == 1.3
    assert ends.low == pytest.approx(own.low / 1.3 * found.time.step_s)
    assert ends.high == pytest.approx(own.high * 1.3 * found.time.step_s)
    text = format_prediction(plan, found)
    assert tells(text, "1.3 times", found.rates.widening.why)
    assert tells(text, "RTX 4090", "datasheet", "assumed")
    assert "80% of" in text and "room for" in text
    plan, _ = on_h200("goal.minutes=30", "schedule.steps=99")
    plan = plan.replaced(goal={"minutes": 30})
    exact = predict(plan, context, machine).run.hours_between
    assert exact.low == exact.high == 0.5  # minutes are minutes on any GPU


@pytest.mark.parametrize(
    ("name", "source", "basis", "times"),
    [
        ("NVIDIA H200", "datasheet", "no_gpu", 1.0),
        ("h200", "probes", "after_probes", 1.0),
        ("NVIDIA H200 NVL", "datasheet", "no_gpu", SAME_CHIP),
        ("NVIDIA H100 80GB HBM3", "datasheet", "no_gpu", SAME_CHIP),
        ("NVIDIA H100 80GB HBM3", "probes", "after_probes", NATURAL),
        ("NVIDIA A100-SXM4-80GB", "probes", "after_probes", PROBED),
        ("L4", "datasheet", "no_gpu", ASSUMED),
        ("L4", "probes", "after_20_steps", STEPPED),
        ("cpu", "probes", "after_probes", PROBED),
    ],
)
def test_an_interval_is_widened_by_what_is_not_known(
    name: str, source: Any, basis: Any, times: float
) -> None:
    found = widening(replace(Machine.assumed(name), source=source), basis)
    assert found.times == times and bool(found.why) == (times > 1)
    assert times == 1 or ("H100s" if times == NATURAL else name) in found.why
    assert found.of_gains == (1.0 if (source, "H100" in name) == ("probes", True) else times)


def test_a_prediction_is_told_in_words_of_everyday() -> None:
    """Check that a printed prediction names no internal instant, and explains its brackets."""
    plan, context = on_h200("goal.steps=24")
    found = predict(plan, context, H200)
    text, told_of = format_prediction(plan, found), found.to_dict()
    assert "turn " not in text and tells(text, "backward pass begins")
    assert "turn" in told_of["instants"] and told_of["peak_at"] in WORDS
    driver = f"beside the CUDA context's {format_bytes(H200.context_bytes)}"
    assert (
        f"of {format_bytes(found.memory.capacity_bytes)}, {driver}, {WORDS[found.memory.peak_at]}"
        in text
    )
    assert tells(text, "in brackets", "80%", 294, "measured steps", "H200s")
    assert "so wide" not in text and "not looked at" not in text and "if it fitted" not in text
    assert "CUDA" not in format_prediction(
        plan, replace(found, memory=replace(found.memory, context_bytes=0))
    )


def test_a_plan_that_does_not_fit_has_no_time_but_if_it_fitted() -> None:
    plan, context = on_h200("goal.steps=24", "batch.tokens=1073741824")
    found = predict(plan, context, H200)
    text = format_prediction(plan, found).splitlines()
    assert found.memory.fits == "no" and any(
        line.startswith("time, if it fitted: ") for line in text
    )
    assert tells(text[-1], "until step 24", "if it fitted:")


def test_the_shares_of_a_step_are_all_of_it() -> None:
    plan = Plan.read(recipes()["demo"].read_text(), catalogue(), overrides=["device=auto"])
    context = elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")
    found = predict(plan, context, H200)
    assert sum(found.time.shares().values()) == pytest.approx(1)
    assert found.time.shares()[LAUNCHES] > 0.5 and f"{LAUNCHES} " in format_prediction(plan, found)
    assert found.time.step_s
    slow = Calibration.of(
        StepTime({("forward", "product"): 1.0}, 0.1),
        MeasuredPlan(2.0, {"input": 0.5, "forward": 1.5}),
        "x",
    )
    waited = predict(plan, context, H200, slow)
    assert sum(waited.time.parts_s.values()) == pytest.approx(waited.time.step_s)
    assert waited.time.parts_s[DATA] == pytest.approx(0.5 - EDGE_S)


def test_a_tokenizer_that_is_brought_along_tells_the_head_its_size(tmp_path: Path) -> None:
    """Check that a tokenizer's file sets the head's size before a run has resolved the plan."""
    tokenizer = train_tokenizer(["one two three four five six"] * 9, vocab=300)
    tokenizer.save(tmp_path / "mine.json")
    plan, context = on_h200("model.vocab=0", f"data.tokenizer={tmp_path / 'mine.json'}")
    each = plan.model.vocab_multiple
    padded = -(-tokenizer.vocab // each) * each
    given, _ = on_h200(f"model.vocab={padded}")
    found, right = make_ledger(plan, context), make_ledger(given, context)
    assert found.sizes["vocab"] == right.sizes["vocab"] == padded and found.peak() == right.peak()
    plan, context = on_h200("model.vocab=0", f"data.tokenizer={tmp_path / 'other.json'}")
    with pytest.raises(ConfigError, match=r"other\.json' does not exist"):
        make_ledger(plan, context)


@pytest.mark.parametrize("verb", [["plan"], ["plan", "--sweep"], ["explain"], ["doctor"]])
def test_a_plan_without_a_layout_says_that_one_rank_is_predicted(verb: list[str]) -> None:
    device = [] if verb == ["explain"] else ["--device-name", "H200"]
    words = [verb[0], "demo", *verb[1:], *device]
    alone = CliRunner().invoke(app, words)
    auto = CliRunner().invoke(app, [*words, "mesh.auto=true"])
    assert alone.exit_code == auto.exit_code == 0, auto.output
    assert "mesh.auto" not in alone.stdout
    assert tells(auto.stdout, "one rank", "torchrun", "mesh.auto=false mesh.data=N", "--sweep")
    if verb == ["plan"]:
        laid_out = [*words, 'mesh="auto"', "mesh.auto=false", "mesh.data=2"]
        assert "between 2 ranks" in CliRunner().invoke(app, laid_out).stdout
        told = CliRunner().invoke(app, [*words, "mesh.auto=true", "--json"])
        assert "mesh.data=N" in json.loads(told.stdout)["left_open"]
