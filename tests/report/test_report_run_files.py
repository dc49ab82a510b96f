"""Reading a run's folder: what is forgiven, and how the rest is told."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.observe import REPORT_FORMAT
from headrace.report.run_files import read_run

MakeRun = Callable[..., Path]


def refused(directory: Path) -> ConfigError:
    """The error that reading `directory` raises."""
    with pytest.raises(ConfigError) as caught:
        read_run(directory)
    return caught.value


def test_a_folder_above_a_run_names_the_run(make_run: MakeRun) -> None:
    run = make_run()
    error = refused(run.parent)
    assert str(run.parent) in error.message and "no report.json" in error.message
    assert "(found: demo)" in error.message
    assert error.remedy.text == f"headrace report {run}"


def test_a_folder_without_runs_tells_what_it_holds(tmp_path: Path) -> None:
    assert "(found: nothing)" in refused(tmp_path).message
    names = [f"file{number}" for number in range(8)]
    for name in names:
        (tmp_path / name).touch()
    message = refused(tmp_path).message
    assert ", ".join(names[:6]) in message and "2 more" in message
    assert names[6] not in message


def test_a_run_that_has_not_ended_says_how_to_resume(make_run: MakeRun) -> None:
    run = make_run()
    (run / "report.json").unlink()
    error = refused(run)
    assert "metrics.jsonl" in error.message and "has not ended" in error.message
    assert error.remedy.text == f"headrace train {run / 'plan.toml'} --resume"


def test_a_name_that_does_not_exist_gets_the_nearest(make_run: MakeRun) -> None:
    run = make_run("baseline")
    error = refused(run.parent / "baselin")
    assert "does not exist" in error.message
    assert error.remedy.text == f"headrace report {run}"


def test_a_file_is_not_a_run(make_run: MakeRun) -> None:
    run = make_run()
    error = refused(run / "plan.toml")
    assert "is a file" in error.message and error.remedy.text == f"headrace report {run}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ("is empty",)),
        ('{"name": "a",\n', ("is not whole JSON", "line 2")),
        ("[1]", ("holds a list",)),
    ],
)
def test_a_broken_report_tells_the_place(
    make_run: MakeRun, text: str, told: tuple[str, ...]
) -> None:
    run = make_run()
    (file := run / "report.json").write_text(text)
    error = refused(run)
    assert error.message.startswith(f"{file} ") and all(one in error.message for one in told)
    assert error.remedy.text.startswith(f"mv {file} {file}.damaged")


def test_bytes_that_are_not_text_are_told(make_run: MakeRun) -> None:
    run = make_run()
    (file := run / "report.json").write_bytes(b"\xff\xfe\x00")
    error = refused(run)
    assert error.message.startswith(f"{file} ") and "is not UTF-8" in error.message
    assert error.remedy.text == f"mv {file} {file}.damaged"


def test_missing_and_wrong_keys_are_named_together(make_run: MakeRun) -> None:
    run = make_run()
    values = json.loads((run / "report.json").read_text())
    del values["val"], values["goal"]["reached"]
    values["tokens"] = "many"
    (run / "report.json").write_text(json.dumps(values))
    error = refused(run)
    assert "goal.reached, val are missing" in error.message
    assert "tokens = 'many'" in error.message
    assert error.remedy.text == f"headrace train {run / 'plan.toml'} --resume"


def test_a_later_format_asks_for_a_later_headrace(make_run: MakeRun) -> None:
    run = make_run(format=2)
    error, file = refused(run), run / "report.json"
    assert "format 2" in error.message and f"format {REPORT_FORMAT}" in error.message
    later, _, other = error.remedy.text.partition("; or ")
    assert "version of Headrace" in later and other.startswith(f"mv {file} {file}.newer; ")


def test_numbers_that_are_not_finite_count_as_not_measured(make_run: MakeRun) -> None:
    report = read_run(make_run(wall_s=float("nan"), wasted_token_fraction=float("inf"))).report
    assert report.wall_s is None and report.wasted_token_fraction is None


def test_half_a_row_at_the_end_is_forgiven_and_repeated_steps_count_once(make_run: MakeRun) -> None:
    rows = [{"step": n, "tokens": n, "wall_s": n, "loss": n} for n in (1, 2, 3)]
    run = make_run(rows=[*rows, {"step": 2, "tokens": 2, "wall_s": 9, "loss": None}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tok')
    metrics = read_run(run).metrics
    assert metrics["step"].tolist() == [1, 2, 3]
    assert metrics["wall_s"].tolist() == [1, 9, 3]
    assert np.isnan(metrics["loss"][1]) and np.isnan(metrics["forward_s"]).all()


@pytest.mark.parametrize("line", ["{", "[]", '{"step": "x"}', '{"loss": {}}'])
def test_a_broken_row_tells_its_line(make_run: MakeRun, line: str) -> None:
    run = make_run(rows=[{"step": 1}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n" + '{"step": 2}\n')
    error, file = refused(run), run / "metrics.jsonl"
    assert error.message.startswith(f"{file} line 2 ") and line in error.message
    assert error.remedy.text == f"sed -i 2d {file}"


def test_a_run_needs_only_its_report(make_run: MakeRun) -> None:
    run = make_run()
    for name in ("metrics.jsonl", "environment.json", "plan.toml"):
        (run / name).unlink()
    read = read_run(run)
    assert not len(read.metrics["step"]) and read.environment == {} and read.plan_toml == ""
