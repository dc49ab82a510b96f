"""What goes wrong while a run goes: one message, exit code 1, and the last checkpoint intact."""

import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crosses import crossed
from facts import in_order, tells
from tiny import assert_same_run, report

from headrace.core.errors import ConfigError, Diverged, MemoryFull, NoMoreThreads, RunError
from headrace.data.ingest import prepare
from headrace.data.loader import Loader, StepBatch
from headrace.doctor.run import diagnose_run
from headrace.model.head import IGNORED
from headrace.plan.plan import Plan
from headrace.train import checkpoint
from headrace.train import train as training
from headrace.train.checkpoint import Checkpoints, Saved

Train = Callable[..., Path]
FULL = os.strerror(errno.ENOSPC)
"""What the system says of a full disk."""


# --- a step without a target ----------------------------------------------------------------


@pytest.mark.parametrize("ignored", [1, 2, 12])
@pytest.mark.parametrize(
    "beside",
    [
        ["techniques.lora.rank=2"],
        ["techniques.qlora={rank = 2, base = 'int8'}", "model.dim=32"],
        ["techniques.z_loss={}"],
        ["techniques.sophia.every=4"],
    ],
)
def test_evidence_waits_for_a_step_that_counted_a_target(
    train: Train,
    given: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    beside: list[str],
    ignored: int,
) -> None:
    """The first steps have none: nothing has reached a weight, and nothing is wrong."""
    from headrace.train import session

    whole, check, asked = Loader.step, session.check_active, []

    def step(loader: Loader, index: int) -> StepBatch:
        batch = whole(loader, index)
        if index >= ignored:
            return batch
        none = [replace(m, targets_BT=m.targets_BT.fill_(IGNORED)) for m in batch.micros]
        return replace(batch, micros=none)

    def ask(build: Any) -> Any:
        asked.append(build.now["step"])
        return check(build)

    monkeypatch.setattr(Loader, "step", step)
    monkeypatch.setattr(session, "check_active", ask)
    run = report(train(*beside, given(*beside[1:])))
    assert run["status"] == "done" and run["start_s"]["first_step"] > 0
    counted = ignored < run["steps"]
    assert asked == ([ignored] if counted else [])
    assert [t["active"] for t in run["techniques"].values()] == ([True] if counted else [])
    assert run["signals"]["lost_techniques"] == ([] if counted else None)


# --- diverging ------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_ends_the_run_with_its_step(
    train: Train, tmp_path: Path
) -> None:
    with pytest.raises(Diverged) as told:
        train(
            "optimizer.lr=1e18",
            "schedule.kind=constant",
            "optimizer.clip_norm=0",
            "eval.every_steps=1000",
            "checkpoint.every_steps=1",
        )
    run = tmp_path / "runs" / "tiny"
    assert report(run)["status"] == "failed"
    assert report(run)["message"].startswith(told.value.message)
    assert report(run)["skipped_steps"] == 1 and report(run)["error"] == "Diverged"
    assert diagnose_run(run)[0].bottleneck == "instability"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert tells(told.value.message, "step", rows[-1]["step"], "not finite")
    assert rows[-1]["grad_norm"] is None
    saved = Saved(run / "checkpoints" / "latest")
    assert saved.values["step"] < rows[-1]["step"]


def test_a_validation_that_is_not_finite_saves_nothing_after_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.train import session

    whole = session.evaluate

    def bad(build: Any, *tokens: int) -> Any:
        found = whole(build, *tokens)
        late = build.loader.state()["step"] == 8
        return type(found)(float("nan"), float("nan"), 1, 1) if late else found

    monkeypatch.setattr(session, "evaluate", bad)
    with pytest.raises(Diverged, match=in_order("validation", "step", 8, "nan")):
        train("eval.every_steps=4")
    run = tmp_path / "runs" / "tiny"
    assert report(run)["status"] == "failed" and len(report(run)["val"]) == 1
    assert diagnose_run(run)[0].bottleneck == "instability"
    assert Saved(run / "checkpoints" / "latest").values["step"] == 4
    monkeypatch.undo()
    train("eval.every_steps=4", resume=True)
    assert_same_run(run, train("name=twin", "eval.every_steps=4"))


