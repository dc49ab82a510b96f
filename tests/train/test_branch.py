"""A branch is the run that would have had its schedule from the start, or it is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order
from tiny import assert_same_run, metrics, report
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.errors import ConfigError, RunError
from headrace.core.progress import Progress
from headrace.inference.branch import plan_of_branch
from headrace.inference.load import open_model
from headrace.optim.stability import Band
from headrace.plan.technique import installed
from headrace.report.family import family_of
from headrace.report.single import write_report
from headrace.train import train as trainer
from headrace.train.checkpoint import Saved

STABLE = ("schedule.kind=warmup_stable_decay", "schedule.decay_fraction=0.5")
KEPT = ("checkpoint.keep_last=9", "eval.every_steps=4")


@pytest.fixture
def base(train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 12 of 16 steps, whose decay begins after step 9; checkpoints at 4, 8 and 12."""
    monkeypatch.chdir(tmp_path)
    return train("name=base", "schedule.steps=16", "goal.steps=12", *STABLE, *KEPT)


def branch(where: str, *words: str, notes: list[str] | None = None, **more: Any) -> Path:
    """Train a branch in this process, and return its folder."""
    progress = Progress()
    heard = progress.notes = notes if notes is not None else []
    begins = plan_of_branch(where, installed(), overrides=words, note=heard.append, **more)
    how = {"resume": True, "folder": begins.parent, "checkpoint": begins.checkpoint}
    return trainer.run(begins.plan, branch=True, progress=progress, **how).folder


def test_a_branch_is_the_run_with_its_schedule_and_its_parent_stays(
    base: Path, train: Callable[..., Path]
) -> None:
    """Compare a cooled step 8, bit for bit, with the run of ten steps that decays at its end."""
    before = {p: p.read_bytes() for p in base.rglob("*") if p.is_file() and p.name != ".lock"}
    ends = ("schedule.steps=10", "schedule.decay_fraction=0.2", "goal.steps=10")
    cooled = branch("base@8", "name=cooled", *ends)
    whole = train("name=whole", *STABLE[:1], *ends, *KEPT)
    shutil.rmtree(whole / "checkpoints" / "step-4")
    assert_same_run(whole, cooled)
    assert report(cooled)["parent"]["run"].endswith("base")
    assert report(cooled)["parent"]["step"] == 8
    assert [row["lr"] for row in metrics(cooled)][7:] != [r["lr"] for r in metrics(base)][7:10]
    assert {p: p.read_bytes() for p in before} == before
    resumed = branch("runs/cooled@latest", "goal.steps=11")
    assert resumed.name == "cooled-2", "a branch of a branch, and the name of its parent's folder"
    assert report(resumed)["parent"]["run"].endswith("cooled")
    _check_family(base, cooled, resumed)


def _check_family(base: Path, cooled: Path, again: Path) -> None:
    """The family is shown on the page of each of its runs, in the order of its tree."""
    for run in (base, cooled, again):
        found = family_of(run)
        assert [(m.directory.name, m.begins_at, m.depth) for m in found] == [
            ("base", 0, 0),
            ("cooled", 8, 1),
            ("cooled-2", 10, 2),
        ]
        assert [m.own_steps for m in found] == [12, 2, 1]
        assert "Family" in write_report(run).read_text()


def test_a_branch_may_switch_what_is_to_come_and_nothing_else(base: Path) -> None:
    averaged = branch("base@8", "goal.steps=10", "name=a", with_=["weight_averaging"])
    assert report(averaged)["techniques"]["weight_averaging"]["active"]
    for words, more, key, remedy in (
        (["seed=4"], {}, "seed", "seed=3"),
        (["batch.tokens=64"], {}, "batch.tokens", "batch.tokens=128"),
        ([], {"with_": ["z_loss"]}, "techniques.z_loss", "--without z_loss"),
        ([], {"with_": ["batch_ramp"]}, "techniques.batch_ramp", "--without batch_ramp"),
    ):
        with pytest.raises(ConfigError, match=in_order("a branch goes on", key)) as told:
            branch("base@8", "goal.steps=10", *words, **more)
        assert told.value.remedy.text == remedy
    assert sorted(p.name for p in base.parent.iterdir() if p.is_dir()) == ["a", "base"]


@pytest.mark.parametrize(
    ("where", "words", "says", "remedy"),
    [
        ("base@7", (), ("no checkpoint at step", 7, 4, 8, 12), "--branch base@8"),
        ("base", (), ("none given",), "--branch base@12"),
        ("@8", (), ("names no run",), "--branch RUN@STEP"),
        ("base@8", ("goal.steps=8",), ("ends at once", 8), "goal.steps=10"),
        ("base@12", ("schedule.steps=40",), ("decay", "began after step", 9), "--branch base@8"),
        (
            "base@8",
            ("schedule.steps=3", "schedule.warmup_steps=9"),
            ("warmup_steps", 9, 3),
            "schedule.warmup_steps=3",
        ),
    ],
)
def test_what_cannot_begin_names_the_nearest_that_can(
    base: Path, where: str, words: tuple[str, ...], says: tuple[Any, ...], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=in_order(*says)) as told:
        plan_of_branch(
            where, installed(), overrides=["goal.steps=20", *words], note=lambda line: None
        )
    assert remedy in told.value.remedy.text


