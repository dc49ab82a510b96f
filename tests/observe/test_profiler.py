"""Test profiler windows: when they run, what they leave, and that no run suffers from them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from facts import tells
from tiny import metrics, report

from headrace.doctor.observation import observe, read_rows
from headrace.doctor.trace.facts import newest
from headrace.doctor.trace.file import read_trace
from headrace.doctor.trace.ranks import measure_traces
from headrace.observe import profiler
from headrace.observe.profiler import FIRST, KEPT, ProfilerWindows, traces

CPU = torch.device("cpu")


def steps(made: ProfilerWindows, count: int, *, first: int = 1, compiled: int = 0) -> list[int]:
    """Run steps; return those that ran in a profiler window, or right after one."""
    weight, found = torch.ones(4, 4, requires_grad=True), []
    for step in range(first, first + count):
        with made.named("next_batch"):
            x = torch.ones(4, 4)
        (x @ weight).sum().backward()
        if made.traced:
            found.append(step)
        made.advance(step, steady=step != compiled)
        made.begin()
    made.close()
    return found


def test_windows_come_in_their_rhythm_and_the_newest_stay(tmp_path: Path) -> None:
    made = ProfilerWindows(tmp_path / "t", CPU, every_steps=20, steps=2)
    assert made.length == 4
    ran = steps(made, 85)
    expected = [s for begun in (FIRST, 20, 40, 60, 80) for s in range(begun + 1, begun + 6)]
    assert ran == expected
    names = [f"step-{begun + 4}.rank-0.json.gz" for begun in (40, 60, 80)]
    assert len(names) == KEPT and made.report() == {"folder": "t", "files": names, "trouble": ""}
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == names  # nothing else is left
    trace = read_trace(tmp_path / "t" / names[-1])
    assert [mark.name for mark in trace.steps] == [f"ProfilerStep#{n}" for n in (1, 2, 3)]
    assert len(trace.loads) == 3  # the warm-up is not recorded


def test_a_window_that_something_interrupted_is_tried_again(tmp_path: Path) -> None:
    made = ProfilerWindows(tmp_path, CPU, every_steps=None, steps=2)
    ran = steps(made, 40, compiled=12)
    assert ran == [11, 12, 13, 14, 15, 16, 17] and [s for s, _ in traces(tmp_path)] == [16]
    made = ProfilerWindows(tmp_path, CPU, every_steps=None, steps=2)
    for step in range(1, 15):
        made.advance(step)
        made.begin(room=3)  # an evaluation comes too early
    assert not made.on and "no 4 steady steps" in str(made.report())
    assert ProfilerWindows(tmp_path, CPU, every_steps=0).report() is None


def test_one_of_two_loops_waits_for_the_window_of_the_other(tmp_path: Path) -> None:
    """A second profiler takes the first one down, and the process with it."""
    both = [ProfilerWindows(tmp_path / name, CPU, every_steps=None, steps=2) for name in ("a", "b")]
    for step in range(1, 30):
        for made in both:
            (torch.ones(4, 4, requires_grad=True) @ torch.ones(4, 4)).sum().backward()
            made.advance(step)
            made.begin()
        assert not all(made.on for made in both)
    for made, last in zip(both, (14, 18), strict=True):
        made.close()
        assert [step for step, _ in traces(made.folder)] == [last] and not made.trouble


def test_a_profiler_of_the_users_own_keeps_what_it_recorded(tmp_path: Path) -> None:
    told: list[str] = []
    made = ProfilerWindows(tmp_path, CPU, every_steps=None, warn=told.append)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        steps(made, 30)
    assert len(own.events()) > 30 and not traces(tmp_path)
    assert len(told) == 1 and tells(told[0], "traces", "RuntimeError: another profiler")


@pytest.mark.parametrize("place", ["start", "step", "export_chrome_trace"])
def test_a_profiler_that_fails_is_told_once(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUPTI is held\nby another profiler")

    monkeypatch.setattr(profiler.profile, place, fail)
    said: list[str] = []
    made = ProfilerWindows(tmp_path, CPU, every_steps=15, steps=2, warn=said.append)
    steps(made, 40)
    assert len(said) == 1 and tells(said[0], "traces", "RuntimeError: CUPTI is held")
    assert made.report() == {
        "folder": tmp_path.name,
        "files": [],
        "trouble": "RuntimeError: CUPTI is held",
    }
    assert not list(tmp_path.iterdir())


def test_a_trace_too_large_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MOST_BYTES", 10)
    made = ProfilerWindows(tmp_path, CPU, every_steps=None)
    steps(made, 20)
    assert "takes 0 MiB" in made.trouble and not list(tmp_path.iterdir())
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(profiler, "publish", full)
    made = ProfilerWindows(tmp_path, CPU, every_steps=None)
    steps(made, 20)
    assert "No space left" in made.trouble and not list(tmp_path.iterdir())


def test_a_run_leaves_its_steady_speed_alone(train: Callable[..., Path]) -> None:
    run = train(
        "trace.every_steps=100",
        "trace.steps=2",
        "goal.steps=20",
        "eval.every_steps=5",
        "checkpoint.every_steps=0",
    )
    told, rows = report(run), metrics(run)
    assert told["signals"]["traces"]["files"] == ["step-14.rank-0.json.gz"]
    assert [row["step"] for row in rows if row.get("traced")] == [11, 12, 13, 14, 15]
    assert told["phase_s"]["trace"] > 0
    steady = observe(told, read_rows(run / "metrics.jsonl"))
    assert steady.steps == 20 - 2 - 5
    rates = sorted(r["tokens_per_s"] for r in rows[1:] if "traced" not in r and not r["compile_s"])
    assert told["steady_tokens_per_s"] == pytest.approx(sum(rates[6:8]) / 2)
    json.loads((run / "report.json").read_text())
    assert len(read_trace(run / "traces" / "step-14.rank-0.json.gz").steps) == 3


def test_runs_are_not_traced_unless_asked(train: Callable[..., Path]) -> None:
    run = train("goal.steps=14", "eval.every_steps=50")
    assert report(run)["signals"]["traces"] is None and not (run / "traces").exists()
    assert "trace" not in report(run)["phase_s"]
    assert not any("traced" in row for row in metrics(run))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_is_seen(tmp_path: Path) -> None:
    """Large matmuls in bf16, adds of a fixed size, and a wait for the device are seen."""
    device = torch.device("cuda", 0)
    x, w = (torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))
    made = ProfilerWindows(tmp_path / "traces", device, every_steps=None)
    for step in range(1, 25):
        for _ in range(20):
            y = x @ w
        z = y + x
        z.sum().item()
        made.advance(step)
        made.begin()
    made.close()
    assert made.report() == {
        "folder": "traces",
        "files": ["step-15.rank-0.json.gz"],
        "trouble": "",
    }
    numbers = measure_traces(newest(tmp_path))
    (rank,) = numbers.ranks
    assert len(rank.steps) == 3 and rank.roof is not None and numbers.idle("sync") > 0
    assert sum(row.share for row in rank.kernels if row.family == "products") > 0.5
    assert 0.5 < rank.roof.matmuls_best_s / rank.roof.matmuls_s < 1.5
    bounds = {row.family: row.bound for row in rank.kernels if row.bound}
    assert bounds["products"] == "compute" and bounds["elementwise"] == "bandwidth"