@pytest.mark.parametrize(
    ("after", "error", "said"),
    [
        (0, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "CUDA out of"),
        (6, RuntimeError("[at a.cpp:1] DefaultCPUAllocator: can't allocate memory: 9"), "can't "),
        (6, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED in cublasCreate"), "CUDA error"),
        (6, MemoryError(), "MemoryError"),
        (6, MemoryError("Unable to allocate 2. TiB for an array"), "Unable to allocate 2. TiB"),
        (6, OSError(errno.ENOMEM, "Cannot allocate memory"), ""),
    ],
)
def test_a_full_memory_is_told_written_down_and_named_by_the_doctor(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    error: Exception,
    said: str,
) -> None:
    step = training.step

    def full(build: Any, micros: Any, index: int, *rest: Any) -> Any:
        if index == after:
            raise error
        return step(build, micros, index, *rest)

    monkeypatch.setattr(training, "step", full)
    with pytest.raises(MemoryFull, match=f"fit in memory: {said}") as told:
        train("guard=false")
    assert told.value.exit_code == 3 and "batch.micro_sequences" in told.value.remedy.text
    run = tmp_path / "runs" / "tiny"
    written = report(run)
    assert (written["status"], written["error"]) == ("failed", "MemoryFull")
    assert written["steps"] == after and written["message"].startswith(told.value.message)
    assert written["wall_s"] >= sum(written["phase_s"].values())
    assert diagnose_run(run)[0].bottleneck == "memory capacity"


def no_thread_named(name: str, patch: pytest.MonkeyPatch) -> None:
    """As where a process may start no more of them."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refused)


@pytest.mark.parametrize("name", ["headrace-data", "checkpoint"])
def test_a_thread_that_cannot_start_is_told_and_written_down(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    no_thread_named(name, monkeypatch)
    with pytest.raises(NoMoreThreads, match=in_order("threads", "ulimit -u")) as told:
        train("guard=false")
    assert told.value.exit_code == 3
    for mends in ("raise that limit", "OMP_NUM_THREADS=1", "data.workers=0", "loader_workers"):
        assert mends in told.value.remedy.text
    written = report(tmp_path / "runs" / "tiny")
    assert (written["status"], written["error"]) == ("failed", "NoMoreThreads")
    monkeypatch.undo()
    assert_same_run(train("guard=false", resume=True), train("guard=false", "name=twin"))


def test_a_rank_that_ended_is_told_by_the_others(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(*_: Any) -> Any:
        raise RuntimeError("[../pair.cc:537] Connection closed by peer [127.0.0.1]:2. More\nmore")

    monkeypatch.setattr(training, "step", alone)
    with pytest.raises(RunError, match=r"\(Connection closed by .*127\.0\.0\.1\]:2\)") as told:
        train("guard=false")
    assert "--resume" in told.value.remedy.text
    assert report(tmp_path / "runs" / "tiny")["status"] == "failed"


def test_a_failed_run_that_goes_on_has_not_ended(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(error: BaseException) -> Callable[..., Any]:
        def end(*_: Any) -> Any:
            raise error

        return end

    monkeypatch.setattr(training, "step", ends(MemoryError()))
    with pytest.raises(MemoryFull):
        train("guard=false")
    monkeypatch.setattr(training, "step", ends(SystemExit(9)))  # as a kill, it writes nothing
    with pytest.raises(SystemExit):
        train("guard=false", resume=True)
    with pytest.raises(ConfigError, match=in_order("runs/tiny", "resumed", "not ended")):
        diagnose_run(tmp_path / "runs" / "tiny")


def test_diverging_at_the_command_line(zygote: Any, plan_file: Path) -> None:
    ended = zygote.run(
        plan_file.parent,
        "train",
        "tiny.toml",
        "optimizer.lr=1e18",
        "schedule.kind=constant",
        "optimizer.clip_norm=0",
    )
    assert ended.code == 1
    assert "is not finite" in ended.err and "name=tiny-again" in ended.err
    assert "Traceback" not in ended.err
    run = plan_file.parent / "runs" / "tiny"
    findings = json.loads((run / "findings.json").read_text())
    assert findings[0]["bottleneck"] == "instability"
    assert report(run)["narrowest"]["station"] == "instability" and report(run)["sample"] is None
    assert (run / "report.html").stat().st_size > 1000


# --- a full disk ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a disk of 1 MiB, or skip the test where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, leave_bytes: int = 0) -> Path:
    """Take up a disk but for some bytes."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        free = shutil.disk_usage(folder).free - leave_bytes
        file.write(bytes(free))
    return ballast


def assert_recovers(train: Train, run: Path, *overrides: str) -> None:
    """Nothing half written, step 4 whole, and a resume equals a run that had no trouble."""
    store = run / "checkpoints"
    assert not list(store.glob("*.tmp"))
    assert Saved(store / "latest").values["step"] == 4
    train(f"directory={run.parent}", *overrides, resume=True)
    train("name=twin", "goal.steps=4", *overrides)
    assert_same_run(run, train("name=twin", *overrides, resume=True))


def test_a_save_that_finds_too_little_space_ends_the_run(train: Train, small_disk: Path) -> None:
    where = f"directory={small_disk}"
    train(where, "goal.steps=4")
    ballast = fill(small_disk, leave_bytes=100_000)
    with pytest.raises(RunError, match=in_order("step-8", "free", "step-4 is intact")):
        train(where, resume=True)
    assert report(small_disk / "tiny")["status"] == "failed"
    ballast.unlink()
    assert_recovers(train, small_disk / "tiny")


@pytest.mark.parametrize("leave_bytes", [8_192, 65_536, 167_936])
def test_a_disk_that_fills_up_during_a_save(
    train: Train, small_disk: Path, monkeypatch: pytest.MonkeyPatch, leave_bytes: int
) -> None:
    where = f"directory={small_disk}"
    train(where, "goal.steps=4", "eval.every_steps=100")
    ballast = fill(small_disk, leave_bytes=leave_bytes)
    monkeypatch.setattr(Checkpoints, "_check_space", lambda *_: None)
    with pytest.raises(RunError, match=in_order(FULL, "step-4 is intact")):
        train(where, "eval.every_steps=100", resume=True)
    ballast.unlink()
    monkeypatch.undo()
    assert_recovers(train, small_disk / "tiny", "eval.every_steps=100")


def test_a_disk_too_full_for_a_row_of_metrics(train: Train, small_disk: Path) -> None:
    where = f"directory={small_disk}"
    train(where, "goal.steps=4")
    ballast = fill(small_disk)
    how = (where, "goal.steps=40", "checkpoint.every_steps=20", "eval.every_steps=20")
    with pytest.raises(RunError, match=in_order(small_disk / "tiny", FULL)):
        train(*how, resume=True)
    ballast.unlink()
    train(*how, resume=True)
    assert report(small_disk / "tiny")["status"] == "done"


def test_a_full_disk_at_the_command_line(zygote: Any, plan_file: Path, small_disk: Path) -> None:
    command = ("train", "tiny.toml", f"directory={small_disk}")
    assert zygote.run(plan_file.parent, *command, "goal.steps=4").code == 0
    fill(small_disk, leave_bytes=20_000)
    ended = zygote.run(plan_file.parent, *command, "goal.steps=12", "--resume")
    assert ended.code == 1 and "step-4 is intact" in ended.err, ended
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("size", ["8k", "24k", "40k"])
def test_a_disk_that_fills_up_while_data_is_prepared(
    zygote: Any, plan_file: Path, small_disk: Path, size: str
) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(small_disk)], check=True)
    command = ("data", "ingest", "tiny.toml", f"data.directory={small_disk}")
    ended = zygote.run(plan_file.parent, *command)
    assert ended.code == 1 and "the disk is full" in ended.err, ended
    assert "Traceback" not in ended.err
    assert all(path.suffix == ".lock" for path in small_disk.iterdir())
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    assert zygote.run(plan_file.parent, *command).code == 0


