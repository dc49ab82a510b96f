"""The remedies of errors that several processes meet are typed as they are printed."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from facts import tells
from tiny import PLAN, report

WORDS = ("goal.steps=1", "guard=false")


@pytest.fixture
def here(tmp_path: Path, corpus: Path, prepared_folder: Path) -> Path:
    """Make a folder with the tiny plan."""
    (tmp_path / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    return tmp_path


def typed(zygote: Any, here: Path, command: str) -> list[Any]:
    """Type a whole command of a remedy."""
    words = shlex.split(command)
    if words[0] == "headrace":
        return [zygote.run(here, *words[1:])]
    assert words[:2] == ["torchrun", "--nproc-per-node"] and words[3:5] == ["-m", "headrace"]
    return zygote.ranks(int(words[2]), here, *words[5:])


@pytest.mark.parametrize(("started", "wanted"), [(1, 2), (2, 1)])
def test_another_number_of_processes_than_the_mesh_has(
    zygote: Any, here: Path, started: int, wanted: int
) -> None:
    """Both remedies train: as many processes as the mesh has ranks, and a mesh of as many ranks."""
    argv = ["train", "tiny.toml", *WORDS, f"mesh.data={wanted}"]
    ended = zygote.ranks(started, here, *argv)
    assert {e.code for e in ended} == {2}
    assert tells(ended[0].err, "error:", f"{wanted} processes", started)
    (remedy,) = [e for e in ended[0].err.splitlines() if e.startswith("  try: ")]
    command, _, other = remedy.removeprefix("  try: ").partition(" (or ")
    assert {e.code for e in typed(zygote, here, command)} == {0}
    again = zygote.ranks(started, here, *argv[:-1], "name=other", other.removesuffix(")"))
    assert {e.code for e in again} == {0}
    assert report(here / "runs/tiny")["steps"] == report(here / "runs/other")["steps"] == 1
