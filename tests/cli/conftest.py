"""Train one tiny run, and provide what the tests of every verb call on it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[str]:
    """`demo` with overrides that make it tiny; its shards are prepared once."""
    prepared = tmp_path_factory.mktemp("demo") / "prepared"
    return [
        *("demo", "device=cpu", f"data.sources={corpus}", f"data.directory={prepared}"),
        *("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn=32"),
        *("data.vocab=300", "data.sequence_length=16", "batch.tokens=128"),
        *("goal.steps=6", "schedule.steps=40", "schedule.warmup_steps=0"),
        *("eval.every_steps=3", "eval.tokens=512", "checkpoint.every_steps=3"),
    ]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, tiny_demo: list[str]) -> Path:
    """A folder where `runs/demo` has been trained."""
    folder = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = CliRunner().invoke(app, ["train", *tiny_demo, "--json"])
    assert ended.exit_code == 0, ended.output
    return folder


@pytest.fixture
def call(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`headrace ARGV --json` in the workshop: checks the exit code, returns the one JSON value."""
    monkeypatch.chdir(workshop)

    def run(*argv: str, code: int = 0) -> Any:
        ended = CliRunner().invoke(app, [*argv, "--json"], prog_name="headrace")
        assert ended.exit_code == code, ended.output
        return json.loads(ended.stdout)

    return run


@pytest.fixture
def say(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """`headrace ARGV` for a person: checks the exit code, returns standard output and error."""
    monkeypatch.chdir(workshop)

    def run(*argv: str, code: int = 0) -> tuple[str, str]:
        ended = CliRunner().invoke(app, list(argv), prog_name="headrace")
        assert ended.exit_code == code, ended.output
        return ended.stdout, ended.stderr

    return run
