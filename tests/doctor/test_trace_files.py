"""What the doctor says to traces that it cannot judge, or cannot read."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from recorded import Recorder
from test_trace import healthy, record, slow_loader
from torch.utils.data import DataLoader

from headrace.core.errors import ConfigError
from headrace.doctor.trace import ABSTAINED, diagnose_trace
from headrace.doctor.trace.ranks import measure_traces


def test_a_trace_of_a_cpu_abstains(tmp_path: Path) -> None:
    """A real one, so that categories and marks are what torch writes."""
    model, path = torch.nn.Linear(8, 8), tmp_path / "cpu.json"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=9),
        acc_events=True,
    ) as profile:
        for batch in DataLoader(torch.ones(16, 8), batch_size=4):  # type: ignore[arg-type]
            model(batch).sum().item()
            profile.step()
    profile.export_chrome_trace(str(path))
    (only,) = diagnose_trace([path])
    assert only.bottleneck == ABSTAINED and only.share == 0 and "device" in only.not_measured
    assert measure_traces([path]).ranks[0].marks >= 3


def test_one_step_abstains(tmp_path: Path) -> None:
    (only,) = diagnose_trace([record(tmp_path / "t.json", healthy, steps=1)])
    assert only.bottleneck == ABSTAINED and "fewer than two steps" in only.sentence
    (two,) = diagnose_trace([record(tmp_path / "t.json", slow_loader, 0.3, steps=2)])
    assert two.bottleneck == "input" and two.confidence == "inferred"


def test_idle_without_launches_is_not_explained(tmp_path: Path) -> None:
    """The device's own marks are what is left of the steps."""
    path = record(tmp_path / "t.json", slow_loader, 0.3)
    whole = json.loads(path.read_text())
    device = [e for e in whole["traceEvents"] if e["cat"] == "kernel"]
    marks = [
        {**e, "cat": "gpu_user_annotation", "name": f"ProfilerStep#{n}"}
        for n, e in enumerate(device[::20])
    ]
    path.write_text(json.dumps([*device, *marks]))  # Chrome allows the bare list
    (only,) = diagnose_trace([path])
    assert only.bottleneck == ABSTAINED and only.share == pytest.approx(0.3, rel=0.1)
    assert "ProfilerActivity.CPU" in only.not_measured


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _cut_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes())[:-200])


def _other_json(path: Path) -> None:
    path.write_text('{"steps": [1, 2]}')


def _other_trace(path: Path) -> None:
    path.write_text('[{"ph": "X", "cat": "net", "name": "GET", "ts": 1, "dur": 2}]')


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (Path.unlink, "There is no trace"),
        (_cut, "is not whole JSON"),
        (_cut_gzip, "cannot be read"),
        (_other_json, "no list 'traceEvents'"),
        (_other_trace, "its categories: net"),
    ],
)
def test_a_broken_file_is_one_clear_error(harm, says: str, tmp_path: Path) -> None:
    path = record(tmp_path / "t.json", healthy, steps=2)
    harm(path)
    with pytest.raises(ConfigError, match=says) as caught:
        diagnose_trace([path])
    assert "t.json" in caught.value.message and caught.value.remedy


def test_known_faults_of_kineto_are_mended(tmp_path: Path) -> None:
    """A value that is missing, and backslashes that nobody escaped; older names of categories."""
    text = record(tmp_path / "t.json", slow_loader, 0.2).read_text()
    text = text.replace('"device": 0,', '"Process Group Description": , "device": 0,')
    text = text.replace('"cpu_op"', '"Operator"').replace('"user_annotation"', '"Operator"')
    text = text.replace('"kernel"', '"Kernel"').replace('"cuda_runtime"', '"Runtime"')
    bad = r'{"ph": "X", "cat": "python_function", "name": "C:\users\x", "ts": 1, "dur": 1}, '
    path = tmp_path / "old.json"
    path.write_text(text.replace('"traceEvents": [', '"traceEvents": [' + bad))
    (first,) = diagnose_trace([path])
    assert first.bottleneck == "input" and first.share == pytest.approx(0.2, rel=0.1)


def test_events_that_are_odd_are_left_out(tmp_path: Path) -> None:
    made = Recorder()
    for _ in range(3):
        slow_loader(made, 0.2)
        made.end_step()
    odd = [{"ph": "X", "cat": "kernel", "name": "k", "ts": "?"}, {"ph": "X", "cat": 3, "name": []}]
    made.events += [*odd, {"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    (first,) = diagnose_trace([made.write(tmp_path / "t.json")])
    assert first.bottleneck == "input"
