"""Forecasts are said before they are measured, and scored as they were said."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import forecasts
import pytest
from facts import in_order, tells
from programs import rows
from scoring import compute
from tiny import READ

from headrace.predict.prediction import predict
from headrace.tuner.readings import Reading

ROOT = Path(__file__).parents[2]

PLAN = READ + "[techniques.chunked_cross_entropy]\nchunk_tokens = 8\n"


def run(patch: pytest.MonkeyPatch, plan: Path, folder: Path, *words: str) -> None:
    """Run the program of forecasts in this process, on one planted plan."""
    common = ["--shapes", str(plan), "--results", str(folder), "--steps", "1", "1", "--here"]
    patch.setattr(sys, "argv", ["forecasts.py", *words, *common, "--bases", "checkpointed"])
    forecasts.main()


def test_what_is_said_is_measured_once(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "tiny.toml"
    plan.write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    run(monkeypatch, plan, tmp_path, "--say", "--least", "0")
    said = {row["remedy"]: row for row in rows(tmp_path, "forecasts_said")}
    assert said["-full_checkpoint"]["workload"] == "tiny checkpointed"
    run(monkeypatch, plan, tmp_path, "--say", "--least", "0")
    assert len(rows(tmp_path, "forecasts_said")) == len(said)
    keep = {"-full_checkpoint", "+cuda_graphs"}  # the others would be compiled here
    lost = {**said["-full_checkpoint"], "remedy": "+cuda_graphs"}
    text = "\n".join(json.dumps(row) for row in (said["-full_checkpoint"], lost))
    (tmp_path / "forecasts_said.jsonl").write_text(text)
    run(monkeypatch, plan, tmp_path, "--measure", "--part", "2/2")
    assert not (tmp_path / "forecasts.jsonl").exists()  # its only plan falls to the first part
    run(monkeypatch, plan, tmp_path, "--measure", "--part", "1/2")
    run(monkeypatch, plan, tmp_path, "--measure")
    found = {row["remedy"]: row for row in rows(tmp_path, "forecasts")}
    assert {*found} == keep and len(rows(tmp_path, "forecasts")) == 2
    one = found["-full_checkpoint"]
    assert one["forecast"] == said["-full_checkpoint"]["forecast"] and one["n"] == 2
    assert one["metrics"]["gain"]["low"] <= one["measured"] <= one["metrics"]["gain"]["high"]
    assert "CUDA graphs" in found["+cuda_graphs"]["refused"]
    assert compute(tmp_path)["forecast_coverage"]["n"] == 1


@pytest.mark.slow
def test_what_is_said_of_a_run_rests_on_its_step(
    tmp_path: Path,
    corpus: Path,
    prepared_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is measured beside what was said of the plan alone, and needs a timing of that plan."""
    plan = tmp_path / "tiny.toml"
    plan.write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    with pytest.raises(SystemExit, match=in_order("tiny checkpointed", "--run")):
        run(monkeypatch, plan, tmp_path, "--say", "--of", "run")
    run(monkeypatch, plan, tmp_path, "--run")
    (row,) = rows(tmp_path, "forecasts_run")
    assert row["workload"] == "tiny checkpointed" and row["by_host"] is False and row["n"] == 2
    planted = forecasts.planted(plan, "checkpointed")
    args = argparse.Namespace(results=tmp_path, device_name="")
    told = forecasts.ran("tiny checkpointed", planted, args)
    assert told.step_s == row["metrics"]["step"]["value"] and not told.by_host
    row["metrics"]["step"]["value"] = 1.5 * (alone := said_seconds(planted))
    row["by_host"], row["hardware"] = True, "NVIDIA H200"
    with (tmp_path / "forecasts_run.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    told = forecasts.ran("tiny checkpointed", planted, args)
    assert (told.step_s, told.by_host) == (1.5 * alone, True), "the last timing counts"
    for of in ("plan", "run"):
        run(monkeypatch, plan, tmp_path, "--say", "--least", "0", "--of", of)
    said = {(r["of"], r["remedy"]): r for r in rows(tmp_path, "forecasts_said")}
    of_run = [r for (of, remedy), r in said.items() if of == "run"]
    assert of_run and any(of == "plan" for of, _ in said)
    gains = [said[of, "-full_checkpoint"]["forecast"]["value"] for of in ("plan", "run")]
    assert gains[0] != gains[1]
    row["refused"] = "out of memory"
    with (tmp_path / "forecasts_run.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    before = rows(tmp_path, "forecasts_said")
    run(monkeypatch, plan, tmp_path, "--say", "--of", "run")
    assert rows(tmp_path, "forecasts_said") == before
    assert tells(capsys.readouterr().out, "tiny checkpointed", "out of memory")


def test_a_timing_is_of_its_plan_and_has_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = [Reading(seconds=[2.0], by_host=True), Reading(refused="out of memory")]
    monkeypatch.setattr(forecasts.Worker, "ask", lambda self, *given, **how: taken.pop(0))
    words = ["x", "--run", "--shapes", "160m", "--bases", "trunk", "naive"]
    words += ["--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--limit-s", "0"])
    forecasts.main()
    assert not (tmp_path / "forecasts_run.jsonl").exists()
    assert "left: 160m trunk" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", words)
    forecasts.main()
    one, other = rows(tmp_path, "forecasts_run")
    assert one["by_host"] and "refused" not in one and other["refused"] == "out of memory"
    eager = forecasts.planted(forecasts.receipts.plan_file("160m"), "eager")
    for device, plan in (
        ("", eager),
        ("another", forecasts.planted(forecasts.receipts.plan_file("160m"), "trunk")),
    ):
        args = argparse.Namespace(results=tmp_path, device_name=device)
        with pytest.raises(SystemExit, match="nobody timed it"):
            forecasts.ran("160m trunk", plan, args)


def test_what_was_said_of_plans_and_of_runs_is_measured_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "remedy": "+fused_rope",
        "workload": "160m trunk",
        "forecast": {"value": 1.0},
        "commit": "c",
        "forecast_from": "ledger",
    }
    lines = (json.dumps({**said, **more}) + "\n" for more in ({}, {"of": "run"}))
    (tmp_path / "forecasts_said.jsonl").write_text("".join(lines))
    monkeypatch.setattr(forecasts.Worker, "ask", lambda self, *given, **how: Reading(seconds=[1.0]))
    words = ["--shapes", "160m", "--bases", "trunk", "--results", str(tmp_path)]
    for of, n in (("run", 1), ("run", 1), ("plan", 2)):
        monkeypatch.setattr(sys, "argv", ["x", "--measure", "--of", of, *words])
        forecasts.main()
        assert len(rows(tmp_path, "forecasts")) == n


