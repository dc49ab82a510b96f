"""A remedy that repeats a command keeps the other words of it, and starts as many processes."""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.command import (
    AXES,
    headrace,
    rerun,
    rerun_plan,
    rerun_train,
    train_command,
    typed,
)
from headrace.plan.mesh_config import MeshConfig

TAKES = {"--with", "--without", "--checkpoint", "--minutes", "--output"}
PLAN = "seed = 4\n[goal]\nsteps = 6\n[data]\nsources = ['a b']\n[techniques.gqa]\nkv_heads = 2\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose plan says PLAN."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/plan.toml").write_text(PLAN)
    yield Path("runs/a")


@pytest.mark.parametrize(
    ("line", "words", "kept"),
    [
        ("train p goal.steps=34 --resume", ["--resume", "seed=4"], "goal.steps=34"),
        ("train p goal.steps=34 seed=9 --resume", ["--resume", "seed=4"], "goal.steps=34"),
        ("train p seed=4 goal.steps=6 --resume", ["--resume"], ""),
        ("train p 'data.sources=[\"a b\"]' --resume", ["--resume"], ""),
        ("train p 'data.sources=b c' --resume", ["name=NEW"], "'data.sources=b c'"),
        ("train p data.sources=b --resume", ["name=NEW", "data.sources=PATH"], ""),
        ("train p --resume --checkpoint step-3", ["--resume", "seed=4"], "--checkpoint step-3"),
        ("train p --resume --checkpoint=step-3", ["--resume"], "--checkpoint step-3"),
        ("train p --resume --checkpoint step-3 seed=1", ["name=NEW"], "seed=1"),
        ("train p --resume --checkpoint a", ["--resume", "--checkpoint", "b"], ""),
        ("train p --resume --with lion --json", ["--resume"], "--with lion"),
        ("train p --resume --with lion", ["--resume", "--without", "lion"], ""),
        ("train p --resume --with lion techniques.lion.lr=1", ["--without lion", "--resume"], ""),
        ("train p --resume --without gqa", ["--resume", "techniques.gqa={kv_heads = 2}"], ""),
        ("train p --resume --without gqa", ["name=NEW"], "--without gqa"),
        ("train p --resume --with gqa --without z", ["--resume"], ""),
        ("train p --resume 'model={dim = 3}'", ["--resume", "model.dim=4"], ""),
        ("train p --resume model.dim=3", ["--resume", "'model={dim = 4}'"], ""),
        ("train p --resume name=x directory=y", ["--resume"], "name=x directory=y"),
        ("eval a --tokens 3", ["--resume"], ""),
        ("", ["--resume"], ""),
    ],
)
def test_a_resume_keeps_what_it_does_not_change(
    run: Path, line: str, words: list[str], kept: str
) -> None:
    with typed(shlex.split(line), TAKES):
        found = rerun_train(run, *words)
    assert found == " ".join(filter(None, ["headrace train runs/a/plan.toml", kept, *words]))


def test_one_word_is_exchanged(run: Path) -> None:
    line = "report runs/b a --output 'my page.html' --json"
    with typed(shlex.split(line), TAKES):
        assert rerun((Path("runs/b"), Path("c d")), verb="report") == (
            "headrace report 'c d' a --output 'my page.html'"
        )
        assert rerun((Path("runs/a"), "b"), verb="report").startswith("headrace report runs/b b ")
    assert rerun((run, "b"), verb="report") == "headrace report b"  # no command line
    with typed(["train", "train", "name=train"], TAKES):
        assert rerun(("train", "demo"), verb="train") == "headrace train demo name=train"


def test_another_verb_takes_the_plan_with_its_words(run: Path) -> None:
    with typed(shlex.split("tune p seed=3 --minutes 4 --with lion --without z"), TAKES):
        assert rerun_plan("train", "--with gqa", "seed=5") == (
            "headrace train p --with lion --without z --with gqa seed=5"
        )
    assert rerun_plan("train") == "headrace train PLAN"


def test_a_command_starts_as_many_processes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert headrace() == "torchrun --nproc-per-node 4 -m headrace"
    assert headrace(1) == "headrace"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert headrace().startswith("torchrun --nnodes 2 --nproc-per-node 2 ")
    assert headrace(12, 8).startswith("torchrun --nnodes 2 --nproc-per-node 6 ")
    assert headrace(8, 8) == "torchrun --nproc-per-node 8 -m headrace"


def test_a_run_of_several_ranks_goes_on_with_as_many(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that one process, as the doctor's, names a command which starts the run's ranks."""
    assert train_command(run, "--resume") == "headrace train runs/a/plan.toml --resume"
    (run / "plan.toml").write_text(f"{PLAN}[mesh]\ndata = 2\ntensor = 3\nreplicate = 2\n")
    begin = "torchrun --nproc-per-node 6 -m headrace train runs/a/plan.toml"
    assert train_command(run, "--resume") == f"{begin} --resume"
    assert train_command(run, "mesh.data=1").startswith("headrace train ")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train_command(run).startswith("torchrun --nproc-per-node 2 ")
    assert list(AXES) == [*MeshConfig().sizes]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("goal.steps=9 seed=9", "goal.steps=9"),
        ("--with muon --with z_loss", ""),
        ("--checkpoint step-3 seed=9 goal.steps=8", "goal.steps=8"),
        ("optimizer.lr=0.5 name=b goal.steps=9", "goal.steps=9"),
        ("model.dim=32 checkpoint.keep_last=9", "checkpoint.keep_last=9"),
    ],
)
def test_a_refused_resume_leads_to_what_was_asked(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, kept: str
) -> None:
    shutil.copytree(workshop / "runs", tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    told = said("train", "runs/demo/plan.toml", "--resume", *shlex.split(words))
    first, _, other = told["remedy"].partition("; or ")
    assert kept in first and kept in other
    assert ("--checkpoint" in words) == ("--checkpoint step-3" in first)
    for way in (other.partition(" for a new run")[0].replace("NEW", "again"), first):
        done = said(*shlex.split(way)[1:])
        assert not done.get("error"), (way, done)
    asked = [word for word in shlex.split(words) if "=" in word and not word.startswith("name")]
    assert all(shlex.quote(word) in other for word in asked)


def said(*argv: str) -> dict[str, Any]:
    """Return the JSON value that a command prints."""
    return json.loads(CliRunner().invoke(app, [*argv, "--json"], prog_name="headrace").stdout)


def test_a_mistyped_run_keeps_the_options(call: Callable[..., Any]) -> None:
    told = call("eval", "dmeo", "--tokens", "64", code=2)
    assert told["remedy"] == "headrace eval runs/demo --tokens 64"
    told = call("plan", "demo", "--after", "dmeo", "seed=3", code=2)
    assert told["remedy"] == "headrace plan demo --after runs/demo seed=3"
    for name, right in (("../step-6", "step-6"), ("2", "step-2"), ("", "latest"), (".", "latest")):
        told = call("eval", "demo", "--checkpoint", name, code=2)
        assert told["remedy"] == f"--checkpoint {right}"
    told = call("explain", "muun", "seed=3", "--graph", code=2)
    assert told["remedy"] == "headrace explain muon seed=3 --graph"
    told = call("train", "runs/demo", "goal.steps=9", "--with", "z_loss", code=2)
    assert told["remedy"] == (
        "headrace train runs/demo/plan.toml goal.steps=9 --with z_loss --resume"
    )
