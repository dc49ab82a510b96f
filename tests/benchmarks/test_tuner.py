"""The tuner's program whole on a tiny plan; its row is one that `headrace truth` counts."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tiny import READ

from headrace.cli import catalogue
from headrace.context import elsewhere, make_context
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.planner.foresight import foresee
from headrace.techniques.attention import flash_attention_3
from headrace.trials import command
from headrace.trials.kinds import kind_of
from headrace.trials.proposals import Sources, sources
from headrace.truth import compute

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
tuner = import_module("tuner")


def test_a_naive_plan_is_tuned_and_stands_beside_the_best(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for name, rows in (("naive", 1), ("best", 0)):
        files.append(tmp_path / f"{name}.toml")
        text = READ.format(corpus=corpus, prepared=prepared_folder)
        files[-1].write_text(
            text.replace("tokens = 64 }", f"tokens = 64, micro_sequences = {rows} }}", 1)
        )

    def few(*given: object) -> Sources:
        """Micro-batches alone: compilers take minutes."""
        whole = sources(*given)  # type: ignore[arg-type]

        def cut(plan: Plan) -> list[object]:
            same = plan.techniques
            return [c for c in whole.single(plan) if c.plan.techniques == same]

        return Sources(lambda p: (whole.whole(p)[0], []), cut, lambda p: [])  # type: ignore[arg-type]

    monkeypatch.setattr(command, "sources", few)
    words = ["mine", "--plan", files[0], "--best", files[1], "--minutes", 0.06, "--steps", 2,
             "--here", "--results", tmp_path, "--folder", tmp_path]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["tuner.py", *map(str, words)])
    tuner.main()
    (row,) = [json.loads(line) for line in (tmp_path / "tuner.jsonl").read_text().splitlines()]
    assert row["workload"] == "mine" and "refused" not in row
    assert row["path"] and all(s["verdict"] for s in row["path"])
    assert any("micro_sequences" in word for s in row["path"] for word in s["changes"])
    # The best is several times as fast as the first plan, which a slow machine may leave as it is.
    assert 0.05 < row["metrics"]["ratio_to_best"]["value"] < 2
    assert compute(tmp_path)["tuner_ratio"]["n"] == 1
    assert (tmp_path / "mine-tune" / "tune.html").is_file()


@pytest.mark.parametrize("name", list(tuner.WORKLOADS))
def test_workloads_are_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_3, "is_installed", lambda module: True)
    shape, naive, best = tuner.WORKLOADS[name]
    text, known = (tuner.PLANS / f"{shape}.toml").read_text(), catalogue()
    plans = [tuner.parse(words.split()).plan(text, known) for words in (naive, *best)]
    assert all(kind_of(plans[0], plan) != "learning" for plan in plans[1:])
    machine = Machine.assumed("NVIDIA H200")
    for plan in plans:
        there = elsewhere(make_context(plan, torch.device("cpu")), machine.name)
        assert foresee(plan, there, machine).fits != "no"


def test_the_best_is_the_first_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(plan=None, best=None, set=["device=cpu"])
    taken = tuner.plans_of("160m", args)[1]
    assert "flash_attention_3" not in taken.techniques, "no CPU runs it"
    monkeypatch.setattr(tuner, "runs_here", lambda plan: True)
    best = tuner.plans_of("160m", args)[1]
    assert {"flash_attention_3", "fused_rope"} <= {*best.techniques}