def test_a_cosine_goes_on_falling_and_not_at_the_whole_rate(base: Path) -> None:
    notes: list[str] = []
    falls = ["goal.steps=20", "schedule.kind=cosine", "schedule.steps=40"]
    assert (
        plan_of_branch("base@12", installed(), overrides=falls, note=notes.append).checkpoint
        == "step-12"
    )
    assert "schedule changed" in notes[0]
    steeper = [*falls, "optimizer.lr=1"]
    plan_of_branch("base@12", installed(), overrides=steeper, note=notes.append)
    assert "from 0.0066 to 0.84" in notes[1], "3/8 down from 0.01, and 11/40 down from 1"
    with pytest.raises(ConfigError, match="stable phase"):
        constant = ["goal.steps=20", "schedule.kind=constant"]
        plan_of_branch("base@12", installed(), overrides=constant, note=notes.append)


def test_the_command_takes_changes_in_the_place_of_a_plan(base: Path) -> None:
    words = ["train", "--branch", "base@8", "goal.steps=9", "name=b", "--json"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["parent"]["step"] == 8
    for wrong in (["demo", "--branch", "base@8"], ["goal.steps=9", "--branch", "base@8"]):
        more = [] if wrong[0] == "demo" else ["--resume"]
        ended = CliRunner().invoke(app, ["train", *wrong, *more])
        assert ended.exit_code == 2 and "--branch" in ended.stderr


def test_a_branch_within_a_growing_batch_keeps_its_stages(
    train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the schedule's steps are others where the schedule is longer."""
    monkeypatch.chdir(tmp_path)
    train("name=grown", "goal.steps=4", "schedule.steps=8", "techniques.batch_ramp.until=0.5")
    with pytest.raises(ConfigError, match=in_order("a branch goes on", "schedule.steps")) as told:
        branch("grown@4", "goal.steps=9", "schedule.steps=40")
    assert told.value.remedy.text == "schedule.steps=8"


AVERAGE = "techniques.weight_averaging"
LAWA = (f"{AVERAGE}.kind=lawa", f"{AVERAGE}.every=1")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (LAWA, ("kind=ema", "decay=0.99"), "kind lawa -> ema"),
        (LAWA, ("keep=3",), "keep 5 -> 3"),
        ((f"{AVERAGE}.decay=0.99",), ("kind=lawa", "every=1"), "kind ema -> lawa"),
    ],
)
def test_an_average_of_other_knobs_starts_afresh(
    train: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[str, ...],
    after: tuple[str, ...],
    says: str,
) -> None:
    """It is of the branch's own weights, and of neither random ones nor copies of another order."""
    monkeypatch.chdir(tmp_path)
    train("name=base", "goal.steps=4", "checkpoint.keep_last=9", *before)
    words = ("goal.steps=6", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    notes: list[str] = []
    knobs = [f"{AVERAGE}.{knob}" for knob in after]
    other = branch("base@4", "name=other", *words, *knobs, notes=notes)
    assert [line for line in notes if "weight_averaging starts afresh" in line and says in line]
    saved = Saved(other / "checkpoints" / "step-6")
    assert saved.values["techniques"]["weight_averaging"]["updates"] == 2
    same = branch("base@4", "name=same", *words, notes=(heard := []))
    assert not [line for line in heard if "afresh" in line]
    assert (
        Saved(same / "checkpoints/step-6").values["techniques"]["weight_averaging"]["updates"] == 6
    )
    for step in ("step-4", "step-5"):  # where nothing is averaged yet, and one step
        opened = open_model(other, installed(), checkpoint=step)
        name, weight = next(iter(opened.model.named_parameters()))
        raw = torch.empty_like(weight)
        Saved(other / "checkpoints" / step).fill_(f"model/{name}", raw)
        assert weight.equal(raw)


BITS, MUON = "techniques.adamw_8bit.smallest", "techniques.muon.normalize_rows"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("techniques.spike_rewind.window=8", "techniques.spike_rewind.window=16", "spike_rewind"),
        (f"{BITS}=100", f"{BITS}=513", "optimizer's state"),
        (f"{BITS}=513", f"{BITS}=100", "optimizer's state"),
        (f"{MUON}=true", f"{MUON}=false", ""),
        (f"{MUON}=false", f"{MUON}=true", ""),
    ],
)
def test_a_branch_may_change_what_is_kept(
    train: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
    says: str,
) -> None:
    """State that the changed knobs have no use for is dropped, and the line names what is new."""
    monkeypatch.chdir(tmp_path)
    train("name=base", "goal.steps=4", before)
    notes: list[str] = []
    other = branch("base@4", "name=other", "goal.steps=5", after, notes=notes)
    assert all(entry["active"] for entry in report(other)["techniques"].values())
    lines = [line for line in notes if "starts afresh" in line]
    assert [says in line and after.partition("=")[0] in line for line in lines] == [True] * bool(
        says
    )


def test_what_is_kept_otherwise_under_the_same_knobs_is_damage(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("techniques.spike_rewind.window=8", "goal.steps=4")
    train(*words)
    monkeypatch.setattr(Band, "tensors", lambda band: {"other": band.kept})
    with pytest.raises(RunError, match=in_order("is damaged", "no tensor", "spike_rewind/other")):
        train(*words[:1], "goal.steps=5", resume=True)
