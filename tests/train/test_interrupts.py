"""A signal ends a run between two steps with its checkpoint saved, or at once before the first."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import tells
from tiny import PLAN, assert_same_run, report

from headrace.core.errors import Stopped
from headrace.train import checkpoint, interrupts
from headrace.train.checkpoint import Saved
from headrace.train.interrupts import AsCtrlC, Closing, Interrupts, PatientInterrupts

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75}
COMMAND = ("train", "tiny.toml", "goal.steps=120")
signals = pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def whole(
    zygote: Any, tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path
) -> Path:
    """Return the folder of a run that got no signal."""
    cwd = tmp_path_factory.mktemp("whole")
    (cwd / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    assert zygote.run(cwd, *COMMAND, "name=whole").code == 0
    return cwd / "runs" / "whole"


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGUSR1],
    ids=lambda number: number.name,
)
def test_a_signal_saves_and_the_resume_equals_a_run_that_got_none(
    zygote: Any,
    plan_file: Path,
    whole: Path,
    wait_until: Callable[..., None],
    number: signal.Signals,
) -> None:
    cwd, run = plan_file.parent, plan_file.parent / "runs" / "told"
    child = zygote.start(cwd, *COMMAND, "name=told")
    wait_until(lambda: lines(run / "metrics.jsonl") > 20)
    child.send(number)
    ended = child.wait()
    assert ended.code == CODES[number], ended
    step = json.loads((run / "checkpoints/latest/checkpoint.json").read_text())["step"]
    assert step == lines(run / "metrics.jsonl") > 20
    assert tells(ended.err, number.name, "step", step, "checkpoint saved")
    assert "headrace train runs/told/plan.toml --resume" in ended.err
    assert "Traceback" not in ended.err
    report = json.loads((run / "report.json").read_text())
    assert (report["status"], report["steps"]) == ("interrupted", step)
    assert report["message"] == f"stopped by {number.name}"
    assert zygote.run(cwd, "train", "runs/told/plan.toml", "--resume").code == 0
    assert_same_run(run, whole)


@signals
def test_a_signal_while_data_is_prepared_ends_at_once_and_leaves_nothing_half(
    zygote: Any, plan_file: Path, wait_until: Callable[..., None], number: signal.Signals
) -> None:
    cwd, data = plan_file.parent, plan_file.parent / "data"
    child = zygote.start(cwd, *COMMAND, "data.sources=stdlib", f"data.directory={data}")
    wait_until(lambda: any(data.glob(".*.partial")))
    child.send(number)
    ended = child.wait()
    assert ended.code == CODES[number], ended
    assert tells(ended.err, "error:", number.name, "before its first step")
    assert "Traceback" not in ended.err
    assert all(path.suffix == ".lock" for path in data.iterdir())
    assert not (cwd / "runs").exists()


def test_a_signal_before_the_first_step_stops_and_later_it_waits() -> None:
    with Interrupts() as stop:
        with pytest.raises(Stopped) as told:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert told.value.exit_code == 75
    with Interrupts() as stop:
        stop.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.name == "SIGTERM" and stop.exit_code == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in CODES]
    with Interrupts():
        assert [signal.getsignal(number) for number in CODES] != before
    assert [signal.getsignal(number) for number in CODES] == before


@pytest.mark.slow
def test_a_signal_to_the_real_command_line(
    plan_file: Path, wait_until: Callable[..., None]
) -> None:
    cwd = plan_file.parent
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "train", "tiny.toml", "goal.steps=100000"],
        cwd=cwd,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: lines(cwd / "runs/tiny/metrics.jsonl") > 20)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate()[1]
    assert process.returncode == 130


@pytest.mark.parametrize("kind", [Interrupts, AsCtrlC, Closing])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_that_was_ignored_from_the_start_stays_ignored(
    kind: type[Interrupts], number: signal.Signals
) -> None:
    """As `nohup` has SIGHUP, and a shell's script the Ctrl-C of what it starts with `&`."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with kind() as stop:
            os.kill(os.getpid(), number)
            assert stop.name is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_hangup_saves() -> None:
    with Interrupts() as stop:
        stop.hold()
        os.kill(os.getpid(), signal.SIGHUP)
        assert (stop.name, stop.exit_code) == ("SIGHUP", 129)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
