"""A run whose rank or host died goes on from copies in memory, to the bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import PLAN, losses, report, tensors

from headrace.core.errors import ConfigError
from headrace.train.memory_copies import _own_folder

RANKS = Path(__file__).with_name("memory_ranks.py")
WORDS = (
    *("tiny.toml", "goal.steps=10", "guard=false", "mesh.data=4", "mesh.replicate=2"),
    *("techniques.fsdp={}", "checkpoint.every_steps=100", "checkpoint.memory_every_steps=3"),
)
NOBODY = -1


def run(zygote: Any, home: Path, *more: str, dies: int = NOBODY) -> list[Any]:
    """Train on four ranks, of which one may die in the eighth step."""
    how = {"memory": str(home / "memory"), "dies": dies, "at": 7, "argv": [*WORDS, *more]}
    call = [str(RANKS), "train", how]
    children = [zygote._start(home, env, call=call) for env in zygote.world(4)]
    return [child.wait() for child in children]


@pytest.fixture(scope="module")
def home(
    zygote: Any, tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path
) -> Path:
    """Make a folder with tiny.toml and the run that nobody interrupts."""
    cwd = tmp_path_factory.mktemp("memory")
    (cwd / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    ended = run(zygote, cwd, "name=whole")
    assert [e.code for e in ended] == [0] * 4, ended[0].err
    left = [path for path in (cwd / "memory").glob("**/*") if path.is_file()]
    assert not left, "a run that ended well has left copies"
    return cwd


@pytest.mark.parametrize(
    "lost_host", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["host", "rank"]
)
def test_a_run_goes_on_from_memory(zygote: Any, home: Path, lost_host: bool) -> None:
    name = f"lost{lost_host}"
    ended = run(zygote, home, f"name={name}", dies=3)
    assert ended[3].code == -9 and all(one.code == 1 for one in ended[:3]), ended
    assert not list((home / "runs" / name / "checkpoints").glob("step-*"))
    if lost_host:
        shutil.rmtree(home / "memory/host-1")
    again = run(zygote, home, f"name={name}", "--resume", "--json")
    assert [e.code for e in again] == [0] * 4, again[0].err
    whole, mine = home / "runs/whole", home / "runs" / name
    resumed = json.loads((mine / "report.json").read_text())["resumed"]["checkpoint"]
    assert resumed.endswith("rank-00000/step-6"), resumed
    assert report(mine)["stream_sha256"] == report(whole)["stream_sha256"]
    assert report(mine)["restarts"] == 1
    assert torch.equal(losses(whole), losses(mine))
    first, second = (tensors(one / "checkpoints" / "latest") for one in (whole, mine))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_torchrun_restarts_and_the_run_goes_on(home: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"),
            *("--max-restarts=1", str(RANKS), str(home / "memory"), *WORDS, "name=elastic"),
        ],
        cwd=home,
        text=True,
        capture_output=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("error: ") <= 1, ended.stderr
    found = report(home / "runs/elastic")
    assert found["status"] == "done" and found["restarts"] == 1
    assert found["resumed"]["checkpoint"].endswith("step-6"), found["resumed"]
    assert torch.equal(losses(home / "runs/whole"), losses(home / "runs/elastic"))


def test_a_place_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this system has none") as error:
        _own_folder(tmp_path / "none")
    assert "checkpoint.memory_every_steps=0" in error.value.remedy.text
    made = _own_folder(tmp_path)
    assert made == _own_folder(tmp_path) and made.stat().st_mode & 0o777 == 0o700


def test_another_layout_goes_on_from_the_disk(zygote: Any, home: Path) -> None:
    words = ("name=other", "checkpoint.every_steps=4")
    ended = run(zygote, home, *words, dies=0)
    assert ended[0].code == -9
    again = run(zygote, home, *words, "mesh.replicate=1", "--resume", "--json")
    assert [e.code for e in again] == [0] * 4, again[0].err
    found = report(home / "runs/other")
    assert found["resumed"]["checkpoint"].endswith("checkpoints/step-4")
    torch.testing.assert_close(losses(home / "runs/whole"), losses(home / "runs/other"))
