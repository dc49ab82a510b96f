"""Check the rows and the summary of the program that tunes the demo on pairs of cores."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tune_demo

from headrace.core.statistics import Interval
from headrace.tuner.judge import Compared
from headrace.tuner.readings import Reading

TWICE = Interval(1.9, 2.0, 2.1, 6)


def row(tuning: str, part: str, aim: str, minutes: float = 3.0, **more: Any) -> dict[str, Any]:
    """A row as the program writes it."""
    return {"tuning": tuning, "part": part, "aim": aim, "minutes": minutes, "metrics": {}, **more}


def test_the_summary_counts_what_was_measured_apart() -> None:
    """A tuning that kept nothing is 1; one whose runs missed the target counts for nothing."""
    fast, soon = ({"speed_ratio": {"value": 1.3}}, {"target_ratio": {"value": 1.7}})
    found = tune_demo.summary(
        [
            row("a", "tuned", "time", changes=["+torch_compile"]),
            row("a", "steps", "time", metrics=fast),
            row("b", "tuned", "time", changes=[]),
            row("c", "tuned", "quality", 10.0, changes=["+muon"]),
            row("c", "target", "quality", 10.0, metrics=soon),
            row("d", "tuned", "quality", 10.0, changes=["+muon"], interrupted=True),
            row("d", "target", "quality", 10.0, metrics=soon),
            row("d", "target", "quality", 10.0),
            {
                "tuning": "e",
                "part": "tuned",
                "minutes": 3.0,
                "metrics": {},
                "refused": "exit code 1",
            },
        ]
    )
    three, ten = found["3 min, steps"], found["10 min, target"]
    assert three == {
        "ratios": [1.3, 1.0],
        "kept": ["+torch_compile", ""],
        "interrupted": 0,
        "enough": 1,
    }
    assert ten == {"ratios": [1.7], "kept": ["+muon", "+muon"], "interrupted": 1, "enough": 1}


@pytest.fixture
def job(tmp_path: Path, corpus: Path) -> dict[str, Any]:
    words = [f"data.sources={corpus}", "data.vocab=320", "model.dim=16", "model.heads=2"]
    return {
        "tuning": "demo-3-0",
        "workload": "demo",
        "recipe": "demo",
        "set": words,
        "minutes": 3.0,
        "folder": str(tmp_path / "a"),
        "results": str(tmp_path),
        "cores": "0",
        "tunes": False,
        "ends_s": 9e12,
        "only": False,
        "command": "python tune_demo.py",
    }


def test_what_a_tuning_kept_is_measured_apart_and_only_once(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def compare(first: Any, second: Any, *given: Any, **how: Any) -> Compared:
        asked.append({*second.techniques} - {*first.techniques})
        return Compared("better", "", ratio=TWICE, steps=54)

    def train_with(worker: Any, folder: Path) -> Callable[..., Reading]:
        def train(plan: Any, limit_s: float) -> Reading:
            asked.append((plan.seed, "sophia" in plan.techniques))
            return Reading(seconds=[1.0 if "sophia" in plan.techniques else 2.0])

        return train

    monkeypatch.setattr(tune_demo, "compare", compare)
    monkeypatch.setattr(tune_demo, "train_with", train_with)
    monkeypatch.setattr(tune_demo, "prepare", lambda plan: None)
    monkeypatch.setattr(tune_demo.os, "sched_setaffinity", lambda *given: None)
    tune_demo.write(job, "tuned", {}, aim="quality", changes=["+sophia"], recipe="demo", set=[])
    for _ in range(2):
        tune_demo.work(job)
    runs = [(seed, side) for seed in tune_demo.SEEDS for side in (False, True)]
    assert asked == [{"sophia"}, *runs]
    rows = tune_demo.rows_of(tmp_path)
    assert [one["part"] for one in rows] == ["tuned", "steps", "target", "target"]
    assert tune_demo.summary(rows)["3 min, target"]["ratios"] == [2.0]
    args = argparse.Namespace(
        measure=True,
        results=tmp_path,
        folder=tmp_path,
        until=9.0,
        only=False,
        pairs=["0"],
        commit=None,
    )
    (again,) = tune_demo.jobs_of(args)
    assert again["tuning"] == job["tuning"] and not again["tunes"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_tuning_is_written_down_as_its_files_say(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: bool
) -> None:
    """Check the row of a tuning that left its files, and of one that failed with a last line."""
    step = {"changes": ["+torch_compile"], "verdict": "kept", "ratio": None}
    told = {
        "aim": "time",
        "aim_why": None,
        "changes": ["+torch_compile"],
        "interrupted": False,
        "tuning_s": 9.0,
        "target": None,
        "path": [
            step
            | dict.fromkeys(
                (
                    "reason",
                    "stage",
                    "predicted_speed",
                    "compile_s",
                    "break_even_steps",
                    "worth",
                    "bought",
                    "steps",
                    "seconds",
                )
            )
        ],
        "ratio": {"low": 1.1, "value": 1.2, "high": None, "n": 1},
    }

    def begun(words: list[str], stdout: Any, stderr: Any) -> Any:
        assert words[3:5] == ["tune", "demo"] and words[-2:] == ["--minutes", "3"]
        stdout.write("it failed\n")
        if ends:
            folder = Path(job["folder"], "runs", "demo-tune")
            folder.mkdir(parents=True)
            (folder / "path.json").write_text(json.dumps(told))
        return SimpleNamespace(wait=lambda limit_s: None, returncode=1)

    monkeypatch.setattr(tune_demo.subprocess, "Popen", begun)
    monkeypatch.setattr(tune_demo.receipts, "commit", lambda: "abc")
    Path(job["folder"]).mkdir()
    tune_demo.tune(job)
    (found,) = tune_demo.rows_of(tmp_path)
    if not ends:
        assert found["refused"] == "exit code 1: it failed"
        return
    assert found["changes"] == ["+torch_compile"] and found["path"][0]["verdict"] == "kept"
    assert found["metrics"]["speed_ratio"]["value"] == 1.2
