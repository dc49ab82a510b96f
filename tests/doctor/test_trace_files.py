"""The doctor refuses traces that it cannot read, and abstains where it cannot judge."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Recorder
from test_trace import healthy, item_in_every_layer, record, slow_loader
from torch.utils.data import DataLoader

from headrace.core.errors import ConfigError
from headrace.doctor.findings import ABSTAINED, Kind
from headrace.doctor.trace import diagnose_trace
from headrace.doctor.trace.host import host_families
from headrace.doctor.trace.ranks import measure_traces
from headrace.doctor.words import describe


def test_a_trace_of_a_cpu_abstains(tmp_path: Path) -> None:
    """Check that a trace that torch records on a CPU gives no verdict, for it has no device."""
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
    assert only.kind is Kind.TRACE_WITHOUT_DEVICE and only.abstains and only.share == 0
    assert measure_traces([path]).ranks[0].marks >= 3


def test_one_step_abstains(tmp_path: Path) -> None:
    (only,) = diagnose_trace([record(tmp_path / "t.json", healthy, steps=1)])
    assert only.kind is Kind.TRACE_WITHOUT_STEPS and only.abstains
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
    assert only.kind is Kind.TRACE_UNEXPLAINED and only.abstains
    assert only.share == pytest.approx(0.3, rel=0.1)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _cut_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes())[:-200])


def _other_json(path: Path) -> None:
    path.write_text('{"steps": [1, 2]}')


def _other_trace(path: Path) -> None:
    path.write_text('[{"ph": "X", "cat": "net", "name": "GET", "ts": 1, "dur": 2}]')


def _other_categories(path: Path) -> None:
    event = {"ph": "X", "name": "GET", "ts": 1, "dur": 2}
    names = ["!\ud800\x1b[31m", "#" * 99, *map(str, range(20))]
    path.write_text(json.dumps([{**event, "cat": name} for name in names]))


def _begin_and_end(path: Path) -> None:
    path.write_text('[{"ph": "B", "cat": "kernel", "name": "GET", "ts": 1}]')


def _empty(path: Path) -> None:
    path.write_text(" \n")


def _page(path: Path) -> None:
    path.write_text("<html></html>")


def _binary(path: Path) -> None:
    path.write_bytes(bytes(range(255, 0, -1)))


def _deep(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


def _many_digits(path: Path) -> None:
    path.write_text('{"traceEvents": [' + "9" * 5000 + "]}")


def _no_gzip(path: Path) -> None:
    path.write_bytes(b"\x1f\x8bnothing")


def _in_a_run(path: Path) -> None:
    _other_json(path)
    (path.parent / "plan.toml").touch()


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (Path.unlink, "There is no trace"),
        (_cut, "is not whole JSON"),
        (_cut_gzip, "cannot be read"),
        (_other_json, "no list 'traceEvents'"),
        (_other_trace, "its categories: net"),
        (_other_categories, r"categories: !\?\?\[31m, #{57}\.\.\., 0, .* and 14 more"),
        (_begin_and_end, "no event of torch.profiler .ph 'X'.; its categories: none"),
        (_empty, "is empty"),
        (_page, "is no JSON: it begins with '<html>"),
        (_binary, "is no JSON: it begins with"),
        (_deep, "lists in lists too deep"),
        (_many_digits, "a number of more digits than are read"),
        (_no_gzip, "cannot be read"),
        (_in_a_run, "no list 'traceEvents'"),
    ],
)
def test_a_broken_file_is_one_clear_error(harm, says: str, tmp_path: Path) -> None:
    path = record(tmp_path / "t.json", healthy, steps=2)
    harm(path)
    with pytest.raises(ConfigError, match=says) as caught:
        diagnose_trace([path])
    assert "t.json" in caught.value.message and caught.value.message.isprintable()
    right = str(tmp_path) if harm is _in_a_run else "record|with|give|torch.profiler"
    assert re.search(right, caught.value.remedy.text)


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


NO_TIMES = [
    {"dur": -1},
    {"dur": 1e308},
    {"dur": float("inf")},
    {"dur": float("nan")},
    {"dur": "12"},
    {"dur": None},
    {"dur": True},
    {"dur": [1]},
    {"dur": 10**400},
    {"ts": 1e308},
    {"ts": float("nan")},
    {"ts": float("-inf")},
    {"ts": 10**400},
    {"ts": -1e12},
    {"ts": 5e12},
]


@pytest.mark.parametrize("new", NO_TIMES, ids=str)
def test_times_that_no_clock_tells_are_left_out_and_told(
    new: dict[str, Any], tmp_path: Path
) -> None:
    """Without one kernel the rest says the same, less surely; without all there is no verdict."""
    whole = json.loads(record(tmp_path / "t.json", slow_loader, 0.3).read_text())
    kernels = [e for e in whole["traceEvents"] if e["cat"] == "kernel"]
    kernels[len(kernels) // 2].update(new)
    (tmp_path / "one.json").write_text(json.dumps(whole))
    (one,) = diagnose_trace([tmp_path / "one.json"])
    assert one.bottleneck == "input" and one.share == pytest.approx(0.3, rel=0.1)
    assert one.confidence == "inferred" and one.facts["left_out"] == (1,)
    for kernel in kernels:
        kernel.update(new)
    (tmp_path / "all.json").write_text(json.dumps(whole))
    (none,) = diagnose_trace([tmp_path / "all.json"])
    assert none.kind is Kind.TRACE_WITHOUT_TIMES and none.abstains and none.share == 0
    assert none.facts["left_out"] == (len(kernels),)


@pytest.mark.parametrize("odd", [[1], {"a": 1}, None, float("nan"), "7", 10**400], ids=str)
def test_odd_names_of_streams_devices_and_ranks_are_names(odd: Any, tmp_path: Path) -> None:
    made = Recorder()
    for _ in range(4):
        slow_loader(made, 0.2)
        made.end_step()
    for event in made.events:
        event["pid"] = event["tid"] = odd
        for key in ("stream", "device", "Process Group Ranks"):
            event["args"][key] = odd
    cards, told = [{"name": odd, "computeMajor": odd}, odd], {"rank": odd, "world_size": odd}
    path = made.write(tmp_path / "t.json", deviceProperties=cards, distributedInfo=told)
    (first,) = diagnose_trace([path])
    assert first.bottleneck == "input" and first.share == pytest.approx(0.2, rel=0.1)
    assert measure_traces([path]).ranks[0].rank == 0


def test_what_a_finding_repeats_of_a_trace_is_short_and_printable(tmp_path: Path) -> None:
    path = record(tmp_path / f"a{chr(0xDCFF)}.json", item_in_every_layer, 0.3)
    whole = json.loads(path.read_text())
    for event in whole["traceEvents"]:
        if "Synchronize" in event["name"]:
            event["name"] = f"{chr(0xD800)}{chr(27)}[31m{'x' * 9999}Synchronize"
        if "Profiler" in event["name"]:
            event["name"] += "9" * 5000 if event["name"].endswith("3") else ""
    path.write_text(json.dumps(whole))
    found = diagnose_trace([path, record(tmp_path / "cpu.json", healthy, steps=0)])
    words = map(describe, found)
    told = [f"{w.sentence} {w.evidence} {w.not_measured}" for w in words]
    assert found[0].bottleneck == "launch" and all(map(str.isprintable, told))
    assert max(map(len, told)) < 999


def test_a_mark_before_the_text_is_read_over(tmp_path: Path) -> None:
    path = record(tmp_path / "t.json", slow_loader, 0.2)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert diagnose_trace([path])[0].bottleneck == "input"


def test_files_that_tell_no_rank_take_the_numbers_that_are_left(tmp_path: Path) -> None:
    """Check that traces without a rank take the free numbers, and that no file may come twice."""
    paths = []
    for name, rank in (("named.json", 1), ("a.json", None), ("b.json", None)):
        made = Recorder(rank, 3)
        for _ in range(4):
            slow_loader(made, 0.2)
            made.end_step()
        paths.append(made.write(tmp_path / name))
    assert [r.rank for r in measure_traces(paths).ranks] == [1, 0, 2]
    assert [r.rank for r in measure_traces(paths[::-1]).ranks] == [0, 2, 1]
    with pytest.raises(ConfigError, match="given twice"):
        measure_traces([paths[1], paths[1]])


def test_a_rank_without_a_device_is_told(tmp_path: Path) -> None:
    made = Recorder(1, 2)
    made.away(5, "aten::mm", "cpu_op")
    paths = [record(tmp_path / "rank0.json", slow_loader, 0.2), made.write(tmp_path / "cpu.json")]
    (first,) = diagnose_trace(paths)
    assert first.bottleneck == "input" and first.facts["without_steps"] == ("cpu.json",)


@pytest.mark.parametrize("odd", [float("nan"), -1, 1e308, "5", 10**400], ids=str)
def test_the_split_of_a_cpu_stands_on_times_alone(odd: Any, tmp_path: Path) -> None:
    mm = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": [1], "ts": 0, "dur": 10}
    add = {**mm, "name": "aten::add", "ts": 5, "dur": 15}  # another tool's, half inside
    path = tmp_path / "t.json"
    path.write_text(json.dumps([mm, add]))
    assert host_families(path) == pytest.approx({"elementwise": 0.75, "products": 0.25})
    path.write_text(json.dumps([mm, {**add, "dur": odd}]))
    assert host_families(path) == {} and diagnose_trace([path])[0].bottleneck == ABSTAINED
