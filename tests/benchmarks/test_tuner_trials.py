"""The program that tries the tuner's judge: its rows, what it trains, and how it goes on."""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import tuner_trials as program
from facts import tells
from scoring import compute, numbers
from tiny import READ

from headrace.core.statistics import Interval
from headrace.costs.machine import Machine
from headrace.tuner.judge import Compared, TrialVerdict
from headrace.tuner.paired_blocks import SampleSize
from headrace.tuner.proposals import Sources, sources

MICRO = ["batch.micro_sequences=1", "batch.micro_sequences=2"]


@pytest.fixture(autouse=True)
def _nothing_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "rates_here", lambda device: Machine.assumed("cpu"))


@pytest.fixture
def tiny(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """One tiny shape, of which micro-batches alone are tried: compilers take minutes."""
    file = tmp_path / "tiny.toml"
    file.write_text(READ.format(corpus=corpus, prepared=prepared_folder))

    def few(*given: Any) -> Sources:
        whole = sources(*given)
        return Sources(
            lambda plan: (whole.whole(plan)[0], []),
            lambda plan: [c for c in whole.single(plan) if c.plan.techniques == plan.techniques],
            lambda plan: [],
        )

    monkeypatch.setattr(program, "SHAPES", {"tiny": (file, "")})
    monkeypatch.setattr(program, "sources", few)
    monkeypatch.setattr("headrace.tuner.running.WANTED", SampleSize(warm=1, steps=1, rounds=1))
    return tmp_path


def _run(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: object) -> list[dict[str, Any]]:
    words = [
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--minutes",
        2,
        "--here",
        "--results",
        folder,
        "--folder",
        folder / "kept",
        "--least-s",
        0,
        "--ready-s",
        0,
        *more,
    ]
    monkeypatch.setattr(sys, "argv", ["tuner_trials.py", *map(str, words)])
    program.main()
    file = folder / "tuner_trials.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_exact_changes_go_through_the_tuners_judge_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run(tiny, monkeypatch, "--part", "1/2", "--minutes", 0) == []
    rows = _run(tiny, monkeypatch, "--part", "1/2")
    rows = _run(tiny, monkeypatch, "--part", "2/2")
    assert [row["change"] for row in rows] == [[word] for word in MICRO]
    for row in rows:
        assert (row["equality"], row["for_loss"], row["nats"]) == ("exact", False, None)
        assert row["verdict"] in ("kept", "lost") and row["ratio"]["value"] > 0
        assert row["hardware"].endswith(" cores") and row["workload"] == "tiny"
    found = compute(tiny)
    assert (found["tuner_exact_rejected"]["value"], found["tuner_exact_rejected"]["n"]) == (0, 2)
    assert found["tuner_losers_kept"]["value"] is None
    assert len(_run(tiny, monkeypatch)) == 2, "what has a row is not tried again"


def test_what_is_approximate_and_kept_is_trained_beside_its_base(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def pair(run: Any, one: Any, two: Any, *, screen: bool) -> Compared:
        asked.append(two)
        kept = Compared("better", "", ratio=Interval(1.1, 1.2, 1.3, 6), before_s=0.1, after_s=0.1)
        return [kept, Compared("different", "off"), kept][len(asked) - 1]

    monkeypatch.setattr(program.Tuning, "pair", pair)
    monkeypatch.setattr(program, "effect_of", lambda one, two: "approximate")
    monkeypatch.setattr(numbers, "LOSER_STEPS", 8)
    rows = _run(tiny, monkeypatch, "--train-steps", 8, "--ready-s", 900)
    assert [row["verdict"] for row in rows] == ["kept", "rejected"]
    left = capsys.readouterr().out
    assert tells(left, "left", "tiny eager", "batch.micro_sequences=1", "training", "901 s")
    assert compute(tiny)["tuner_losers_kept"]["untrained"] == 1
    *_, row = rows = _run(tiny, monkeypatch, "--train-steps", 8)
    assert len(rows) == 3 and row["change"] == [MICRO[0]] and row["steps"] == 8
    assert abs(row["nats"]) < 1e-3 and len(row["nats_by_seed"]) == 2
    assert all(0 <= half < 1e-3 for half in row["half_by_seed"])
    trained = (tiny / "kept" / "trainings.jsonl").read_text().splitlines()
    assert len(trained) == 4, "two plans by two seeds"
    found = compute(tiny)["tuner_losers_kept"]
    assert (found["value"], found["n"], found["untrained"]) == (0, 1, 0)
    assert len(_run(tiny, monkeypatch, "--train-steps", 8)) == 3


def test_a_cut_pair_has_a_row_only_of_a_whole_limit(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Compared("cut", "not done within 60 s")
    monkeypatch.setattr(program.Tuning, "pair", lambda *given, screen: cut)
    assert _run(tiny, monkeypatch, "--limit-s", 900) == []
    rows = _run(tiny, monkeypatch, "--limit-s", 60)
    assert [row["verdict"] for row in rows] == ["cut", "cut"]
    assert len(_run(tiny, monkeypatch, "--limit-s", 60)) == 2
    assert len(_run(tiny, monkeypatch, "--limit-s", 90)) == 4, "it may have longer"
    assert compute(tiny)["tuner_exact_rejected"]["n"] == 0


def test_every_verdict_of_the_judge_has_a_word() -> None:
    assert {*program.BECAME} == {*get_args(TrialVerdict)}


@pytest.mark.parametrize("base", list(program.BASES))
@pytest.mark.parametrize("shape", list(program.SHAPES))
def test_starts_are_plans_without_techniques(shape: str, base: str, tmp_path: Path) -> None:
    args = program.parser().parse_args(["--device", "cpu", "--folder", str(tmp_path)])
    plan = program.start_of(shape, base, args).plan
    assert [*plan.techniques] == (["torch_compile"] if base == "compiled" else [])
    assert (plan.model.precision == "fp32") >= (base == "fp32") and plan.device == "cpu"
