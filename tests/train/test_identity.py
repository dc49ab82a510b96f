"""A run goes on as what it is: each change is told, and what makes it another is refused.

Every command that a refusal prints is run as it stands.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from facts import tells
from tiny import PLAN, report
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.core.files import toml_value
from headrace.plan.changes import override, word
from headrace.plan.plan import Plan

SHORT = ("goal.steps=4", "checkpoint.every_steps=2", "eval.every_steps=4", "guard=false")
MOE = "techniques.mixture_of_experts={experts = 4, top_k = 2}"
Say = Callable[..., Any]


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path
) -> Iterator[Path]:
    """A folder with tiny.toml and two runs of four steps: `tiny`, and `moe`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in ((), ("name=moe", MOE)):
            ended = CliRunner().invoke(app, ["train", "tiny.toml", *SHORT, *words, "--json"])
            assert ended.exit_code == 0, ended.output
    yield folder


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where the test is."""
    shutil.copytree(trained, tmp_path / "home", symlinks=True)
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def say(home: Path) -> Say:
    """`headrace ARGV --json` in the folder: checks the exit code, returns the one JSON value."""

    def run(*argv: str, code: int = 0) -> Any:
        ended = CliRunner().invoke(app, [*argv, "--json"])
        assert ended.exit_code == code, ended.output
        return json.loads(ended.stdout)

    return run


def commands(remedy: str) -> list[list[str]]:
    """The headrace commands that a remedy prints, split as a shell does, without `headrace`."""
    found = re.findall(r"headrace (.*?)(?: for a new run|; or|, or|$)", remedy)
    return [shlex.split(text) for text in found]


VALUES = [
    1,
    2.5,
    1e-08,
    1e30,
    True,
    "x",
    "",
    "1e5",
    "two words",
    "it's",
    'a "b"',
    '"q"',
    "a#b",
    "x\ny",
    [1, 2.0],
    ["a b", "c"],
    [],
    {"a": 1, "b": [1, 2], "c": "d e"},
    {"a": {"b": False}},
    {},
    "\x7f",
    "\U0001f600",
    '"\U0001f600"',
    "[1]",
    "{a = 1}",
    "null",
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_is_printed_reads_back(value: Any) -> None:
    printed = override({"table": {"key": value}}, "table.key")
    (typed,) = shlex.split(printed)
    key, _, raw = typed.partition("=")
    assert key == "table.key" and toml_value(raw, key) == value


def test_a_knob_of_none_is_said_by_its_table() -> None:
    with pytest.raises(ValueError):
        word(None)
    plan = {"techniques": {"one": {"knob": None, "other": [1, 2]}}}
    (typed,) = shlex.split(override(plan, "techniques.one.knob"))
    assert typed == "techniques.one={other = [1, 2]}"
    read = Plan.read("goal.steps = 1", catalogue(), overrides=["data.weights=[1.0]"])
    for key in ("data.mixture.weights", "data.weights"):
        (typed,) = shlex.split(override({**read.dump(), "data": {"vocab": 300}}, key))
        assert typed == "data={vocab = 300}"
    assert Plan.read("goal.steps = 1", catalogue(), overrides=[typed]).data.weights is None


def test_every_change_that_a_resume_takes_is_told(say: Say, home: Path) -> None:
    words = (
        "goal.steps=5",
        "goal.minutes=60",
        "eval.every_steps=2",
        "schedule.warmup_steps=3",
        "schedule.steps=30",
        "techniques.chunked_cross_entropy={chunk_tokens = 7}",
    )
    done = say("train", "tiny.toml", "--resume", *words)
    told = "\n".join(done["told"])
    for change in (
        "goal.steps 4 -> 5",
        "goal.minutes none -> 60.0",
        "eval.every_steps 4 -> 2",
        "schedule.warmup_steps 0 -> 3",
        "schedule.steps 40 -> 30",
        "+chunked_cross_entropy",
    ):
        assert change in told, told
    assert tells(told, "schedule", "step 4", 0.0099), told
    changed = report(home / "runs" / "tiny")["resumed"]["changed"]
    assert changed["schedule.warmup_steps"] == [0, 3] and done["resumed"]["changed"] == changed
    again = say("train", "runs/tiny/plan.toml", "--resume")
    assert again["resumed"]["changed"] == {} and again["parent"] is None


REFUSED = {
    "optimizer.lr=2e-3": ("tiny", "optimizer.lr was 0.01 and is now 0.002"),
    "optimizer.betas=[0.8, 0.9]": ("tiny", "optimizer.betas was [0.9, 0.95] and is now [0.8, 0.9]"),
    "data.weights=[1]": ("tiny", "data.weights was None and is now [1.0]"),
    "model.qk_norm=true": ("tiny", "model.qk_norm was False and is now True"),
    "techniques.mixture_of_experts.top_k=1": (
        "moe",
        "techniques.mixture_of_experts.top_k was 2 and is now 1",
    ),
    "techniques.mixture_of_experts.balance=0.5": (
        "moe",
        "techniques.mixture_of_experts.balance was 0.01 and is now 0.5",
    ),
}


RUN = ("optimizer.betas=[0.8, 0.9]", "data.weights=[1]", "techniques.mixture_of_experts.top_k=1")
"""Changes of a list, of nothing and of a knob, whose remedies are run: the others read alike."""


def refused_change(say: Say, change: str) -> list[list[str]]:
    """Check that a resume with the change is refused; return the commands of its remedy."""
    name, message = REFUSED[change]
    refused = say("train", "tiny.toml", f"name={name}", "--resume", change, code=2)
    assert message in refused["error"]
    return commands(refused["remedy"])


def test_what_is_learned_otherwise_is_refused(say: Say) -> None:
    for change in REFUSED:
        back, other = refused_change(say, change)
        table = change.partition("=")[0].rpartition(".")[0]
        assert "--resume" in back and back != other
        assert any(word.startswith(table) for word in other)


@pytest.mark.parametrize("change", RUN)
def test_the_commands_of_a_refused_change_work(say: Say, home: Path, change: str) -> None:
    name, _ = REFUSED[change]
    back, other = refused_change(say, change)
    assert say(*back)["resumed"]["changed"] == {}
    new = say(*other, "goal.steps=5")
    folder = home / "runs" / ("NEW" if "name=NEW" in other else f"{name}-2")
    assert new["restarts"] == 0 and report(folder)["steps"] == 5


MAKES = {
    "rope": ("{theta = 5000.0}", "theta=500.0"),
    "gqa": ("{queries_per_key = 2}", "queries_per_key=4"),
}
"""A technique that makes keys of the model, and another value of its knob."""


@pytest.mark.parametrize("technique", MAKES)
def test_a_knob_that_makes_keys_of_the_model_is_told_by_its_own_name(
    say: Say, home: Path, technique: str
) -> None:
    """The keys that it makes were never typed, so no remedy can ask to leave them out."""
    knobs, change = MAKES[technique]
    table = f"techniques.{technique}"
    say("train", "tiny.toml", *SHORT, "name=makes", "model.heads=4", f"{table}={knobs}")
    again = say("train", "tiny.toml", "name=makes", "--resume", "goal.steps=5")
    assert again["resumed"]["changed"] == {"goal.steps": [4, 5]}
    words = ("name=makes", "--resume", f"{table}.{change}")
    refused = say("train", "tiny.toml", *words, code=2)
    assert refused["error"].startswith(f"cannot resume: {table}.{change.partition('=')[0]} was ")
    assert "model." not in refused["error"].partition(": ")[2].partition("learned")[0]
    back, other = commands(refused["remedy"])
    assert say(*back)["resumed"]["changed"] == {}
    assert say(*other, "goal.steps=6")["steps"] == 6


def test_a_technique_that_was_switched_off_is_refused_and_its_commands_work(say: Say) -> None:
    words = ("name=moe", "--resume", "--without", "mixture_of_experts")
    refused = say("train", "tiny.toml", *words, code=2)
    assert "mixture_of_experts was on" in refused["error"]
    back, afresh = commands(refused["remedy"])
    assert say(*back)["steps"] == 4 and say(*afresh)["name"] == "NEW"


def test_a_fork_names_its_parent_everywhere(say: Say, home: Path) -> None:
    words = ("--resume", "--checkpoint", "step-2", "optimizer.lr=2e-3")
    done = say("train", "tiny.toml", *words)
    fork, parent = home / "runs" / "tiny-2", {"run": "runs/tiny", "step": 2}
    assert done["parent"].items() >= parent.items()
    assert report(fork)["parent"] == done["parent"]
    assert "step 2 of runs/tiny" in (fork / "report.html").read_text()
    assert say("plan", str(fork / "plan.toml"))["parent"] == done["parent"]
    plain = CliRunner().invoke(app, ["plan", str(fork / "plan.toml")])
    assert "step 2 of runs/tiny" in plain.stdout
    assert say("plan", "runs/tiny/plan.toml")["parent"] is None
    assert "optimizer.lr 0.01 -> 0.002" in "\n".join(done["told"])
    again = say("train", "tiny.toml", "--resume", "goal.steps=5")
    assert again["parent"] == done["parent"] and again["resumes"] == 1


FORKS = {
    "techniques.mixture_of_experts.experts=8": "has shape (4,",
    "model.dim=32": "model.dim was 16",
    "data.vocab=310": "",
}


@pytest.mark.parametrize("change", FORKS)
def test_a_fork_that_is_refused_leaves_nothing(say: Say, home: Path, change: str) -> None:
    before = sorted(p.name for p in (home / "runs").iterdir())
    words = ("name=moe", "--resume", "--checkpoint", "step-2", change)
    refused = say("train", "tiny.toml", *words, code=2)
    assert FORKS[change] in refused["error"]
    assert sorted(p.name for p in (home / "runs").iterdir()) == before
    for command in commands(refused["remedy"]):
        say(*command)


def test_a_fork_whose_checkpoint_is_damaged_leaves_nothing(say: Say, home: Path) -> None:
    before = sorted(p.name for p in (home / "runs").iterdir())
    weights = home / "runs/tiny/checkpoints/step-2/rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    say("train", "tiny.toml", "--resume", "--checkpoint", "step-2", code=1)
    assert sorted(p.name for p in (home / "runs").iterdir()) == before


def test_a_fork_that_cannot_be_restored_is_removed(
    say: Say, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.core.errors import RunError
    from headrace.train import state

    def broken(build: Any, saved: Any) -> None:
        assert (home / "runs/tiny-2/plan.toml").is_file()  # what a kill would leave is whole
        raise RunError("no")

    monkeypatch.setattr(state, "restore", broken)
    say("train", "tiny.toml", "--resume", "--checkpoint", "step-2", code=1)
    assert not [*(home / "runs").glob("*tiny-2*")]


def test_a_fork_needs_room(say: Say, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(home)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    words = ("--resume", "--checkpoint", "step-2")
    refused = say("train", "tiny.toml", *words, code=1)
    assert tells(refused["error"], "step-2", "1000 B free")
    assert not [*(home / "runs").glob("*tiny-2*")]


def test_an_empty_folder_that_a_kill_left_is_not_the_run_to_resume(say: Say, home: Path) -> None:
    (home / "runs" / "tiny-2").mkdir()
    assert say("train", "tiny.toml", "--resume", "goal.steps=5")["name"] == "tiny"
