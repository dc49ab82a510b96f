"""`kill -9` in the midst of a fork's copy: the run stays, and the same command forks again."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny import losses, report

FORK = Path(__file__).parents[1] / "dying_fork.py"
WORDS = ["train", "tiny.toml", "--resume", "--checkpoint", "step-2", "optimizer.lr=2e-3"]


@pytest.fixture
def home(four_steps: Path, tmp_path: Path) -> Path:
    shutil.copytree(four_steps, tmp_path / "home", symlinks=True)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def operations(
    four_steps: Path, tmp_path_factory: pytest.TempPathFactory, zygote: Any
) -> list[str]:
    """What a fork does with files, in order."""
    home = tmp_path_factory.mktemp("whole") / "home"
    shutil.copytree(four_steps, home, symlinks=True)
    call = [str(FORK), "fork", {"at": -1, "argv": WORDS, "log": "log"}]
    assert zygote._start(home, {}, call=call).wait().code == 0
    return (home / "log").read_text().split()


def files_of(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


@pytest.mark.parametrize("moment", ["first", "copy", "sync", "replace", "last"])
def test_a_fork_that_is_killed_is_made_again(
    zygote: Any, home: Path, operations: list[str], moment: str
) -> None:
    """Before its first file, in its copy, before it gets its name, and right after."""
    places = {"first": 1, "last": len(operations)}
    at = places.get(moment) or len(operations) - operations[::-1].index(moment)
    before = files_of(home / "runs/tiny")
    call = [str(FORK), "fork", {"at": at, "argv": WORDS}]
    assert zygote._start(home, {}, call=call).wait().code == -9
    assert files_of(home / "runs/tiny") == before
    ended = zygote.run(home, *WORDS)
    fork = sorted((home / "runs").glob("tiny-*"))[-1]
    assert ended.code == 0, ended.err
    assert files_of(home / "runs/tiny") == before
    assert report(fork)["parent"]["step"] == 2 and len(losses(fork)) == 4
    assert not [*(home / "runs").glob(".*.partial")]
    assert all(any(run.iterdir()) for run in (home / "runs").iterdir())


TWO = [*WORDS, "mesh.data=2"]


def assert_told(ended: Any) -> None:
    """The rank that is left says that the other one is gone, and what to type."""
    assert ended.code == 1 and "Traceback" not in ended.err, ended.err
    assert ended.err.count("error: ") == 1 and "another rank ended" in ended.err
    assert "torchrun --nproc-per-node 2" in ended.err


def test_a_rank_that_is_killed_as_it_forks_is_told_by_the_other(
    zygote: Any, home: Path, operations: list[str]
) -> None:
    before, at = files_of(home / "runs/tiny"), operations.index("copy") + 2
    call = [str(FORK), "fork", {"at": at, "argv": TWO}]
    children = [zygote._start(home, env, call=call) for env in zygote.world(2)]
    first, other = (child.wait() for child in children)
    assert first.code == -9
    assert_told(other)
    assert "--checkpoint step-2" in other.err
    assert files_of(home / "runs/tiny") == before
    again = zygote.ranks(2, home, *TWO)
    assert [e.code for e in again] == [0, 0], again
    assert not [*(home / "runs").glob(".*.partial")]


def test_a_rank_that_is_killed_while_the_first_forks(
    zygote: Any, home: Path, operations: list[str], wait_until: Any
) -> None:
    before, at = files_of(home / "runs/tiny"), operations.index("copy") + 2
    call = [str(FORK), "fork", {"at": at, "argv": TWO, "log": "log", "pause_s": 1.0}]
    children = [zygote._start(home, env, call=call) for env in zygote.world(2)]
    log = home / "log"
    wait_until(lambda: log.exists() and len(log.read_text().split()) >= at)
    children[1].send(signal.SIGKILL)
    assert children[1].wait().code == -9
    assert_told(children[0].wait())
    assert files_of(home / "runs/tiny") == before
    again = zygote.ranks(2, home, *TWO)
    assert [e.code for e in again] == [0, 0], again
    fork = sorted((home / "runs").glob("tiny-*"))[-1]
    assert report(fork)["parent"]["step"] == 2 and len(losses(fork)) == 4


def test_a_rank_that_is_killed_in_a_step_is_told_and_the_run_goes_on(
    zygote: Any, home: Path, wait_until: Any
) -> None:
    """The other waits for it in a collective."""
    words = ("name=steps", "goal.steps=400", "checkpoint.every_steps=2", "mesh.data=2")
    words += ("guard=false", "eval.every_steps=400")
    children = [
        zygote.start(home, "train", "tiny.toml", *words, env=env) for env in zygote.world(2)
    ]
    latest = home / "runs/steps/checkpoints/latest"
    wait_until(lambda: latest.is_symlink() and latest.resolve().name != "step-2")
    children[1].send(signal.SIGKILL)
    assert children[1].wait().code == -9
    first = children[0].wait()
    assert first.code == 1 and "Traceback" not in first.err, first.err
    assert "another rank ended" in first.err or "rank 1 ended" in first.err
    assert "runs/steps/plan.toml --resume" in first.err
    saved = int(latest.resolve().name.removeprefix("step-"))
    words = ("runs/steps/plan.toml", "--resume", f"goal.steps={saved + 2}")
    again = zygote.ranks(2, home, "train", *words)
    assert [e.code for e in again] == [0, 0], again
    assert len(losses(home / "runs/steps")) == saved + 2