def test_a_write_that_fails_in_the_background_is_told_and_leaves_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = checkpoint.save_file, []

    def fails_once(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, FULL)
        save(tensors, path)

    train("goal.steps=4")
    monkeypatch.setattr(checkpoint, "save_file", fails_once)
    with pytest.raises(RunError, match=in_order(FULL, "step-4 is intact")):
        train(resume=True)
    assert_recovers(train, tmp_path / "runs" / "tiny")


# --- damaged data ---------------------------------------------------------------------------


@crossed(
    together=1,
    name=("tokens-00000.bin", "offsets.bin", "manifest.json"),
    how=("cut", "flip", "gone"),
)
def test_a_damaged_shard_is_named_before_training(
    train: Train, tiny_plan: Callable[..., Plan], tmp_path: Path, name: str, how: str
) -> None:
    own = f"data.directory={tmp_path / 'data'}"
    run = train(own)
    path = prepare(tiny_plan(own)).train[0].directory / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 8
    if how == "flip":
        path.write_bytes(raw)
    elif how == "cut":
        os.truncate(path, len(raw) // 2)
    else:
        path.unlink()
    with pytest.raises((ConfigError, RunError)) as told:
        train(own, "goal.steps=13", resume=True)
    assert str(path.parent) in str(told.value) and "headrace data ingest" in told.value.remedy.text
    Saved(run / "checkpoints" / "latest")
    shutil.rmtree(path.parent.parent)
    train(own, "goal.steps=13", resume=True)


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_folder_that_vanishes_is_told_at_the_next_step(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    whole, asked = Loader.step, []

    def step(loader: Loader, index: int) -> StepBatch:
        asked.append(index)
        if index == 5:
            run = tmp_path / "runs" / "tiny"
            run.rename(tmp_path / "elsewhere") if how == "moved" else shutil.rmtree(run)
        return whole(loader, index)

    monkeypatch.setattr(Loader, "step", step)
    with pytest.raises(RunError, match=r"runs/tiny is gone.*trained step 6") as told:
        train("guard=false", "checkpoint.every_steps=100")
    assert max(asked) == 5 and "--resume" in told.value.remedy.text


@pytest.mark.parametrize("how", ["removed", "a file"])
def test_checkpoints_that_vanish_are_told_at_the_next_step(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Not when the next one is saved, by the error of a disk."""
    whole, asked = Loader.step, []

    def step(loader: Loader, index: int) -> StepBatch:
        asked.append(index)
        if index == 5:
            saved = tmp_path / "runs" / "tiny" / "checkpoints"
            shutil.rmtree(saved)
            if how == "a file":
                saved.touch()
        return whole(loader, index)

    monkeypatch.setattr(Loader, "step", step)
    with pytest.raises(RunError, match=in_order("runs/tiny/checkpoints", "step", 6)) as told:
        train("guard=false", "checkpoint.every_steps=100")
    assert max(asked) == 5 and "--resume" in told.value.remedy.text
