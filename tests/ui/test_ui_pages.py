"""The pages of a folder of runs: every run is told, and what goes on is followed as it grows."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import add_rows, metric_rows

from headrace.core.files import hold_lock
from headrace.core.statistics import Interval
from headrace.report.growing import LONGEST, GrowingRun
from headrace.report.run_files import read_run
from headrace.report.single import report_sections
from headrace.tuner.trial_row import TrialRow
from headrace.ui.runs_folder import is_locked

Ask = Callable[..., Any]
MakeRun = Callable[..., Path]
OLD_S = 3 * 3600
FINDINGS = [
    {
        "sentence": "The loader takes a third of the step.",
        "remedies": [
            {
                "change": ["+loader_workers", "data.workers=4"],
                "what": "reads ahead",
                "gain": {"low": 0.1, "value": 0.2, "high": 0.3},
                "memory_bytes": 0,
                "costs": "memory",
                "equality": "exact",
            }
        ],
    }
]


def make_old(folder: Path) -> None:
    """Let the files of a run have changed long ago."""
    then = time.time() - OLD_S
    for file in folder.iterdir():
        os.utime(file, (then, then))


def test_an_empty_folder_says_how_to_begin(ask: Ask) -> None:
    assert "headrace train demo" in ask("/").text


def test_the_list_says_what_each_run_does(
    ask: Ask, make_run: MakeRun, growing: Path, runs: Path
) -> None:
    make_run("won")
    make_run("lost", status="failed", message="the loss is not finite")
    broken = make_run("broken")
    (broken / "report.json").write_text('{"format": 1, ')
    stopped = runs / "stopped"
    stopped.mkdir()
    (stopped / "plan.toml").write_text("")
    add_rows(stopped, metric_rows()[:3])
    make_old(stopped)
    (runs / "no-run").mkdir()
    page = ask("/").text
    for words in (
        "Reached 2.2 bits per byte at step 250",
        "Failed at step 400",
        "report.json is not whole JSON",
        "Running at step 60",
        "It ended without a report, or hangs: its last row is 3",
    ):
        assert words in page, words
    assert "Traceback" not in page and "no-run" not in page
    assert page.count('type="checkbox"') == 2, "runs that have ended can be compared"
    assert page.index("/runs/going") < page.index("/runs/stopped"), "the newest is first"
    assert ask("/live/runs").text in page


def test_the_page_of_an_ended_run_is_its_report(ask: Ask, make_run: MakeRun) -> None:
    run = make_run()
    (run / "findings.json").write_text(json.dumps(FINDINGS))
    page = ask("/runs/demo").text
    for part in report_sections(read_run(run), commands=True):
        assert part in page
    assert f"headrace train {run}/plan.toml data.workers=4 --with loader_workers</pre>" in page
    assert 'data-live="/runs/demo/forecast"' in page


def test_a_corrupt_run_is_one_message(ask: Ask, make_run: MakeRun) -> None:
    run = make_run()
    (run / "findings.json").write_text('[{"sentence": 1, "remedies": "x"}]')
    page = ask("/runs/demo", 422).text
    assert "findings.json is damaged" in page and "Traceback" not in page
    assert f"mv {run}/findings.json" in page
    (run / "findings.json").unlink()
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    assert "it is not UTF-8" in ask("/runs/demo", 422).text
    (run / "metrics.jsonl").write_text('{"step": 1}\nnothing\n')
    assert "line 2 is not a row of metrics" in ask("/runs/demo", 422).text


def test_a_run_is_followed_while_it_is_written(ask: Ask, growing: Path, make_run: MakeRun) -> None:
    page = ask("/runs/going").text
    assert "Running" in page and 'data-live="/runs/going/live"' in page
    first = ask("/runs/going/live")
    assert "60</dd>" in first.text and "Where the time went" in first.text
    assert "not measured" in first.text, "nothing was validated yet"
    known = first.headers["etag"]
    rows = metric_rows()
    add_rows(growing, rows[60:62], whole=False)
    assert ">61</dd>" in ask("/runs/going/live", if_none_match=known).text
    known = ask("/runs/going/live").headers["etag"]
    assert ask("/runs/going/live", 304, if_none_match=known).text == ""
    half = json.dumps(rows[61]) + "\n"
    with (growing / "metrics.jsonl").open("rb+") as file:
        file.truncate(sum(len(json.dumps(row)) + 1 for row in rows[:61]))
    scored = rows[61] | {"val_loss_nats": 4.0, "val_bits_per_byte": 2.5}
    assert len(half) > 2
    add_rows(growing, [scored])
    assert "2.500" in ask("/runs/going/live", if_none_match=known).text
    make_run("ended")
    os.rename(growing.parent / "ended" / "report.json", growing / "report.json")
    assert "has ended" in ask("/runs/going/live", 410).text
    assert "Repeat this run" in ask("/runs/going").text


def test_rows_that_are_trained_again_replace_those_before(growing: Path) -> None:
    run, rows = GrowingRun(growing), metric_rows()
    assert run.read().report.steps == 60
    add_rows(growing, [rows[49] | {"loss": 9.0}])
    again = run.read()
    assert again.report.steps == 50 and again.metrics["loss"][-1] == 9.0
    (growing / "metrics.jsonl").unlink()
    assert run.read().report.steps is None
    add_rows(growing, rows[:7])
    assert run.read().report.steps == 7
    assert run.read().report.steady_tokens_per_s == pytest.approx(15_754, rel=0.1)


def test_a_row_without_an_end_is_refused(growing: Path, ask: Ask) -> None:
    with (growing / "metrics.jsonl").open("a") as file:
        file.write("x" * (LONGEST + 1))
    assert "line 61 is longer than" in ask("/runs/going/live", 422).text
    assert "line 61 is longer than" in ask("/").text


def test_a_run_whose_lock_is_held_goes_on_however_quiet(ask: Ask, growing: Path) -> None:
    lock = hold_lock(growing / ".lock", wait=False, key="directory")
    make_old(growing)
    if is_locked(growing) is None:
        pytest.skip("this system lists no locks")
    assert "Running" in ask("/").text
    lock.release()
    page = ask("/runs/going").text
    assert "Stopped" in page and f"headrace train {growing}/plan.toml --resume" in page


def test_a_resumed_run_is_followed_and_not_reported(ask: Ask, make_run: MakeRun) -> None:
    make_run(status="running")
    assert "Running at step 400" in ask("/runs/demo").text


def test_runs_are_compared(ask: Ask, make_run: MakeRun) -> None:
    one, two = make_run("one"), make_run("two", dollars=None)
    page = ask("/compare?run=one&run=two").text
    assert "2 runs side by side" in page and f"headrace report {one} {two}" in page
    assert "a comparison takes 2 to 8 runs; 1 were marked" in ask("/compare?run=one", 422).text
    assert "0 were marked" in ask("/compare", 422).text
    assert "there is no run" in ask("/compare?run=one&run=three", 404).text


def test_a_plan_is_shown_beside_what_its_run_measured(
    ask: Ask, make_run: MakeRun, corpus: Path, prepared_folder: Path
) -> None:
    from tiny import PLAN

    make_run(plan=PLAN.format(corpus=corpus, prepared=prepared_folder))
    part = ask("/runs/demo/forecast", x_part="1").text
    assert part.startswith("<section>") and "Peak memory" in part and "402.0 MiB" in part
    assert "A step" in part and "A ratio is measured over predicted." in part
    assert part in ask("/runs/demo/forecast").text
    make_run("other")
    assert "Nothing is predicted" in ask("/runs/other/forecast", x_part="1").text


def test_the_way_of_a_tuning_is_shown(ask: Ask, runs: Path) -> None:
    folder = runs / "demo-tune"
    folder.mkdir()
    (folder / "trials.jsonl").write_text("{}\n{}\n")
    assert "2 readings so far" in ask("/").text + ask("/tunings/demo-tune").text
    kept = TrialRow(1, ("+muon",), "kept", "faster", "accept", ratio=Interval(1.1, 1.2, 1.3, 9))
    lost = TrialRow(2, ("+z_loss",), "reverted", "slower", "screen", ratio=Interval(0.8, 0.9, 1, 9))
    rows = [asdict(kept) | {"bought": "20 ms of each step"}, asdict(lost) | {"bought": ""}]
    rows[1]["ratio"]["high"] = None
    path = {"name": "demo", "aim": "time", "path": rows, "tuning_s": 61.0, "left": ["+lion"]}
    (folder / "path.json").write_text(json.dumps(path))
    (folder / "tuned.toml").write_text("# demo, tuned for time: A step is 1.20 times as fast.\n")
    page = ask("/tunings/demo-tune").text
    for words in (
        "A step is 1.20 times as fast.",
        "it buys 20 ms of each step",
        "Every trial",
        "best so far",
        "<code>+lion</code>",
        f"headrace train {folder}/tuned.toml",
    ):
        assert words in page, words
    assert "A step is 1.20 times as fast." in ask("/").text
    (folder / "path.json").write_text(json.dumps(path | {"path": [{"number": "x"}]}))
    assert "path.json is damaged: path.0" in ask("/tunings/demo-tune", 422).text
    (folder / "path.json").write_text("[]")
    assert "path.json is damaged" in ask("/tunings/demo-tune", 422).text
