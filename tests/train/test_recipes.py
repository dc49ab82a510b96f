"""Every recipe trains, shrunk to what a CPU does at once, or is the plan of a measured row."""

import tomllib
from pathlib import Path

import pytest

import headrace
from headrace.plan.plan import Plan
from headrace.plan.technique import installed
from headrace.recipes import read_recipe, recipes
from headrace.train import train
from headrace.train.run_folder import RunFolder

SHRUNK = [
    "device=cpu",
    "model.dim=32",
    "model.layers=2",
    "model.heads=2",
    "data.vocab=320",
    "data.sequence_length=16",
    "batch.tokens=128",
    "batch.micro_sequences=4",
    "eval.tokens=128",
    "goal.steps=60",
    "schedule.steps=60",
    "checkpoint.every_steps=0",
]


MEASURED = {"160m": "NVIDIA H100 80GB HBM3", "1b": "NVIDIA H100 80GB HBM3", "7b": "NVIDIA H200"}
"""Recipes of rows of docs/numbers.md -> a GPU that they fit. Their kernels need one."""


def of_random_text(name: str) -> bool:
    """Whether a recipe trains on text, and all of its weights."""
    plan = Plan.read(read_recipe(name), installed())
    adapts = any("frozen" in t.composes for t in plan.techniques.values())
    return name not in MEASURED and plan.vision is None and not adapts


FROM_RANDOM = [name for name in recipes() if name not in MEASURED and of_random_text(name)]
"""Recipes of text without an adapter, which random weights refuse: test_finetune runs the others,
and test_vision_runs those of images."""


@pytest.mark.parametrize("name", FROM_RANDOM)
def test_a_recipe_learns_with_all_of_its_techniques_in_force(
    name: str, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    text = read_recipe(name)
    where = [f"data.sources='{corpus}'", f"data.directory='{prepared_folder}'"]
    where.append(f"directory='{tmp_path}'")
    wide = Plan.read(text, installed())
    less = ["model.ffn=64"] if wide.model.ffn else []
    if "warmup" in wide.techniques:
        less.append("techniques.warmup.steps=4")
    else:
        less.append("schedule.warmup_steps=4")
    if "muon" in wide.techniques:
        less.append("techniques.muon.momentum_warmup_steps=20")
    if "sequence_length_schedule" in wide.techniques:
        less.append("techniques.sequence_length_schedule.start=4")
    if "length_mixing" in wide.techniques:
        less.append("techniques.length_mixing.lengths=[8,0]")
    if "yarn" in wide.techniques:
        less.append("techniques.yarn.original_length=8")
    if wide.eval.before:  # its rate is for weights that have learned something
        less.append("optimizer.lr=2e-3")
    plan = Plan.read(
        text, installed(), overrides=[*where, *SHRUNK, *less], without=["torch_compile"]
    )
    report = RunFolder(train.run(plan).folder).read_report()
    assert report["status"] == "done" and {*report["techniques"]} == {*plan.techniques}
    assert all(one["active"] for one in report["techniques"].values())
    assert report["val"][-1]["loss_nats"] < 5.5


@pytest.mark.parametrize("name", MEASURED)
def test_a_recipe_repeats_the_plan_of_its_rows_and_fits(name: str) -> None:
    plans = Path(__file__).parents[2] / "benchmarks" / "plans"
    assert tomllib.loads(read_recipe(name)) == tomllib.loads((plans / f"{name}.toml").read_text())
    plan = Plan.read(read_recipe(name), installed())
    forecast = headrace.predict(plan, device_name=MEASURED[name])
    assert forecast.memory.fits in ("yes", "tight") and forecast.time.step_s
