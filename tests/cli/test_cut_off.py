"""A run that a signal ends while it compiles says how it goes on, and goes on so."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from remedies import recording
from shell import run
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.train import interrupts
from headrace.train.interrupts import Interrupts


class Left(BaseException):
    """The process is left, of which the test is a part."""


@pytest.mark.parametrize(
    ("steps", "kept"), [(1, "no checkpoint was saved yet"), (5, "step-3 of runs/own is intact")]
)
def test_a_run_that_is_cut_off_in_a_compiler_goes_on_as_it_is_told(
    steps: int, kept: str, tiny_demo: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, asked = Interrupts.hold, []

    def hold(self: Any, last_words: Any = None) -> None:
        """Cut the run off before the step that comes next."""
        plain(self, last_words)
        asked.append(last_words)
        if len(asked) == steps:
            self.name = "SIGTERM"
            self._cut_off()

    def leave(code: int) -> None:
        raise Left(code)

    with recording() as made, monkeypatch.context() as patch, pytest.raises(Left):
        patch.setattr(Interrupts, "hold", hold)
        patch.setattr(interrupts, "end_children", lambda: None)
        patch.setattr(interrupts.os, "_exit", leave)
        CliRunner().invoke(app, ["train", *tiny_demo, "name=own", "guard=false"])
    ((_, error),) = [told for told in made if told[0] == "train/interrupts:Interrupts._cut_off#1"]
    assert kept in error.message
    words = shlex.split(error.remedy.text)
    assert words[0] == "headrace"
    again = run(words[1:])
    assert not again.code, again
