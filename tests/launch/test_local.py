"""A launch on this machine is torchrun in the foreground, whose run is followed by its name."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import ask, job
from tiny import PLAN, report

from headrace.launch.engines import engine_of
from headrace.launch.local import state_of


def test_one_process_needs_no_torchrun() -> None:
    command = engine_of("local").submit(job(nodes=1, processes=1, resume=True))
    assert command[:2] == ["/usr/bin/env", "HEADRACE_RUN=large"]
    assert command[3:6] == ["-m", "headrace", "train"] and command[-1] == "--resume"
    several = engine_of("local").submit(job(nodes=1, processes=2))
    assert several[4:11] == [
        *("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--standalone")
    ]


def test_the_dry_run_of_a_launch_prints_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = ask("launch", "demo", "mesh.data=2", "--dry-run")
    assert told["command"][-4:] == ["train", "demo", "mesh.data=2", "name=demo"]
    assert not told["files"] and not [*tmp_path.iterdir()]
    assert "this machine alone" in ask("launch", "demo", "--nodes", "2", code=2)["error"]
    assert "has no setting" in ask("launch", "demo", "--set", "time=1", code=2)["error"]


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    from headrace.launch.local import Local

    mine = engine_of("local").job_id(job(), "")
    assert isinstance(engine_of("local"), Local)
    assert state_of(mine) == "RUNNING"
    assert state_of(f"{os.getpid()}@1") == state_of("999999999@5") == "ENDED"


@pytest.mark.slow
def test_two_processes_train_resume_and_are_stopped(
    run_cli: Any,
    tmp_path: Path,
    corpus: Path,
    prepared_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    words = ("launch", "tiny.toml", "mesh.data=2", "goal.steps=4", "guard=false")
    ended = run_cli(tmp_path, *words)
    assert ended.code == 0, ended.err
    assert report(tmp_path / "runs/tiny")["steps"] == 4
    told = ask("status", "tiny")
    assert told["state"] == "ENDED" and told["processes"] == 2 and told["progress"]["step"] == 4
    assert "foreground" in ask("logs", "tiny", code=3)["error"]
    more = [word.replace("=4", "=100000") for word in words]
    going = subprocess.Popen(
        [sys.executable, "-m", "headrace", *more, "--resume"], stderr=subprocess.PIPE, text=True
    )
    try:
        while ask("status", "tiny")["progress"]["step"] < 6:
            assert going.poll() is None
        assert "asked to end" in ask("stop", "tiny")["stopped"]
        _, said = going.communicate(timeout=120)
    finally:
        if going.poll() is None:
            going.send_signal(signal.SIGKILL)
    assert "SIGTERM" in said and going.returncode
    assert report(tmp_path / "runs/tiny")["steps"] >= 6
    assert "had ended" in ask("stop", "tiny")["stopped"]
