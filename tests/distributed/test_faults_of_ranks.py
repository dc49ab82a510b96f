"""A fault of one of four ranks ends in one message that names it, and a resume that is exact."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import PLAN, assert_same_run, losses, report, tensors
from torch.distributed import TCPStore

FAULTY = Path(__file__).parents[1] / "faulty_ranks.py"
RANKS, CULPRIT = 4, 2
PATIENCE_S = 8.0
"""Seconds in the place of the 45 of a plan that says nothing."""
pytestmark = pytest.mark.timeout(180)  # a rank that waits for ever fails its test
WORDS = (
    f"mesh.data={RANKS}",
    "guard=false",
    f"mesh.patience_s={PATIENCE_S}",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path) -> Path:
    """Make a folder with tiny.toml."""
    cwd = tmp_path_factory.mktemp("faults")
    (cwd / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    return cwd


@pytest.fixture(scope="module")
def whole(zygote: Any, home: Path) -> Path:
    """Return the folder of a run that had no fault."""
    ended = zygote.ranks(RANKS, home, "train", "tiny.toml", *WORDS, "name=whole")
    assert [e.code for e in ended] == [0] * RANKS, ended
    return home / "runs" / "whole"


class Faulty:
    """Runs of four ranks under torchrun's store, of which one has a fault."""

    def __init__(self, zygote: Any, home: Path) -> None:
        self.zygote, self.home = zygote, home
        self.store = TCPStore("127.0.0.1", 0, is_master=True)

    def start(self, fault: str, name: str, *words: str, at_step: int = 7, **env: str) -> list[Any]:
        """Start them; the store is that of torchrun's agent."""
        argv = ["tiny.toml", *WORDS, f"name={name}", *words]
        call = {"fault": fault, "rank": CULPRIT, "at_step": at_step, "argv": argv}
        shared = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "one",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "WORLD_SIZE": str(RANKS),
            **env,
        }
        worlds = [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(RANKS)]
        what = [str(FAULTY), "train", call]
        return [self.zygote._start(self.home, world, call=what) for world in worlds]

    def end(self, children: list[Any]) -> list[Any]:
        """Wait for all but the culprit, then end the culprit, as torchrun's agent does."""
        others = [child.wait() for rank, child in enumerate(children) if rank != CULPRIT]
        children[CULPRIT].send(signal.SIGKILL)
        return [*others, children[CULPRIT].wait()]


@pytest.fixture
def faulty(zygote: Any, home: Path) -> Faulty:
    """Return what starts runs with a fault."""
    return Faulty(zygote, home)


def assert_told_once(ended: list[Any], *words: str) -> str:
    told = "".join(e.err for e in ended)
    assert "Traceback" not in told, told
    assert told.count("error: ") == 1, told
    for word in words:
        assert word in told, told
    return told


