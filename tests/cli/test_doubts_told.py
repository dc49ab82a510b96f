"""A validation that overlaps training, or has few targets, is told wherever its loss is."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.units import format_bytes

Run = Callable[..., Any]
NOTHING = "data.decontamination.remove=nothing"
"""Without it text of the validation is no longer in the training text."""


def lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_demo: list[str]) -> Run:
    """Return a function that runs `train`, `ingest` or `eval` with the tiny plan in its folder."""
    monkeypatch.chdir(tmp_path)

    def run(verb: str, *words: str, code: int | None = 0) -> Any:
        argv = {
            "train": [
                "train",
                *tiny_demo,
                "data.directory=prepared",
                "goal.steps=2",
                "eval.tokens=4096",
                *words,
            ],
            "ingest": ["data", "ingest", *tiny_demo, "data.directory=prepared", *words],
            "eval": ["eval", *words],
        }[verb]
        ended = CliRunner().invoke(app, argv, prog_name="headrace")
        assert code is None or ended.exit_code == code, ended.output
        return ended

    return run


def texts(first: int, last: int) -> list[str]:
    return [f"text {n} has words: " + f"mill {n} wheel " * 20 for n in range(first, last)]


def test_both_sides_are_told_in_bytes_and_documents(invoke: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("river water mill\n" * 3_000)
    told = json.loads(invoke("ingest", "data.sources=a.txt", "--json").stdout)
    assert told["train_bytes"] + told["held_out_bytes"] == 51_000
    assert (
        told["held_out_share"] == told["held_out_bytes"] / 51_000 == pytest.approx(0.05, abs=0.01)
    )
    assert [told[f"{side}_documents"] for side in ("train", "held_out")] == [1, 1]
    assert told["cut_documents"] == 1 and told["overlap"] is None
    out = invoke("ingest", "data.sources=a.txt").stdout
    assert "train_bytes" in out and str(told["held_out_bytes"]) in out
    started = invoke("train", "data.sources=a.txt").stderr
    for words, side in (("training text", "train"), ("held out", "held_out")):
        assert f"{words}: {format_bytes(told[f'{side}_bytes'])} in 1 document" in started
    assert f"{told['held_out_share']:.1%}" in started and "1 end of documents" in started
    folder = tmp_path / "runs" / "demo"
    report = json.loads((folder / "report.json").read_text())
    assert report["data"]["train_bytes"] == told["train_bytes"]
    assert "Training and validation text" in (folder / "report.html").read_text()


@pytest.mark.parametrize("shared", [10, 4, 0])
def test_validation_that_is_trained_on_is_told(invoke: Run, tmp_path: Path, shared: int) -> None:
    lines(tmp_path / "a.jsonl", texts(0, 40))
    lines(tmp_path / "own.jsonl", texts(40 - shared, 50 - shared))
    keys = ("data.sources=a.jsonl", "data.validation=own.jsonl", NOTHING)
    line = {
        10: "ALL 10 validation documents (100.0% of their bytes) are trained on, too",
        4: "4 of 10 validation documents (40.0% of their bytes) are trained on, too",
    }.get(shared, "are trained on, too")
    told = json.loads(invoke("ingest", *keys, "--json").stdout)
    overlap = told["overlap"]
    assert (overlap["documents"], overlap["of_documents"]) == (shared, 10)
    started = invoke("train", *keys).stderr
    assert (line in started) == bool(shared)
    folder = tmp_path / "runs" / "demo"
    report = json.loads((folder / "report.json").read_text())
    evaluated = json.loads(invoke("eval", "demo", "--json").stdout)
    page = (folder / "report.html").read_text()
    if not shared:
        assert not report["data"]["doubts"] and "doubts" not in evaluated
        assert "Doubts about the validation" not in page
        return
    (doubt,) = evaluated["doubts"]
    assert doubt["kind"] == "overlap" and doubt["documents"] == shared
    assert doubt["share"] == pytest.approx(shared / 10, abs=0.01)
    assert report["data"]["doubts"] == [doubt]
    assert line in page and line in invoke("eval", "demo").stdout
    assert "data.validation=0.05" in doubt["remedy"]
    assert not json.loads(invoke("ingest", keys[0], "data.validation=0.3", "--json").stdout)[
        "doubts"
    ]


@pytest.mark.parametrize(
    ("copied", "line"),
    [
        (100, "ALL 1 validation document (100.0% of their bytes) are trained on, too"),
        (40, "39.3% of the passages of the validation text are trained on, too"),
        (10, ""),
    ],
)
def test_passages_of_other_documents_are_compared(
    invoke: Run, tmp_path: Path, copied: int, line: str
) -> None:
    """A part of a text that is trained on is no equal document; its runs of words are."""
    every = [f"line {n} of a text that is long enough to tell\n" for n in range(1_000)]
    (tmp_path / "a.txt").write_text("".join(every[:900]))
    (tmp_path / "own.txt").write_text("".join(every[900 - copied : 1_000 - copied]))
    keys = ("data.sources=a.txt", "data.validation=own.txt", NOTHING)
    told = json.loads(invoke("ingest", *keys, "--json").stdout)
    share = told["overlap"]["passages_share"]
    assert share == pytest.approx(copied / 100, abs=0.01)
    assert told["overlap"]["documents"] == (copied == 100)
    found = [doubt for doubt in told["doubts"] if doubt["kind"] == "overlap"]
    assert [line in doubt["sentence"] for doubt in found] == [True] * bool(line)
    assert (line or "are trained on") in invoke("ingest", *keys).stderr or not line


def test_equal_copies_in_validation_are_counted_each(invoke: Run, tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [*texts(0, 40), "short"])
    lines(tmp_path / "own.jsonl", [*texts(50, 59), "short", "short", "short"])
    told = json.loads(
        invoke(
            "ingest", "data.sources=a.jsonl", "data.validation=own.jsonl", NOTHING, "--json"
        ).stdout
    )
    overlap = told["overlap"]
    assert (overlap["documents"], overlap["of_documents"], overlap["bytes"]) == (3, 12, 15)


def test_a_target_that_a_guess_meets_is_told(invoke: Run, tmp_path: Path) -> None:
    """A tokenizer of few long pieces needs few bits per byte without knowing anything."""
    (tmp_path / "a.txt").write_text("river water mill\n" * 3_000)
    words = ("data.sources=a.txt", "goal.bits_per_byte=4", "--json")
    report = json.loads(invoke("train", *words).stdout)
    (doubt,) = [one for one in report["data"]["doubts"] if one["kind"] == "guess"]
    assert doubt["bits_per_byte"] <= doubt["target"] == 4
    assert "before anything is learned" in "".join(report["told"])
    (key,) = shlex.split(doubt["remedy"])
    less = json.loads(invoke("train", *words, key, "name=less").stdout)
    assert "guess" not in [one["kind"] for one in less["data"]["doubts"]]


def test_a_few_targets_are_told_with_what_mends_it(invoke: Run, tmp_path: Path) -> None:
    """Check the doubt about few validation targets, and that its remedy gives more than 500."""
    lines(tmp_path / "a.jsonl", texts(0, 120))
    keys = ("data.sources=a.jsonl", "data.validation=0.01")
    started = invoke("train", *keys).stderr
    report = json.loads((tmp_path / "runs" / "demo" / "report.json").read_text())
    (doubt,) = report["data"]["doubts"]
    targets = report["data"]["targets"]
    assert doubt["kind"] == "few_targets" and 0 < doubt["targets"] == targets < 500
    assert f"validation has {targets:,} targets, fewer than 500" in started
    last = report["val"][-1]["bits_per_byte"]
    assert doubt["moves_by_bits_per_byte"] == pytest.approx(last * doubt["moves_by_share"])
    assert 0.06 < doubt["moves_by_share"] < 0.2
    page = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert f"has {targets:,} targets" in page and "all of the validation" in page
    assert f"{last:.3f} bits per byte" in started and "all of the validation" in started
    evaluated = json.loads(invoke("eval", "demo", "--json").stdout)
    assert evaluated["tokens"] == targets and evaluated["doubts"][0]["kind"] == "few_targets"
    assert "targets, fewer than 500" in invoke("eval", "demo").stdout
    mended = doubt["remedy"].partition(",")[0]
    assert mended.startswith("data.validation=0.")
    told = json.loads(invoke("ingest", "data.sources=a.jsonl", mended, "--json").stdout)
    assert not told["doubts"] and told["validation_tokens"] > 500


def test_a_limit_that_leaves_few_targets_is_what_mends_it(invoke: Run, tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", texts(0, 120))
    keys = ("data.sources=a.jsonl", "data.validation=0.2")
    assert not json.loads(invoke("ingest", *keys, "--json").stdout)["doubts"]
    run = json.loads(invoke("train", *keys, "eval.tokens=64", "--json").stdout)
    (doubt,) = run["data"]["doubts"]
    assert doubt["targets"] == 64 and run["val"][-1]["share"] < 0.1
    assert doubt["remedy"].startswith("eval.tokens=")
    again = json.loads(invoke("train", *keys, doubt["remedy"], "--json").stdout)
    assert not again["data"]["doubts"] and again["data"]["targets"] >= 500
    ended = invoke("train", *keys, "eval.tokens=64").stderr
    share = again["val"][-1]["share"]
    assert f"bits per byte over {run['val'][-1]['share']:.1%} of the" in ended and "(goal" in ended
    page = (tmp_path / "runs" / "demo-3" / "report.html").read_text()
    assert f"{run['val'][-1]['share']:.1%} of the validation text" in page and share < 1
    assert "doubts" not in json.loads(invoke("eval", "demo", "--tokens", "64", "--json").stdout)


def test_a_validation_without_a_target_is_refused_before_training(
    invoke: Run, tmp_path: Path
) -> None:
    """Check that the error's remedy leads to a run that is evaluated on at least one target."""
    lines(tmp_path / "a.jsonl", texts(0, 40))
    lines(tmp_path / "own.jsonl", ["mill 1"])
    keys = ("data.sources=a.jsonl", "data.validation=own.jsonl", "seed=3")
    prefix = ("--with", "prefix_lm", "techniques.prefix_lm.tokens=15")
    error = {}
    for seed in range(9):  # of which most draw a prefix that is longer than this text
        ended = invoke("train", *keys, *prefix, f"seed={seed}", "--json", code=None)
        if ended.exit_code == 2:
            error = json.loads(ended.stdout)
            break
    assert "0 that count" in error["error"] and "no loss to measure" in error["error"]
    assert len([*tmp_path.glob("runs/*")]) == seed, "a run that is refused leaves no folder"
    remedy = shlex.split(error["remedy"].partition(", or")[0])
    told = json.loads(invoke("train", *keys, *prefix, *remedy, f"seed={seed}", "--json").stdout)
    assert told["val"][-1]["bits_per_byte"] > 0 and told["data"]["targets"] >= 1
