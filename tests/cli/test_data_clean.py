"""`data dedup`, `data decontaminate`, and a run on text that was cleaned first."""

import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app

WORDS = [f"w{n}" for n in range(300)]
Run = Callable[..., Any]
SHORT = ("data.directory=prepared", "guard=false", "goal.steps=3")


def prose(seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=40)) + "."


def write(path: str, texts: list[str], key: str = "text") -> str:
    Path(path).write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `headrace ARGV` in a folder of its own; check the exit code, return what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str, code: int = 0) -> Any:
        ended = CliRunner().invoke(app, [*argv], prog_name="headrace")
        assert ended.exit_code == code, ended.output
        return json.loads(ended.stdout) if "--json" in argv else ended

    return run


def test_verbs_clean_sources_and_write_what_remains(invoke: Run) -> None:
    """The folder is whole or not there; each kept text has the number of its duplicates."""
    a = write("a.jsonl", [prose(1), prose(2), prose(1), prose(3)], "body")
    b = write("b.jsonl", [prose(4), prose(1)], "body")
    asked = ("data", "dedup", a, b, "data.text_key=body", "--json")
    told = invoke(*asked, "--to", "once")
    assert (told["step"], told["documents"], told["dropped_documents"]) == ("deduplication", 6, 2)
    assert told["files"] == ["once/00.jsonl", "once/01.jsonl"]
    kept = [(row["text"], row["duplicates"]) for file in told["files"] for row in rows(file)]
    assert kept == [(prose(1), 2), (prose(2), 0), (prose(3), 0), (prose(4), 0)]
    assert json.loads(Path("once/report.json").read_text())["deduplication"]["bytes"] > 0
    again = invoke(*asked, "--to", "once", code=2)
    assert again["remedy"] == "--to once-2" and "there already" in again["error"]
    assert invoke(*asked, "data.deduplication.scope=source")["dropped_documents"] == 1

    questions = write("questions.jsonl", [prose(2).upper()], "question")
    ended = invoke(
        *("data", "decontaminate", a, "data.text_key=body", "--against", questions),
        *("data.decontamination.against_key=question", "--to", "clean"),
    )
    assert "1 of 4 documents fall" in ended.stdout and "fell: w" in ended.stderr
    assert [row["text"] for row in rows("clean/00.jsonl")] == [prose(1), prose(1), prose(3)]
    lost = invoke("data", "dedup", "c.jsonl", a, "data.text_key=body", "--json", code=2)
    assert "c.jsonl" in lost["error"] and lost["remedy"].startswith("data.sources=")
    mended = shlex.split(lost["remedy"])[0]
    assert invoke("data", "dedup", mended, "data.text_key=body", "--json")["documents"] > 0
    assert sorted(p.name for p in Path().iterdir() if p.is_dir()) == ["clean", "once"]


def test_a_run_trains_on_cleaned_text_and_tells_it(invoke: Run, tiny_demo: list[str]) -> None:
    """Planted duplicates and a planted validation text are gone; the run, its page and its resume
    know of it."""
    texts = [prose(n) for n in range(60)]
    source = write("a.jsonl", [*texts, *texts[:20], prose(100)])
    keys = (f"data.sources={source}", f"data.validation={write('own.jsonl', [prose(100)])}")
    words = ("train", *tiny_demo, *keys, *SHORT, "--with", "deduplication")
    ended = invoke(*words)
    assert "deduplication: 20 of 81 documents fall" in ended.stderr
    assert "decontamination: 1 of 61 documents fall" in ended.stderr
    run = Path("runs/demo")
    report = json.loads((run / "report.json").read_text())
    evidence = report["techniques"]["deduplication"]
    assert evidence["active"] is True and evidence["numbers"]["dropped_documents"] == 20
    assert report["cleaning"]["decontamination"]["dropped_documents"] == 1
    assert report["data"]["train_documents"] == 60
    assert "overlap" not in [doubt["kind"] for doubt in report["data"]["doubts"]]
    assert report["data"]["train_bytes"] == sum(map(len, texts))
    assert "Cleaned text" in (run / "report.html").read_text()
    ingested = invoke("data", "ingest", *words[1:-2], "--json")
    assert "deduplication" not in ingested["cleaning"]
    plan, changed = str(run / "plan.toml"), "data.decontamination.remove=document"
    refused = invoke("train", plan, "--resume", changed, "goal.steps=4", "--json", code=2)
    assert "data.decontamination.remove was 'passage' and is now 'document'" in refused["error"]
    on = invoke("train", plan, "--resume", "goal.steps=4", "--json")
    assert on["status"] == "done" and on["cleaning"] == report["cleaning"]
