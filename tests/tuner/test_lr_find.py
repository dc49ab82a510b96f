"""A range test suggests a rate near the best one, shows its curve, and leaves nothing behind."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from tiny import PLAN
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.plan.plan import Plan
from headrace.predict.scaling import step_law_rate
from headrace.tuner.lr_find import (
    RangeTest,
    fallen,
    find_rate,
    format_test,
    growing,
    has_diverged,
    smooth,
    write_curve,
)


def test_the_pure_parts() -> None:
    rates = growing(1e-4, 1.0, 101)
    assert rates[0] == 1e-4 and rates[-1] == pytest.approx(1.0)
    assert rates[51] / rates[50] == pytest.approx(10**0.04)
    # The first running mean is the loss, and a constant stays itself.
    assert smooth([3.0], 0.1) == [pytest.approx(3)]
    assert smooth([2.0] * 9, 0.01)[-1] == pytest.approx(2)
    assert smooth([4.0, 2.0], 1 / 6) == [4, pytest.approx(8 / 3)]  # (0.5 x 2 + 0.25 x 4) / 0.75
    # A sigmoid has made half of its fall at 1e-2 and 55% soon after, whatever comes then.
    losses = [7 - 3 / (1 + math.exp(-4 * (math.log10(rate) + 2))) for rate in rates]
    assert fallen(rates, losses) == pytest.approx(1e-2, rel=0.25)
    assert fallen(rates, [*losses[:-1], math.nan]) == pytest.approx(1e-2, rel=0.25)
    assert not has_diverged(losses) and has_diverged([7, 4, 6]) and has_diverged([7, math.nan])
    assert not has_diverged([7, 6.99, 7.1])  # the noise of a loss that has not fallen yet


@pytest.fixture(scope="module")
def tested(
    corpus: Path, prepared_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Plan, RangeTest, Any, Any]:
    """Return a test of the tiny plan with Muon, and torch's random numbers around it."""
    runs = f"directory={tmp_path_factory.mktemp('lr-find') / 'runs'}"
    text = PLAN.format(corpus=corpus, prepared=prepared_folder)
    plan = Plan.read(text, catalogue(), overrides=[runs], with_=["muon"])
    before = torch.get_rng_state()
    return plan, find_rate(plan, steps=24, high=30.0), before, torch.get_rng_state()


def test_it_tests_the_plans_own_step(tested: tuple[Plan, RangeTest, Any, Any]) -> None:
    plan, test, before, after = tested
    assert torch.equal(before, after)
    assert not Path(plan.directory).exists()
    assert test.rates == growing(1e-5, 30.0, 24)[: len(test.rates)]
    assert test.pick is not None and 1e-5 < test.pick < 30
    assert test.losses[0] == pytest.approx(math.log(320), rel=0.1)
    judged = "techniques.spike_rewind.window=8"  # it would refuse the steps at which losses rise
    watched = Plan.read(plan.to_toml(), catalogue(), overrides=[judged])
    assert find_rate(watched, steps=24, high=30.0).losses == test.losses


def test_it_suggests_every_optimizers_rate_by_one_factor(
    tested: tuple[Plan, RangeTest, Any, Any], tmp_path: Path
) -> None:
    plan, test, *_ = tested
    words = dict(word.split("=") for word in test.words)
    assert {*words} == {"optimizer.lr", "techniques.muon.lr"}
    factor = float(words["optimizer.lr"]) / plan.optimizer.lr
    assert float(words["techniques.muon.lr"]) == pytest.approx(factor * 0.02, rel=0.01)
    assert test.tokens == 40 * 128  # to the schedule's end
    assert test.step_law == step_law_rate(test.parameters, test.tokens or 0)
    text = format_test(test)
    assert "noise" not in text
    assert tells(text, "Step Law", "extrapolated") and test.words[1] in text
    shown = write_curve(test, tmp_path / "curve").read_text()
    assert "<svg" in shown and f"{test.pick:.3g}" in shown
    kept = json.loads((tmp_path / "curve" / "lr-find.json").read_text())
    assert kept["lr"] == test.pick and len(kept["losses"]) == len(kept["rates"])


@pytest.mark.parametrize(
    ("rates", "losses", "wider"),
    [
        ([1e-9, 1e-8], [9.0, 8.9], "--high 1"),
        ([1e-3, 10.0], [9.0, 9.1], "--high 1000"),
        ([1e-2, 10.0], [9.0, math.inf], "--low 1e-05"),
        ([1e-5, 10.0], [9.0, math.nan], "--steps 300"),
    ],
)
def test_noise_suggests_no_rate_and_another_test(
    tested: tuple[Plan, RangeTest, Any, Any],
    tmp_path: Path,
    rates: list[float],
    losses: list[float],
    wider: str,
) -> None:
    plan, test, *_ = tested
    flat = RangeTest(plan, rates, losses, test.parameters)
    told = flat.to_dict()
    assert told["lr"] is told["overrides"] is flat.pick is None
    text = format_test(flat)
    assert text.startswith("no learning rate") and "noise" in text and "overrides" not in text
    assert text.splitlines()[0].endswith(f"try: {wider}")
    page = write_curve(flat, tmp_path / "curve").read_text()
    assert "no rate is suggested" in page and "suggested:" not in page


def test_a_longer_run_gets_a_lower_rate(tested: tuple[Plan, RangeTest, Any, Any]) -> None:
    plan, test, *_ = tested
    own_steps = 5 * 23 / math.log10(30 / 1e-5)  # of five decades at the test's pace
    assert test.pick == pytest.approx(test.fallen * (40 / own_steps) ** -0.32)
    text = format_test(test)
    assert f"at {test.fallen:.3g} the loss" in text and "40 steps of the run take 0.77" in text

    def over(*overrides: str) -> RangeTest:
        other = Plan.read(plan.to_toml(), catalogue(), overrides=overrides)
        return RangeTest(other, test.rates, test.losses, test.parameters)

    longer = over("goal.steps=400", "schedule.steps=400")
    assert longer.pick == pytest.approx(test.pick * 10**-0.32)


def test_the_verb_leaves_a_run_as_it_is(plan_file: Path, tmp_path: Path) -> None:
    folder, runs = tmp_path / "runs" / "tiny", f"directory={tmp_path / 'runs'}"
    run = CliRunner().invoke(app, ["train", str(plan_file), runs, "goal.steps=2"])
    assert run.exit_code == 0 and (folder / "report.json").is_file(), run.output
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    words = [
        "lr-find",
        str(plan_file),
        runs,
        "--steps",
        "20",
        "--json",
        "--out",
        str(tmp_path / "out"),
    ]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    said = json.loads(told.stdout)
    assert said["overrides"] == [f"optimizer.lr={said['lr']:.3g}"] and Path(said["page"]).is_file()
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_plan_of_mesh_auto_is_laid_out_as_for_a_run(
    plan_file: Path, tested: tuple[Plan, RangeTest, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = list[Plan]()

    def lay_out(plan: Plan, show: Any) -> Plan:
        assert plan.mesh.auto
        return plan.replaced(mesh={"data": 2})

    def test(plan: Plan, **_: Any) -> RangeTest:
        plans.append(plan)
        return tested[1]

    monkeypatch.setattr("headrace.cli.plans.laid_out", lay_out)
    monkeypatch.setattr("headrace.tuner.lr_find.find_rate", test)
    ended = CliRunner().invoke(app, ["lr-find", str(plan_file), "mesh.auto=true"])
    assert ended.exit_code == 0 and [plan.mesh.ranks for plan in plans] == [2], ended.output
