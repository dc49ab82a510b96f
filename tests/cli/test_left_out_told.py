"""What of the data is left out is told where a run starts, in its report and on its page."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.errors import ConfigError
from headrace.plan.data_config import DataConfig
from headrace.plan.plan import Plan


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of texts and of what is none; two names in it are not UTF-8."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for name in (b"a.txt", b"caf\xe9.txt", b"b<i>.txt"):
        (folder / os.fsdecode(name)).write_text(f"{name!r} says a few words. " * 40)
    (folder / os.fsdecode(b"\xff<i>.png")).write_text("")
    monkeypatch.chdir(tmp_path)
    return folder


def utf_8_json(raw: bytes) -> Any:
    """Return the value of a JSON text, and check that it has no lone surrogate."""
    value = json.loads(raw.decode())
    json.dumps(value, ensure_ascii=False).encode()
    return value


def test_a_run_tells_what_was_left_out(notes: Path, tiny_demo: list[str], tmp_path: Path) -> None:
    own = [
        *tiny_demo,
        "data.sources=notes",
        f"data.directory={tmp_path / 'prepared'}",
        "goal.steps=2",
        "guard=false",
        f"directory={tmp_path / 'runs'}",
    ]
    line = "left out: 1 file of a kind that is not read (notes/\\xff<i>.png)"
    expected = [
        {
            "reason": "ending",
            "count": 1,
            "examples": ["notes/\\xff<i>.png"],
            "words": "file of a kind that is not read",
        }
    ]
    ended = CliRunner().invoke(app, ["data", "ingest", *own])
    assert ended.exit_code == 0 and line in ended.stderr, ended.output
    ended = CliRunner().invoke(app, ["data", "ingest", *own, "--json"])
    assert utf_8_json(ended.stdout_bytes)["left_out"] == expected
    ended = CliRunner().invoke(app, ["train", *own])
    assert ended.exit_code == 0 and ended.stderr.count(line) == 1, ended.output
    report = utf_8_json((tmp_path / "runs" / "demo" / "report.json").read_bytes())
    assert report["left_out"] == expected
    page = (tmp_path / "runs" / "demo" / "report.html").read_bytes().decode()
    assert expected[0]["words"] in page and "notes/\\xff&lt;i&gt;.png" in page


def test_a_source_that_is_not_utf_8_is_linked(
    notes: Path, tiny_demo: list[str], tmp_path: Path
) -> None:
    asked = os.fsdecode(b"data.sources=notes/caf\xe9.txt")
    own = [*tiny_demo, f"data.directory={tmp_path / 'prepared'}", "--json"]
    for verb in (["train"], ["data", "ingest"]):
        ended = CliRunner().invoke(app, [*verb, *own, asked])
        told = utf_8_json(ended.stdout_bytes)
        assert ended.exit_code == told["exit_code"] == 2
        assert told["error"].startswith("data.sources = 'notes/caf\\xe9.txt'")
        assert "is not UTF-8" in told["error"]
    command, _, mended = told["remedy"].partition(", and ")
    subprocess.run(["bash", "-ec", command], check=True)
    ended = CliRunner().invoke(app, ["data", "ingest", *own, mended])
    assert ended.exit_code == 0, ended.output
    with pytest.raises(ConfigError, match=r"^name = .*not UTF-8") as caught:
        Plan(data=DataConfig(sources="a.txt"), name=os.fsdecode(b"caf\xe9"))
    assert caught.value.remedy.changes == (("name=caf",),)
