"""Run the search, the final and the techniques of `learning.py` whole on a tiny plan of a CPU."""

import math
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import bought
import learning
import learning_page
import learning_runs
import pytest
import torch
from learning_runs import LOOKS, SIDES, Point, Runs
from programs import rows
from tiny import WORDS

from headrace.assemble.context import elsewhere
from headrace.assemble.sockets import Build
from headrace.costs.machine import Machine
from headrace.optim.compiled import _own_graph
from headrace.train import train

TINY = [
    "device=cpu",
    "model.dim=16",
    "model.layers=2",
    "model.heads=2",
    "data.vocab=300",
    "data.sequence_length=8",
    "eval.tokens=256",
    "goal.bits_per_byte=3.0",
]
OFF = ["torch_compile", "cuda_graphs", "cudnn_attention", "sequence_length_schedule"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train and val of words, as --data takes it."""
    folder, words = tmp_path_factory.mktemp("novels"), random.Random(0)
    for name, count in (("train", 6000), ("val", 700)):
        (folder / name).mkdir()
        (folder / name / "one.txt").write_text(" ".join(words.choices(WORDS, k=count)))
    return folder


def call(patch: pytest.MonkeyPatch, text: Path, results: Path, *words: object) -> None:
    given = [*words, "--data", text, "--work", text, "--results", results, "--shape", "tiny"]
    given += ["--set", *TINY, "--without", *OFF]
    patch.setattr(sys, "argv", ["learning", *map(str, given)])
    learning.main()


@pytest.mark.slow
def test_one_call_each_fills_the_rows_and_goes_on_where_it_was_cut_off(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = ["--start", 1, 32, 1.9, 0, 0, "--start", 1, 32, 0.7, 0.4, 0]
    call(monkeypatch, text, tmp_path, "search", "--side", *SIDES, "--runs", 1, *starts)
    # Both have had their runs.
    call(
        monkeypatch, text, tmp_path, "search", "final", "--side", *SIDES, "--runs", 1, "--seeds", 2
    )
    only = ["--only", "muon", "cosine", "optimizer.eps"]
    few = ["techniques", "--seeds", 2, "--longer", 1, *only]
    call(monkeypatch, text, tmp_path, *few, "--part", "1/2", "--minutes", 0)
    first = [r["technique"] for r in rows(tmp_path, "learning") if r["kind"] == "technique"]
    call(monkeypatch, text, tmp_path, *few)
    found = rows(tmp_path, "learning")
    kinds = [row["kind"] for row in found]
    assert kinds == ["search"] * 2 + ["time_to_target"] * 2 + ["technique"] * 3
    assert [row["side"] for row in found[:4]] == ["adamw", "ours", "adamw", "ours"]
    best = found[3]
    assert best["seeds"] == [0, 1] and best["searched"] == 1 and all(best["reached"])
    assert 0 < best["metrics"]["ratio"]["low"] < best["metrics"]["ratio"]["value"]
    assert 0 < best["p"] < 1 and "muon" in best["techniques"]
    assert best["curve"][-1][1] <= 3.0 < best["curve"][0][1]
    parts = {row["technique"]: row for row in found[4:]}
    assert len(first) == 1 and {*parts} == {*only[1:]}  # none twice
    assert parts["muon"]["change"] == "left out" and "muon" not in parts["muon"]["techniques"]
    assert parts["cosine"]["change"] == "added" and parts["cosine"]["n"] == 2
    assert len({row["plan_sha256"] for row in parts.values()}) == 3
    page = learning_page.render(tmp_path)["page"]
    assert "`cosine`" in page and page.count(learning_page.NOT_YET) == 1  # what a budget buys


@pytest.mark.slow
def test_both_plans_of_a_budget_are_trained_on_its_minutes(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = bought.make_context  # of a GPU, whose rates are assumed: a shape is bought by them
    monkeypatch.setattr(
        bought, "make_context", lambda *given: elsewhere(make(*given), "NVIDIA H100")
    )
    monkeypatch.setattr(bought, "rates_here", lambda _: Machine.assumed("NVIDIA H100"))
    monkeypatch.setattr(bought, "SPEED_STEPS", 6)
    sizes = ["device=cpu", "data.vocab=300", "data.sequence_length=16", "eval.tokens=256"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[goal]\nsteps = 9\n[techniques.muon]\nmomentum_warmup_steps = 2\n")
    given = ["--data", text, "--work", text, "--results", tmp_path, "--recipe", recipe]
    given += ["--minutes", 0.02, "--with"]
    monkeypatch.setattr(sys, "argv", ["bought", *map(str, given), "--set", *sizes])
    bought.main()
    ours, law = rows(tmp_path, "learning")
    assert (ours["side"], law["side"]) == ("bought", "chinchilla")
    assert "muon" in ours["techniques"] and "muon" not in law["techniques"]
    for row in (ours, law):
        numbers = {name: metric["value"] for name, metric in row["metrics"].items()}
        losses = [loss for _, loss in row["curve"]]
        assert row["kind"] == "budget" and len(losses) > 10
        assert numbers["best_bits_per_byte"] == min(losses)
        assert numbers["last_bits_per_byte"] == pytest.approx(losses[-1], abs=1e-5)
    page = learning_page.render(tmp_path)["page"]
    assert f"`{recipe}`" in page and "Chinchilla, AdamW's defaults" in page


def test_a_point_is_the_plan_that_is_trained(tmp_path: Path, text: Path) -> None:
    runs = Runs(text, tmp_path, TINY, OFF)
    plan = runs.plan("ours", Point(2.0, 8, 0.5, 0.6), seed=3)
    assert (plan.optimizer.lr, plan.techniques["muon"].model_dump()["lr"]) == (6e-3, 0.05)
    assert (plan.schedule.kind, plan.schedule.decay_fraction) == ("warmup_stable_decay", 0.6)
    assert (plan.rows_per_step, plan.seed, plan.schedule.final_fraction) == (8, 3, 0)
    assert plan.goal_steps == round(runs.text_tokens * 0.5 / 8 / 8)
    cosine = runs.plan("ours", Point(1.0, 8, 0.5, 0.0))
    assert (cosine.schedule.kind, cosine.schedule.final_fraction) == ("cosine", 0)
    reading = runs.run(runs.plan("ours", Point(1.0, 8, 0.5, 0.4), words=["goal.bits_per_byte=0.1"]))
    assert not reading.reached and reading.to_target == math.inf
    assert reading.tokens == (plan.goal_steps or 0) * 8 * 8 and len(reading.curve) <= LOOKS


def test_every_length_of_rows_is_met_before_the_clock_runs(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape is met once, and the run that meets it is the run that does not, to the bit."""
    steps = list[tuple[int, float]]()

    def step(build: Build, micros: list[object], index: int) -> object:
        steps.append((index, build.values["sequence_length"](index)))
        return train.step(build, micros, index)  # type: ignore[arg-type]

    monkeypatch.setattr(learning_runs, "step", step)
    start = "techniques.sequence_length_schedule.start=4"
    runs = Runs(text, tmp_path, [*TINY, start], OFF[:3])
    plan = runs.plan("ours", Point(1.0, 8, 0.5, 0.4), words=["goal.bits_per_byte=0.1"])
    met = runs.run(plan)
    assert met.steps == plan.goal_steps
    thrown = len(steps) - (plan.goal_steps or 0)
    assert [length for _, length in steps[:thrown]] == [4] * 3 + [8] * 3
    assert steps[thrown] == (0, 4)
    count = len(steps)
    assert runs.run(plan).curve == met.curve and steps[count] == (0, 4)
    assert runs.run(plan.replaced(seed=1)).curve != met.curve


def test_runs_share_compiled_updates(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run compiles Muon's update of each shape, and a run of another seed none."""
    compiler, made = torch.compile, list[str]()

    def compiling(function: Any, **how: Any) -> Any:
        made.append(function.__name__)
        return compiler(function, backend="eager", **how)

    monkeypatch.setattr(torch, "compile", compiling)
    monkeypatch.setattr(learning_runs, "_shared_graph", cache(_own_graph))  # no other test's
    runs = Runs(text, tmp_path, [*TINY, "techniques.muon.compiled=true"], OFF)
    words = ["goal.bits_per_byte=0.1", "goal.tokens=640"]
    curves = [
        runs.run(runs.plan("ours", Point(1.0, 8, 0.01, 0.4), seed=seed, words=words)).curve
        for seed in (0, 1, 0)
    ]
    assert len(made) == len({*made}) > 1 and curves[0] == curves[2] != curves[1]


@pytest.mark.parametrize("epochs", [0.8, 0.72])
def test_a_search_walks_to_the_neighbours_of_its_best_point(epochs: float) -> None:
    """Check it from a point of the ladders, and from one between their values."""
    start, tried = Point(1.0, 32, epochs, 0.4), list[tuple[Point, float]]()
    for _ in range(40):
        point = learning.proposed(start, tried)
        assert point not in [known for known, _ in tried]
        tried.append((point, abs(math.log(point.factor / 2)) + abs(point.epochs - 0.6)))
    best = min(tried, key=lambda one: one[1])[0]
    assert tried[0][0] == start and (best.factor, best.epochs) == (2.0, 0.6)


def test_every_change_is_of_the_recipe_or_says_why_not(text: Path, tmp_path: Path) -> None:
    own = ("model.", "data.sequence")  # deep_thin sets the first; the recipe's rows can be cut
    runs = Runs(text, tmp_path, [word for word in TINY if not word.startswith(own)], OFF[:3])
    start = SIDES["ours"].start
    recipe = runs.plan("ours", start)
    for name, (change, words) in learning.changes([*recipe.techniques]).items():
        plan = runs.plan("ours", start, words=words)
        assert plan != recipe, name
        if change != "set":
            assert (name in plan.techniques) == (change == "added")


def test_the_page_is_not_behind_the_rows() -> None:
    assert not learning_page.behind(learning_page.RESULTS)


def test_a_page_without_rows_says_that_nothing_was_measured(tmp_path: Path) -> None:
    files = learning_page.render(tmp_path)
    assert {*files} == {"page", "receipts"} and files["page"].count(learning_page.NOT_YET) == 4


def test_a_point_that_diverged_is_the_worst() -> None:
    def missed(loss: float) -> float:
        return learning.score({"reached": False, "metrics": {"bits_per_byte": {"value": loss}}})

    assert missed(1.6) < missed(1.7) < missed(math.nan) == math.inf
