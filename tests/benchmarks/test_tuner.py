"""The tuner's program whole on a tiny plan; its row is one that `benchmarks/truth.py` counts."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tuner
from facts import tells
from scoring import compute
from tiny import READ

from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.statistics import Interval
from headrace.costs.machine import Machine
from headrace.plan.plan import Plan
from headrace.predict.prediction import predict
from headrace.techniques.attention import flash_attention_3
from headrace.tuner import command
from headrace.tuner.effects import effect_of
from headrace.tuner.judge import Compared
from headrace.tuner.path import Tuned
from headrace.tuner.proposals import Sources, sources


@pytest.mark.slow
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
        """Keep the proposals that change micro-batches alone, for compilers take minutes."""
        whole = sources(*given)  # type: ignore[arg-type]

        def cut(plan: Plan) -> list[object]:
            same = plan.techniques
            return [c for c in whole.single(plan) if c.plan.techniques == same]

        return Sources(lambda p: (whole.whole(p)[0], []), cut, lambda p: [])  # type: ignore[arg-type]

    monkeypatch.setattr(command, "sources", few)
    monkeypatch.setattr(tuner, "rates_here", lambda device: Machine.assumed("cpu"))
    words = [
        "mine",
        "--plan",
        files[0],
        "--best",
        files[1],
        "--minutes",
        0.06,
        "--steps",
        2,
        "--here",
        "--results",
        tmp_path,
        "--folder",
        tmp_path,
    ]
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
    text, known = tuner.file_of(shape).read_text(), catalogue()
    plans = [tuner.parse(words.split()).plan(text, known) for words in (naive, *best)]
    assert all(effect_of(plans[0], plan) != "learning" for plan in plans[1:])
    machine = Machine.assumed("NVIDIA H200")
    for plan in plans:
        there = elsewhere(make_context(plan, torch.device("cpu")), machine.name)
        assert predict(plan, there, machine).memory.fits != "no"


def test_the_candidates_are_those_that_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(plan=None, best=None, set=["device=cpu"])
    here = tuner.plans_of("small", args)[1]
    assert [*here] == ["+torch_compile"], "no CPU records graphs"
    monkeypatch.setattr(tuner, "runs_here", lambda plan: True)
    every = tuner.plans_of("160m", args)[1]
    assert {"flash_attention_3", "fused_rope"} <= {*every[tuner.FASTEST].techniques}
    assert len(every) == 3
    monkeypatch.setattr(tuner, "runs_here", lambda plan: False)
    with pytest.raises(SystemExit, match="no candidate"):
        tuner.plans_of("160m", args)


def test_the_best_is_the_candidate_that_is_fastest_beside_the_tuned_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that a call that was cut off does not tune again, and times the candidates left."""
    plan = Plan.read(tuner.file_of("tiny").read_text(), catalogue())
    tunings, asked = [], []

    def tuned(first: Plan, **how: object) -> Tuned:
        tunings.append(how["minutes"])
        return Tuned(
            "time", first, first, (), (), None, True, None, None, None, 170.0, (), True, False
        )

    def compared(first: Plan, second: Plan, *rest: object, limit_s: float, **how: object) -> Any:
        asked.append(sorted(first.techniques))
        value = 0.9 + 0.05 * len(first.techniques)
        if limit_s < tuner.LIMIT_S:
            return Compared("cut", "not done within")
        if "full_checkpoint" in first.techniques:
            return Compared("refused", "no room")
        return Compared(
            "worse",
            "",
            ratio=Interval(value - 0.01, value, value + 0.01, 6),
            before_s=0.1,
            after_s=0.1,
            steps=54,
        )

    few = {"small": ("tiny", "", ("+chunked_cross_entropy", "", "+full_checkpoint"))}
    monkeypatch.setattr(tuner, "WORKLOADS", few)
    monkeypatch.setattr(tuner, "tune_command", tuned)
    monkeypatch.setattr(tuner, "rates_here", lambda device: Machine.assumed("cpu"))
    monkeypatch.setattr(tuner, "compare", compared)
    words = ["tuner.py", "small", "--here", "--results", tmp_path, "--folder", tmp_path]
    monkeypatch.setattr(sys, "argv", [*map(str, words), "--best-minutes", "3.9"])
    tuner.main()
    assert tells(capsys.readouterr().out, "left", "small", "'+chunked_cross_entropy'", "''")
    assert not (tmp_path / "tuner.jsonl").exists() and tunings == [3.0]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    tuner.main()
    (row,) = [json.loads(line) for line in (tmp_path / "tuner.jsonl").read_text().splitlines()]
    assert tunings == [3.0] and len(asked) == 6
    assert row["metrics"]["ratio_to_best"]["value"] == 0.9 and row["best_changes"] == ""
    assert row["best"] == sorted(plan.techniques) and row["minutes"] == 3.0
    assert row["candidates"]["+full_checkpoint"]["reason"] == "no room"
    assert not (tmp_path / "small-tune" / tuner.KEPT).exists(), "another call tunes again"
    found = compute(tmp_path)["tuner_small_ratio"]
    assert found["n"] == 0 and row["hardware"].endswith(" cores"), "it is of one GPU"
