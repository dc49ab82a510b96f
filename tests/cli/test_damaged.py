"""Files that were damaged are one message with the file's name and what mends it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import RunError
from headrace.train.run_folder import RunFolder

DEEP = b"[" * 100_000
"""Lists in lists beyond what Python reads."""
WHOLE = "0" * 400
"""Digits of a number beyond any float."""
Call = Callable[..., Any]


@pytest.fixture
def run(workshop: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    folder = tmp_path / "runs" / "demo"
    shutil.copytree(workshop / "runs" / "demo", folder, symlinks=True)
    return folder


def rewritten(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Apply a change to a JSON file, or to each row of a file of JSON lines."""
    lines = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
    values = [json.loads(line) for line in lines]
    for value in values:
        change(value)
    file.write_text("".join(json.dumps(value) + "\n" for value in values))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (b"", "is empty"),
        (b"{", "is not whole JSON"),
        (b"\xff\xfe", "by its byte 0"),
        (b"no", "begins with 'no'"),
        (DEEP, "too deep"),
        (b"9" * 5000, "holds a NoneType"),
        (b"[]", "holds a list"),
        (b"null", "holds a NoneType"),
        (b"{}", "' is not in it"),
    ],
)
def test_a_damaged_report_is_named_and_written_anew(
    harm: bytes, said: str, run: Path, call: Call
) -> None:
    file = run / "report.json"
    file.write_bytes(harm)
    told = call("doctor", str(run), code=1)
    assert str(file) in told["error"] and said in told["error"]
    assert told["remedy"].startswith(f"mv {file} {file}.damaged")
    call("report", str(run), code=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("phase_s", {"input": "x"}),
        ("message", None),
        ("val", [None]),
        ("peak_memory_bytes", {"method": "tracker", "reserved": 0, "predicted": 0}),
        ("memory_lines", [{}]),
        ("signals", "x"),
    ],
)
def test_a_value_of_another_kind_is_told(key: str, value: Any, run: Path, call: Call) -> None:
    rewritten(run / "report.json", lambda report: report.update({key: value}))
    told = call("doctor", str(run), code=1)
    assert told["error"].startswith(f"{run / 'report.json'} is damaged, or of")
    assert told["remedy"].endswith(f"headrace train {run / 'plan.toml'} --resume")


def test_numbers_beyond_any_float_are_none(run: Path, call: Call) -> None:
    file = run / "report.json"
    rewritten(file, lambda report: report.update(tokens=10**400, dollars=float("inf")))
    assert call("doctor", str(run))
    call("report", str(run), code=0)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("step_s", None, "None"),
        ("input_s", [], "[]"),
        ("loss", "3.5", "'3.5'"),
        ("step_s", 10**400, f"1{WHOLE}"[:40]),
        ("session", {}, "{}"),
    ],
)
def test_a_row_with_no_number_is_named(
    key: str, value: Any, shown: str, run: Path, call: Call
) -> None:
    file = run / "metrics.jsonl"
    rewritten(file, lambda row: row.update({key: value}))
    told = call("doctor", str(run), code=1)
    assert told["error"].startswith(f"{file} is damaged")
    assert f"{key} of row 1 is {shown}" in told["error"]
    mend, then = told["remedy"].split("; ")
    assert mend == f"mv {file} {file}.damaged" and then == f"headrace doctor {run}"
    file.rename(f"{file}.damaged")
    assert call("doctor", str(run))


@pytest.mark.parametrize("harm", [DEEP + b"\n{}", b"{}\n\xff\n", b"[]\n{}\n"])
def test_rows_that_are_none_are_told(harm: bytes, run: Path, call: Call) -> None:
    file = run / "metrics.jsonl"
    file.write_bytes(harm)
    assert str(file) in (told := call("doctor", str(run), code=1))["error"]
    assert told["remedy"].startswith(f"mv {file} {file}.damaged")
    assert str(file) in call("report", str(run), code=2)["error"]
    call("plan", str(run / "plan.toml"), "--after", str(run))  # by report.json


def test_an_environment_that_is_no_object_is_told(run: Path, call: Call) -> None:
    (run / "environment.json").write_text('"cuda"')
    with pytest.raises(RunError, match=r"environment\.json is damaged.*\bstr\b"):
        RunFolder(run).read("environment")
    (run / "environment.json").write_bytes(DEEP)
    told = call("report", str(run), code=2)["error"]
    assert str(run / "environment.json") in told and "too deep" in told