@pytest.mark.parametrize(
    ("at_step", "words"),
    [(4, []), (12, ["eval.every_steps=4"]), (12, ["checkpoint.every_steps=100"])],
)
def test_a_signal_in_the_midst_of_a_save_leaves_it_whole(
    train: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_step: int,
    words: list[str],
    number: signal.Signals,
) -> None:
    """Also one that comes again; where the goal is reached and validated, the run is done."""
    write, last = checkpoint.save_file, at_step == 12

    def signalled(tensors: Any, path: Path) -> None:
        if path.parent.name == f"step-{at_step}.tmp":
            for _ in range(2):
                os.kill(os.getpid(), number)
                time.sleep(0.05)
        write(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", signalled)
    run = tmp_path / "runs" / "tiny"
    if last:
        train("guard=false", *words)
    else:
        with pytest.raises(Stopped, match=rf"{number.name} .*step \d+;") as told:
            train("guard=false")
        assert told.value.exit_code == {"SIGTERM": 143, "SIGHUP": 129}[number.name]
    monkeypatch.undo()
    steps = [path.name for path in (run / "checkpoints").glob("step-*")]
    assert f"step-{at_step}" in steps and not [name for name in steps if name.endswith("tmp")]
    newest = Saved(run / "checkpoints" / "latest").values["step"]
    found = report(run)
    assert found["status"] == ("done" if last else "interrupted")
    assert found["steps"] == newest >= at_step
    if not last:
        assert_same_run(train("guard=false", resume=True), train("guard=false", "name=twin"))


def test_a_compiler_that_does_not_listen_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's name is what tells a compiler; leaving the process is recorded instead."""
    left: list[int] = []
    monkeypatch.setattr(interrupts, "end_children", lambda: left.append(0))
    monkeypatch.setattr(interrupts.os, "_exit", left.append)
    monkeypatch.setattr(Interrupts, "patience_s", 0.1)
    monkeypatch.setattr(Interrupts, "print_error", staticmethod(interrupts._print))
    source = "def work(left):\n    while len(left) < 2: pass\n"
    names: dict[str, Any] = {}
    exec(compile(source, "/x/torch/_inductor/compile_fx.py", "exec"), names)
    with Interrupts() as stop:
        stop.hold(lambda name: (f"{name} was heard", "go on"))
        os.kill(os.getpid(), signal.SIGTERM)
        names["work"](left)
    assert left[:2] == [0, 143]
    assert tells(capsys.readouterr().err, "SIGTERM", "compiled", "SIGTERM was heard")


def test_a_long_step_is_not_taken_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(interrupts.os, "_exit", left.append)
    monkeypatch.setattr(Interrupts, "patience_s", 0.0)
    with Interrupts() as stop:
        stop.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.7)
    assert left == []


def test_children_are_ended() -> None:
    """In a process of its own, since every child of it ends."""
    code = (
        "import subprocess; from headrace.train.interrupts import end_children; "
        "a = subprocess.Popen(['sh', '-c', 'sleep 60; true'], stdout=-3, stderr=-3); "
        "end_children(); print(a.wait(9))"
    )
    asked = [sys.executable, "-c", code]
    assert subprocess.run(asked, capture_output=True, text=True).stdout == "-9\n"


@pytest.mark.parametrize(("catches", "threads"), [(Interrupts, 1), (PatientInterrupts, 0)])
def test_a_kernel_is_never_ended(catches: type[Interrupts], threads: int) -> None:
    """A command has a thread that ends a compiler which hears nothing; a kernel is not ended."""
    before = {*threading.enumerate()}
    with catches():
        assert len({*threading.enumerate()} - before) == threads


def test_signals_are_left_to_the_main_thread() -> None:
    usual, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [usual]
