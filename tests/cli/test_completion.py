"""Shells complete verbs, options, plans, runs, techniques and keys, and wait for no torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.completion import overrides, plans, runs, techniques
from headrace.plan.plan import Plan
from headrace.plan.technique import installed

WITHOUT_TORCH = (
    "import sys; from headrace.__main__ import main\n"
    "try: main()\n"
    "finally: assert 'torch' not in sys.modules"
)


def completed(line: str, cwd: Path) -> list[str]:
    """Return what bash is offered at the end of a line."""
    words = line.split(" ")
    asked = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": line}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env={**os.environ, **asked, "COMP_CWORD": str(len(words) - 1)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_the_shell_is_offered_what_may_follow(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "plan.toml").write_text("")
    assert completed("headrace tr", tmp_path) == ["train"]
    assert completed("headrace train de", tmp_path) == ["demo"]
    assert completed("headrace train demo --with mu", tmp_path) == ["muon", "mup"]
    assert completed("headrace sample m", tmp_path) == ["mine"]


def test_what_is_offered_is_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text("")
    assert {"demo", "160m", "own.toml"} <= {*plans("")} and [*runs("")] == []
    assert [*techniques("")] == sorted(installed().techniques)
    tables = [one for one in overrides("") if one.endswith(".")]
    assert {one.rstrip(".=") for one in overrides("")} == {*Plan.model_fields}
    assert "model." in tables and "techniques." in tables
    assert "model.layers=" in [*overrides("model.la")] and [*overrides("modle.la")] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_reads_the_script(shell: str, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["--completion", shell], prog_name="headrace")
    assert told.exit_code == 0 and "_HEADRACE_COMPLETE=complete_" in told.stdout
    (script := tmp_path / "script").write_text(told.stdout)
    if shutil.which(shell):
        check = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([shell, check, str(script)], check=True)


def test_help_waits_for_no_torch() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "--help"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 and "Train a plan to its goal" in ended.stdout, ended.stderr