@pytest.mark.parametrize("harm", [b"", DEEP, b'{"tokens": [], "val": []}', b'{"val": 3}'])
def test_a_curve_is_not_read_off_a_damaged_report(harm: bytes, run: Path, call: Call) -> None:
    (run / "report.json").write_bytes(harm)
    told = call("plan", str(run / "plan.toml"), "--after", str(run), code=2)
    assert str(run) in told["error"] and told["remedy"]


def test_a_damaged_plan_of_a_run_is_named(run: Path, call: Call) -> None:
    (run / "plan.toml").write_text("[goal]\n")
    told = call("eval", str(run), code=2)
    assert told["error"].startswith(f"{run / 'plan.toml'}: ") and "no goal" in told["error"]
    shown, recorded = run / "plan.toml", run / ".plan.toml"
    assert told["remedy"] == f"cp {recorded} {shown}"


def test_a_finding_that_changes_nothing_is_damaged(run: Path, call: Call) -> None:
    remedy = {
        "change": [""],
        "what": "",
        "gain": None,
        "memory_bytes": 0,
        "costs": "",
        "equality": "exact",
    }
    for wrong in ({}, {"change": ["+lora"], "equality": "else"}):
        finding = {"sentence": "", "remedies": [remedy | wrong]}
        (run / "findings.json").write_text(json.dumps([finding]))
        assert "findings.json is damaged" in call("report", str(run), code=2)["error"]


def test_a_file_of_a_run_is_not_moved(run: Path, call: Call) -> None:
    for name in ("metrics.jsonl", "report.html", "findings.json", "report.json"):
        told = call("doctor", str(run / name), code=2)
        assert str(run / name) in told["error"] and told["remedy"] == f"headrace doctor {run}"


def test_what_is_empty_is_no_trace(tmp_path: Path, call: Call) -> None:
    (tmp_path / "trace").touch()
    assert call("doctor", str(tmp_path / "trace"), code=2)["error"].endswith("trace is empty")
    for nothing in (tmp_path, Path("/dev/null")):
        assert "mv" not in call("doctor", str(nothing), code=2)["remedy"]


@pytest.mark.parametrize(
    "saved",
    [
        [{"watched": True}],
        {"watched": True},
        {"watched": True, "rows": 3},
        {"watched": True, "rows": [{"step_s": "x"}]},
    ],
)
def test_a_damaged_watch_is_saved_again(saved: Any, tmp_path: Path, call: Call) -> None:
    file = tmp_path / "watched.json"
    file.write_text(json.dumps(saved))
    told = call("doctor", str(file), code=1)
    assert f"{file} is damaged" in told["error"]
    assert told["remedy"] == f"watched.save({str(file)!r}) again"


def test_a_mark_before_the_text_of_a_plan_is_read_over(
    tmp_path: Path, run: Path, call: Call
) -> None:
    file = tmp_path / "plan.toml"
    file.write_bytes(b"\xef\xbb\xbf" + (run / "plan.toml").read_bytes())
    assert call("explain", str(file))


def test_a_cpu_is_no_gpu_that_is_elsewhere(run: Path, call: Call) -> None:
    plan = str(run / "plan.toml")
    told = call("plan", plan, "--device-name", "cpu", code=2)
    assert "of a GPU" in told["error"] and told["remedy"].startswith("device=cpu")


@pytest.mark.parametrize("minutes", ["nan", "-1"])
def test_an_ablation_is_given_time(minutes: str, run: Path, call: Call) -> None:
    plan = str(run / "plan.toml")
    told = call("ablate", plan, "--with", "selective_checkpoint", "--minutes", minutes, code=2)
    assert f"{float(minutes)} minutes" in told["error"] and told["remedy"] == "--minutes 30"


def test_more_layers_than_any_model_has_are_refused(run: Path, call: Call) -> None:
    told = call("plan", str(run / "plan.toml"), f"model.layers={10**12}", code=2)
    assert told["remedy"] == "model.layers=100000"


def test_a_family_is_a_name(run: Path, call: Call) -> None:
    told = call("plan", str(run / "plan.toml"), "model.family=[]", code=2)
    assert "no model family []" in told["error"]
