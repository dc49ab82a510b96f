"""How a run tells how it goes: lines off a terminal, bars that keep their times in a narrow one."""

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import tells
from rich.console import Console

from headrace.cli import terminal
from headrace.core.progress import LINES_A_RUN, Lines, Progress, Several
from headrace.plan.plan import Plan
from headrace.train.train import run

ROW = {"step": 1, "loss": 2.5, "tokens_per_s": 12345.6}


class Flushed(io.StringIO):
    """A stream that counts what has been flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_a_run_off_a_terminal_tells_steps_validations_and_saves(
    tiny_plan: Callable[..., Plan],
) -> None:
    log = Flushed()
    folder = run(tiny_plan(), progress=Lines([log])).folder
    lines = log.flushed.splitlines()
    assert log.flushed == log.getvalue()
    steps = [line for line in lines if re.match(r"step \d+/12  ", line)]
    form = r"step \d+/12  loss [\d.]+  [\d,]+ tokens/s  memory [\d.]+ [MG]iB  [\d.]+ m?s left"
    assert [re.fullmatch(form, line) is not None for line in steps] == [True] * 12
    for step in (5, 10, 12):  # the last is not due, and made at the end
        assert any(re.match(rf"step {step}: .*[\d.]+ bits", x) for x in lines)
    for step in (4, 8, 12):
        assert f"step {step}: saved {folder}/checkpoints/step-{step}" in lines


def test_a_long_run_has_a_line_an_interval() -> None:
    log = Flushed()
    lines = Lines([log])
    for step in range(1, 1001):
        lines.row({**ROW, "step": step}, 1000, memory_bytes=2**30, left_s=7000.0)
    told = log.flushed.splitlines()
    assert len(told) == LINES_A_RUN + 1
    speed = "12,346 tokens/s"
    assert tells(told[0], "step 1/1000", "loss 2.5000", speed, "1.0 GiB", "117 min")
    endless = Lines([log], every_s=0.0)
    endless.row({**ROW, "step": 7}, None)
    endless.task("tokenizing", 1, 4)
    row, task = log.flushed.splitlines()[-2:]
    assert tells(row, "step 7", "loss 2.5000", speed, "unknown") and task == "tokenizing 25%"


def test_a_log_that_cannot_be_written_fails_no_run() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log, shut = Flushed(), io.StringIO()
    shut.close()
    lines = Lines([Full(), shut, log])
    lines.note("one")
    lines.note("two")
    assert log.flushed == "one\ntwo\n"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_bars_keep_their_times(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    shown = io.StringIO()
    narrow = Console(file=shown, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(terminal, "console", narrow)
    bars = terminal.BarProgress()
    bars.task("validation", 1, 1)
    row = {**ROW, "step": 50, "tokens_per_s": 1_234_567.0, "val_bits_per_byte": 1.234}
    bars.row(row, 100, left_s=1.0)
    bars.close()
    last = [line for line in shown.getvalue().splitlines() if "training" in line][-1]
    assert re.search(r"training .* 50% 0:00:0\d (0:00:0\d|-:--:--) loss 2", last), last
    assert ("bits/byte" in last) == (width == 120)


def test_bars_are_for_terminals_and_lines_for_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def asked(*, error: bool, out: Any, json: bool = False) -> Progress:
        narrow = Console(file=io.StringIO(), force_terminal=error, width=80)
        monkeypatch.setattr(terminal, "console", narrow)
        monkeypatch.setattr(sys, "stdout", out)
        made = terminal.make_progress(json)
        made.close()
        return made

    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        assert type(asked(error=False, out=log, json=True)) is Progress
        once = asked(error=False, out=log)
        once.note("once")
        assert type(once) is Lines
        both = asked(error=True, out=log)  # > log alone
        assert type(both) is Several
        monkeypatch.setenv("RANK", "1")
        assert type(asked(error=False, out=log)) is Progress
    assert (tmp_path / "log").read_text() == "once\n" and os.environ["RANK"] == "1"