def said_seconds(plan: Any) -> float:
    """Return the seconds of a step that the planner predicts for the plan on an H200."""
    context, machine = forecasts.at(plan, "NVIDIA H200")
    found = predict(plan, context, machine).time.step_s
    assert found is not None
    return found


def test_an_interrupted_group_has_rows_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that what was measured before an interruption has rows, with the base timed once."""
    args = argparse.Namespace(shapes=["160m"], results=tmp_path, steps=[1, 1])
    said = [
        {
            "remedy": r,
            "workload": "160m trunk",
            "forecast": {"value": 1.0},
            "commit": "then",
            "forecast_from": "ledger",
            "of": "run",
        }
        for r in ("+fused_rope", "+fused_swiglu", "+torch_compile")
    ]
    readings = [Reading(seconds=[s]) for s in (3.0, 2.0, 1.5)]

    class Interrupted:
        """Answers three times."""

        def ask(self, *given: Any, **how: Any) -> Reading:
            if not readings:
                raise KeyboardInterrupt
            return readings.pop(0)

    bench = forecasts.Bench("160m trunk", said, args, Interrupted(), float("inf"))
    with pytest.raises(SystemExit) as end:
        bench.run()
    assert end.value.code == 130
    found = rows(tmp_path, "forecasts")
    assert [(r["remedy"], r["n"], r["of"]) for r in found] == [
        ("+fused_rope", 1, "run"),
        ("+fused_swiglu", 1, "run"),
    ]
    assert [r["measured"] for r in found] == [0.5, 1.0]


def test_a_row_has_the_seconds_that_its_gain_is_of(tmp_path: Path) -> None:
    """Means of a timing before and one after its group, and of the remedy's."""
    args = argparse.Namespace(shapes=["160m"], results=tmp_path)
    bench: Any = forecasts.Bench("160m trunk", [], args, None, 0.0)
    said = {
        "remedy": "+torch_compile",
        "workload": "160m trunk",
        "forecast": {"value": 1.0},
        "forecast_from": "ledger",
        "commit": "then",
    }
    bases = [Reading(seconds=[1.0, 3.0]), Reading(seconds=[3.0, 5.0])]
    bench.write([said], bases, [Reading(seconds=[0.5, 1.5])])
    (row,) = rows(tmp_path, "forecasts")
    assert (row["before_s"], row["after_s"]) == (3.0, 1.0) and row["said"] == "then"
    assert row["measured"] == 2.0 and row["n"] == 2
    gain = row["metrics"]["gain"]
    assert (gain["low"], gain["value"], gain["high"]) == (1.0, 2.0, 3.0)


def test_every_ailment_is_a_plan() -> None:
    recipe = forecasts.planted(forecasts.receipts.plan_file("160m"), "recipe")
    for base in forecasts.BASES:
        plan = forecasts.planted(forecasts.receipts.plan_file("160m"), base)
        assert (plan == recipe) == (base == "recipe"), base
    naive = forecasts.planted(forecasts.receipts.plan_file("160m"), "naive")
    assert [*naive.techniques] == ["full_checkpoint"] and naive.micro_rows == 8
    compiled = forecasts.planted(forecasts.receipts.plan_file("160m"), "compiled_trunk")
    assert [*compiled.techniques] == ["torch_compile"]
