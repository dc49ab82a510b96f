"""Runs, watched loops and traces that the doctor refuses: each remedy ends in a verdict."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shell import Case

import headrace

MAKE = Callable[[Path], Any]
DEEP = "[" * 100_000
"""Lists in lists beyond what Python reads."""


def rewritten(name: str, change: Callable[[dict[str, Any]], Any]) -> MAKE:
    """Change the object of a file of the run, or each of its rows."""

    def make(run: Path) -> None:
        file = run / name
        lines = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
        values = [json.loads(line) for line in lines]
        for value in values:
            change(value)
        file.write_text("".join(json.dumps(value) + "\n" for value in values))

    return make


def spoiled(name: str, text: str) -> MAKE:
    """Write something else into a file of the run."""
    return lambda run: (run / name).write_text(text)


def a_folder(name: str) -> MAKE:
    """Let a folder stand where a file of the run is looked for."""
    return lambda run: ((run / name).unlink(), (run / name).mkdir())


def watch(_: Path) -> None:
    """Watch a short loop, and save what was read as a user does."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with headrace.watch(model, optimizer, [torch.randn(2, 4)] * 12) as watched:
        for batch in watched.loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    watched.save("loop.json")


def watched_and(change: Callable[[Path], Any]) -> MAKE:
    """Return a function that watches a short loop, saves it, and spoils the saved file."""
    return lambda run: (watch(run), change(Path("loop.json")))


def cut(file: Path) -> None:
    """Let only the beginning of a file be there."""
    file.write_text(file.read_text()[:400])


def rank(number: int | None, name: str) -> None:
    """Write a trace of one rank: some kernels, and what launched them."""
    events = [
        {
            "ph": "X",
            "cat": cat,
            "name": what,
            "pid": pid,
            "tid": 7,
            "ts": ts,
            "dur": 50.0,
            "args": {"correlation": at},
        }
        for at in range(1, 9)
        for cat, what, pid, ts in (
            ("cuda_runtime", "cudaLaunchKernel", 0, 100.0 * at),
            ("kernel", "gemm", 1, 100.0 * at + 20),
        )
    ]
    told = {} if number is None else {"distributedInfo": {"rank": number, "world_size": 2}}
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(json.dumps({"traceEvents": events, **told}))


def traces(*ranks: tuple[int | None, str]) -> MAKE:
    """Write several traces."""
    return lambda run: [rank(number, name) for number, name in ranks]


def record(remedy: str) -> None:
    """Run a loop under the profiler that a remedy names, word for word."""
    profiler = eval(remedy, {"torch": torch})
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profiler:
        for _ in range(8):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            profiler.step()


PROFILER = (
    "torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=2, active=5), "
    "on_trace_ready=torch.profiler.tensorboard_trace_handler('traces'))"
)
AROUND = f"{PROFILER} around the loop, with its step() behind each step; then "
RECORDS = {AROUND: lambda run: record(PROFILER)}
"""What records a trace anew, as the remedy has it."""


def recorded_again(before: MAKE, name: str = "t.json") -> Case:
    """A trace that cannot be read, of which the remedy is to record it."""
    return Case(f"doctor {name}", before, does=RECORDS, then="doctor traces/*.json")


