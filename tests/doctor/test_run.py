"""The doctor reads a run, what a watch saved, or traces."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trace import Fault, healthy, record, tiny_kernels

import headrace
from headrace.core.errors import ConfigError, HeadraceError, RunError
from headrace.doctor.advice import Advice
from headrace.doctor.findings import PASSES, Kind
from headrace.doctor.run import diagnose
from headrace.doctor.trace.facts import kernel_lines, newest
from headrace.doctor.trace.host import _own, host_families
from headrace.doctor.trace.ranks import measure_traces
from headrace.doctor.words import describe
from headrace.doctor.words.answer import closing_verdict


def test_two_runs_are_not_judged_at_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with pytest.raises(ConfigError, match="one run is judged") as caught:
        diagnose([one, two])
    assert str(one) in caught.value.message and str(two) in caught.value.message
    assert caught.value.remedy.text == f"headrace doctor {one}"
    with pytest.raises(HeadraceError):
        diagnose([tmp_path / "one"])


def test_a_trace_is_told_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ConfigError, match="event"):
        diagnose([file])


def test_a_report_that_is_no_object_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").touch()
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(RunError, match=r"report\.json is damaged"):
        diagnose([tmp_path])


def test_nothing_found_is_said() -> None:
    assert closing_verdict(Advice(()))["sentence"] == "No step was measured."


def test_what_a_watch_saved_is_judged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with headrace.watch(model, optimizer, [torch.randn(2, 4)] * 12) as watched:
        for batch in watched.loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.002)
    file = tmp_path / "watched.json"
    watched.save(file)
    found = diagnose([file])
    assert {"forward and backward", "optimizer"} <= {f.bottleneck for f in found}
    with pytest.raises(ConfigError, match="one at a time"):
        diagnose([file, file])
    file.write_text(file.read_text().replace('"wasted_token_fraction"', '"else"'))
    with pytest.raises(RunError, match=r"watched\.json is damaged.*'wasted_token_fraction'"):
        diagnose([file])


def ran_on_a_gpu(run: Path, *, step_s: float = 0.1, **signals: Any) -> None:
    """Rewrite a run's report as if a GPU had taken a tenth of a second a step, or so long."""
    file = run / "report.json"
    report = json.loads(file.read_text())
    report["signals"] |= {"device": "cuda", "graph_breaks": 3, **signals}
    file.write_text(json.dumps(report))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    phases = {"input_s": 0.0, "forward_s": 0.03, "backward_s": 0.06, "optimizer_s": 0.01}
    for row in rows:
        row |= {**phases, "step_s": step_s, "slack_s": 0.0, "compile_s": 0.0, "loss": 5.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def traced(run: Path, fault: Fault, share: float = 0.0) -> dict[str, Any]:
    """Write the newest profiler window of a run, with a fault; return its entry of the report."""
    (run / "traces").mkdir(exist_ok=True)
    record(run / "traces" / "step-14.rank-0.json.gz", fault, share)
    return {"folder": "traces", "files": ["step-14.rank-0.json.gz"], "trouble": ""}


@pytest.fixture
def run(train: Callable[..., Path]) -> Path:
    return train("goal.steps=14", "eval.every_steps=50", "checkpoint.every_steps=0")


def test_a_trace_stands_for_what_signals_guess(run: Path) -> None:
    ran_on_a_gpu(run)
    guesses = [f for f in diagnose([run]) if f.bottleneck == "launch"]
    assert guesses and not any(guess.share for guess in guesses)
    ran_on_a_gpu(run, traces=traced(run, tiny_kernels, 0.3))
    first, *others = diagnose([run])
    assert first.bottleneck == "launch" and first.share == pytest.approx(0.3, rel=0.1)
    assert "3 graph breaks" in describe(first).evidence and "launch" not in {
        f.bottleneck for f in others
    }
    numbers = measure_traces(newest(run))
    assert 1 - numbers.share(lambda step: step.busy_s) == pytest.approx(0.3, rel=0.1)
    ran_on_a_gpu(run, step_s=(1 - 0.2) * numbers.step_s())  # the rest is the profiler's own
    first, *_ = diagnose([run])
    assert first.bottleneck == "launch" and first.share == pytest.approx(0.1 / 0.8, rel=0.15)
    ran_on_a_gpu(run, step_s=(1 - 0.3) * numbers.step_s())
    found = diagnose([run])
    assert "launch" not in {f.bottleneck for f in found}
    (phase,) = [f for f in found if f.bottleneck == PASSES]
    split = phase.facts["in_trace"]
    assert "elementwise" in dict(split.facts["families"])
    assert describe(split).evidence in describe(phase).evidence
    assert describe(phase).not_measured.startswith(describe(split).not_measured)


def test_traces_that_tell_nothing_are_told(run: Path) -> None:
    asked = {"folder": "traces", "files": [], "trouble": "RuntimeError: CUPTI is held"}
    ran_on_a_gpu(run, traces=asked)
    last = diagnose([run])[-1]
    assert last.kind is Kind.NO_TRACE and last.facts["why"] == asked["trouble"]
    told = traced(run, healthy)
    (run / "traces" / told["files"][0]).write_bytes(b"\x1f\x8bnothing")
    ran_on_a_gpu(run, traces=told)
    last = diagnose([run])[-1]
    assert last.kind is Kind.UNREADABLE_TRACE and told["files"][0] in last.facts["why"]


def test_a_clock_that_is_held_down(run: Path) -> None:
    gpu = {
        "samples": 50,
        "watched_s": 500.0,
        "sm_clock_hz": {"median": 1.2e9, "most": 1.98e9},
        "slowed": {"power limit": 0.9, "thermal slowdown": 0.6},
        "temperature_c": 91,
    }
    ran_on_a_gpu(run, slack_s=0.05, gpu=gpu)
    first, *_ = diagnose([run])
    assert first.kind is Kind.CLOCK_LIMITED and first.facts["why"] == "thermal slowdown"
    assert first.share == pytest.approx(1 - 1.2 / 1.98) and first.facts["limited_share"] == 0.6
    for harmless in ({"power limit": 1.0}, {"thermal slowdown": 0.1}):
        ran_on_a_gpu(run, slack_s=0.05, gpu={**gpu, "slowed": harmless})
        assert "kernel efficiency" not in {f.bottleneck for f in diagnose([run])}
    ran_on_a_gpu(run, slack_s=0.05, gpu={"samples": 0, "why_not": "no library"})
    (phase,) = [f for f in diagnose([run]) if f.bottleneck == PASSES]
    assert phase.facts["no_clock"] == "no library" in describe(phase).not_measured


def test_a_traced_run_on_a_cpu(train: Callable[..., Path]) -> None:
    run = train(
        "goal.steps=16",
        "eval.every_steps=50",
        "checkpoint.every_steps=0",
        "trace.every_steps=50",
        "trace.steps=2",
    )
    assert [p.name for p in (run / "traces").iterdir()] == ["step-14.rank-0.json.gz"]
    assert kernel_lines(run) == []  # there is no device
    (phase,) = [f for f in diagnose([run]) if f.bottleneck == PASSES]
    assert "products" in phase.facts["in_trace"].facts["families"]
    shares = host_families(run / "traces" / "step-14.rank-0.json.gz")
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0
    assert {"products", "attention", "elementwise"} <= shares.keys()
    (run / "traces" / "step-14.rank-0.json.gz").rename(run / "traces" / "trace.json.gz")
    (alone,) = diagnose([run / "traces" / "trace.json.gz"])
    assert alone.kind is Kind.TRACE_WITHOUT_DEVICE


def test_an_operations_own_time_is_less_its_childrens() -> None:
    spans = [
        (0.0, 10.0, "linear"),
        (1.0, 4.0, "t"),
        (2.0, 3.0, "view"),
        (4.0, 9.0, "mm"),
        (12.0, 13.0, "add"),
    ]
    own = {"linear": 2.0, "t": 2.0, "view": 1.0, "mm": 5.0, "add": 1.0}
    assert dict(_own(spans)) == own