def assert_resumes(
    zygote: Any, home: Path, name: str, whole: Path, *words: str, stopped: bool = False
) -> None:
    """Resume and compare; a run that was `stopped` has a checkpoint more."""
    plan = f"runs/{name}/plan.toml"
    again = zygote.ranks(RANKS, home, "train", plan, "--resume", *words, "--json")
    assert [e.code for e in again] == [0] * RANKS, again
    assert json.loads(again[0].out)["steps"] == 12
    run = home / "runs" / name
    if not stopped:
        assert_same_run(run, whole)
        return
    assert torch.equal(losses(run), losses(whole))
    last, wanted = (tensors(one / "checkpoints" / "latest") for one in (run, whole))
    assert all(torch.equal(last[key], wanted[key]) for key in wanted)
    assert report(run)["stream_sha256"] == report(whole)["stream_sha256"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang", ("faulty_ranks.py", "in hang", "after step 7", "wait for it")),
        ("stop", ("has not answered", "after step 7")),
        ("call_another", ("they do not call the same",)),
    ],
)
def test_a_rank_that_holds_up_the_others_is_named_and_the_run_ends(
    faulty: Faulty, zygote: Any, home: Path, whole: Path, fault: str, words: tuple[str, ...]
) -> None:
    ended = faulty.end(faulty.start(fault, fault))
    assert [e.code for e in ended[:-1]] == [1] * (RANKS - 1), ended
    assert_told_once(ended, f"rank {CULPRIT} ", *words, "--resume")
    written = report(home / "runs" / fault)
    assert (written["status"], written["error"]) == ("failed", "RankHung")
    assert_resumes(zygote, home, fault, whole)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("full", (f"rank {CULPRIT} of {RANKS}", "No space left", "free some space")),
        ("kill", (f"rank {CULPRIT} ended without a word", "step-6")),
    ],
)
def test_a_rank_that_ends_is_named_with_its_reason(
    faulty: Faulty, zygote: Any, home: Path, whole: Path, fault: str, words: tuple[str, ...]
) -> None:
    children = faulty.start(fault, fault, at_step=7)
    ended = [child.wait() for child in children]
    told = assert_told_once(ended)
    written = report(home / "runs" / fault)
    assert written["status"] == "failed"
    for word in words:
        assert word in f"{told}{written['message']}", (told, written["message"])
    assert_resumes(zygote, home, fault, whole)


def test_a_bit_that_flips_is_named_with_its_rank(
    faulty: Faulty, zygote: Any, home: Path, whole: Path
) -> None:
    ended = [c.wait() for c in faulty.start("flip", "flip", "mesh.compare_every_steps=2")]
    assert [e.code for e in ended] == [1] * RANKS
    assert_told_once(ended, f"rank {CULPRIT} holds another model/", "after step 8", "after step 6")
    written = report(home / "runs" / "flip")
    assert written["error"] == "CopiesDiffer"
    assert written["copies"]["compared"] == 3 and written["copies"]["equal_at"] == 6
    assert_resumes(zygote, home, "flip", whole, "--checkpoint", "step-6")


def test_what_no_rank_has_twice_is_refused(zygote: Any, home: Path) -> None:
    """Check that slices, each on one rank alone, are not compared; and what the remedies say."""
    words = ["train", "tiny.toml", "mesh.compare_every_steps=2", "goal.steps=2", "guard=false"]
    slices = [*words, "mesh.data=2", "--with", "fsdp", "name=slices"]
    ended = zygote.ranks(2, home, *slices)
    assert [e.code for e in ended] == [2, 2], ended
    assert "mesh.compare_every_steps=0" in ended[0].err and "mesh.replicate=2" in ended[0].err
    hybrid = [*words, "mesh.data=4", "mesh.replicate=2", "--with", "fsdp", "name=groups"]
    assert [e.code for e in zygote.ranks(4, home, *hybrid)] == [0] * 4
    assert report(home / "runs" / "groups")["copies"]["compared"] == 1


def test_a_slow_rank_is_named_with_its_share(faulty: Faulty, home: Path) -> None:
    ended = [c.wait() for c in faulty.start("slow", "slow", "goal.steps=60", at_step=0)]
    assert [e.code for e in ended] == [0] * RANKS
    found = json.loads((home / "runs" / "slow" / "findings.json").read_text())
    text = json.dumps(found)
    assert f"Ranks wait for rank {CULPRIT} in " in text, text


def test_a_scheduler_s_signal_saves_within_the_grace_time(
    faulty: Faulty,
    zygote: Any,
    home: Path,
    whole: Path,
    wait_until: Callable[..., None],
) -> None:
    """Check that SIGTERM to all ranks of a batch job saves, and asks to be queued again."""
    children = faulty.start("slow", "term", at_step=0, SLURM_JOB_ID="7")
    metrics = home / "runs" / "term" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    for child in children:
        os.kill(child.pid, signal.SIGTERM)
    ended = [child.wait() for child in children]
    assert {e.code for e in ended} == {75}
    assert_told_once(ended, "checkpoint saved")
    assert_resumes(zygote, home, "term", whole, stopped=True)