SAVES = {"watched.save('loop.json') again": watch}
"""What mends what a watch saved."""
RUNS = {
    "doctor/run:examined#1": Case(
        "doctor runs/demo runs/pair",
        lambda run: shutil.copytree(run, run.with_name("pair"), symlinks=True),
    ),
    "doctor/run:check_report#1": Case(
        "doctor demo", rewritten("report.json", lambda r: r.update(format=9)), whole=True
    ),
    "doctor/run:check_report#2": Case(
        "doctor demo",
        rewritten("report.json", lambda r: r["phase_s"].update(input=None)),
        whole=True,
    ),
    "doctor/run:check_report#3": Case(
        "doctor demo",
        rewritten("report.json", lambda r: r["phase_s"].update(forward=-3.0)),
        whole=True,
    ),
    "doctor/run:_numbers#1": Case(
        "doctor loop.json",
        watched_and(
            lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | {"rows": [3]}))
        ),
        does=SAVES,
    ),
    "doctor/run:_numbers#2": Case(
        "doctor demo", rewritten("metrics.jsonl", lambda row: row.update(loss="low")), whole=True
    ),
    "doctor/run:_numbers#3": Case(
        "doctor demo", rewritten("metrics.jsonl", lambda row: row.update(step_s=-1)), whole=True
    ),
    "doctor/run:_judged#1": Case(
        "doctor demo", rewritten("report.json", lambda r: r.pop("memory_lines")), whole=True
    ),
    "doctor/observation:read_rows#1": Case("doctor demo", a_folder("metrics.jsonl"), whole=True),
    "doctor/observation:read_rows#2": Case(
        "doctor demo", spoiled("metrics.jsonl", f"{DEEP}\n{{}}\n"), whole=True
    ),
    "doctor/observation:read_rows#3": Case(
        "doctor demo", spoiled("metrics.jsonl", '{"step": 1\n{}\n'), whole=True
    ),
    "train/run_folder:RunFolder.read#1": Case("doctor demo", a_folder("report.json"), whole=True),
}
"""Files of a run."""
LOOPS = {
    "doctor/run:read_watched#1": Case("doctor loop.json", watched_and(cut), does=SAVES),
    "doctor/run:examined#2": Case(
        "doctor loop.json t.json", lambda run: (watch(run), rank(None, "t.json"))
    ),
    "doctor/trace/file:read_trace#1": recorded_again(spoiled("../../t.json", '{"traceEvents": [')),
    "doctor/trace/file:read_trace#2": recorded_again(spoiled("../../t.json", "{}")),
    "doctor/trace/file:read_trace#3": recorded_again(
        spoiled("../../t.json", '{"traceEvents": [{"ph": "X", "cat": "x", "name": "y"}]}')
    ),
    "doctor/trace/file:text_of#1": Case("doctor trace_rank1.json", traces((0, "trace_rank0.json"))),
    "doctor/trace/file:text_of#2": recorded_again(lambda run: None),
    "doctor/trace/file:text_of#3": recorded_again(
        lambda run: Path("t.json.gz").write_bytes(b"\x1f\x8bno gzip"), "t.json.gz"
    ),
    "doctor/trace/ranks:measure_traces#1": Case(
        "doctor a.json a.json", traces((0, "a.json"), (1, "b.json"))
    ),
    "doctor/trace/ranks:measure_traces#2": Case(
        "doctor a.json b.json old.json", traces((0, "old.json"), (0, "a.json"), (1, "b.json"))
    ),
}
"""What a watch saved, and traces."""


BESIDE = {
    "train/track:_opened#1": Case(
        "train runs/demo/plan.toml --resume 'track.to=[\"tensorboard\"]' goal.steps=7",
        spoiled("tensorboard", ""),
        prose={"set tensorboard up as its documentation says": "no command"},
    ),
    "train/track:open_trackers#1": Case(
        "train {tiny} 'track.to=[\"mlflow\"]' goal.steps=1",
        prose={"pip install 'headrace[track]'": "it is not installed here"},
    ),
}
"""Receipts and loggers."""
AFTER = {
    "predict/calibration:check_device#1": Case(
        "plan demo --after runs/demo --device-name H200", lambda run: None
    ),
    "predict/prediction:calibrated#1": Case("plan {tiny} --after demo --sweep", lambda run: None),
    "predict/calibration:MeasuredPlan._of_report#1": Case(
        "plan demo --after runs/demo --device-name H200",
        lambda run: (
            rewritten("environment.json", lambda e: e.update(device="cuda", device_name="H200"))(
                run
            ),
            rewritten("metrics.jsonl", lambda row: row.clear())(run),
            rewritten("report.json", lambda r: r.update(steady_tokens_per_s=None))(run),
        ),
        fills={"headrace train demo": "headrace train {tiny} name=more"},
    ),
    "predict/calibration:Calibration.of#1": Case(
        "plan demo --after runs/demo --device-name H200",
        lambda run: (
            rewritten("environment.json", lambda e: e.update(device="cuda", device_name="H200"))(
                run
            ),
            rewritten("metrics.jsonl", lambda row: row.update(step_s=1e6))(run),
        ),
    ),
    "predict/ending:Curve.of#1": Case(
        "plan demo --after runs/demo --device-name H200 goal.bits_per_byte=2",
        lambda run: (
            rewritten("environment.json", lambda e: e.update(device="cuda", device_name="H200"))(
                run
            ),
            rewritten("metrics.jsonl", lambda row: row.update(step_s=0.01))(run),  # as is foreseen
            (run / "report.json").unlink(),
        ),
        fills={"headrace train demo": "headrace train {tiny} name=more"},
    ),
    "report/compare:compare_reports#1": Case(f"report{' demo' * 9}", lambda run: None),
}
"""Runs that tell nothing of a plan, and more runs than a page has room for."""
DOCTOR = RUNS | LOOPS | BESIDE | AFTER
