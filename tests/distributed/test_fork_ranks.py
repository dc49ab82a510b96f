"""A fork under several ranks is one new run: the first makes it, and all go on in it."""

import json
import os
from pathlib import Path
from typing import Any

from facts import tells
from tiny import losses, report


def test_two_ranks_go_on_in_one_fork(zygote: Any, four_steps: Path) -> None:
    before = {p: p.read_bytes() for p in (four_steps / "runs/tiny").rglob("*") if p.is_file()}
    words = ("--resume", "--checkpoint", "step-2", "optimizer.lr=2e-3", "mesh.data=2")
    ended = zygote.ranks(2, four_steps, "train", "tiny.toml", *words)
    assert [e.code for e in ended] == [0, 0], ended[0].err + ended[1].err
    assert sorted(p.name for p in (four_steps / "runs").iterdir()) == ["tiny", "tiny-2"]
    assert {p: p.read_bytes() for p in before} == before
    fork = four_steps / "runs/tiny-2"
    assert report(fork)["parent"].items() >= {"run": "runs/tiny", "step": 2}.items()
    assert len(losses(fork)) == 4 and os.readlink(fork / "checkpoints/latest") == "step-4"
    index = json.loads((fork / "checkpoints/latest/checkpoint.json").read_text())
    assert len(index["parts"]) == 2  # both ranks saved into the one folder
    told = [e.err.count("is a new run from step 2") for e in ended]
    assert told == [1, 0]


def test_a_fork_that_is_refused_ends_every_rank_with_its_message(
    zygote: Any, four_steps: Path
) -> None:
    before = sorted(p.name for p in (four_steps / "runs").iterdir())
    words = ("--resume", "--checkpoint", "step-2", "seed=4", "mesh.data=2", "name=tiny")
    ended = zygote.ranks(2, four_steps, "train", "runs/tiny/plan.toml", *words)
    assert [e.code for e in ended] == [2, 2]
    assert all(tells(e.err, "seed", 3, 4) for e in ended)
    assert sorted(p.name for p in (four_steps / "runs").iterdir()) == before


def test_data_that_cannot_be_prepared_ends_every_rank_alike(zygote: Any, four_steps: Path) -> None:
    words = ("name=other", "data.sources=nowhere.txt", "mesh.data=2")
    ended = zygote.ranks(2, four_steps, "train", "tiny.toml", *words)
    assert [e.code for e in ended] == [2, 2]
    assert all("nowhere.txt" in e.err and "another rank" not in e.err for e in ended)
    assert not (four_steps / "runs/other").exists()
