"""The page of a run that goes on has the doctor's verdict, found beside the requests."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import add_rows, metric_rows
from test_ui_safety import EVIL, check
from tiny import PLAN

from headrace.report.page import Safe
from headrace.ui import judging
from headrace.ui.judging import MAKES, MOST_KEPT, Judge, KeptVerdict

Ask = Callable[..., Any]
Judged = Callable[[str], str]
MakeRun = Callable[..., Path]


@pytest.fixture
def waiting(runs: Path, corpus: Path, prepared_folder: Path) -> Path:
    """Return the folder of a run that goes on and waits for its loader."""
    folder = runs / "waiting"
    folder.mkdir()
    (folder / "plan.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    add_rows(folder, [row | {"input_s": 0.2} for row in metric_rows()[:40]])
    return folder


def test_a_run_that_goes_on_is_judged_with_commands(
    ask: Ask, judged: Judged, waiting: Path
) -> None:
    page = ask("/runs/waiting").text
    assert 'data-live="/runs/waiting/doctor"' in page and "data-now" in page
    part = judged("waiting")
    assert "it is judged by the 40 steps that it has written so far" in part
    assert "<h2>Bottleneck: input</h2>" in part and "What to change" in part
    assert f'class="command" tabindex="0">headrace train {waiting}/plan.toml' in part
    assert part in ask("/runs/waiting/doctor").text, "a browser without scripts has a page"
    known = ask("/runs/waiting/doctor", x_part="1").headers["etag"]
    assert ask("/runs/waiting/doctor", 304, x_part="1", if_none_match=known).text == ""
    check(ask("/runs/waiting/doctor").text, evil=False)


def test_too_few_steps_are_said_in_a_sentence(judged: Judged, waiting: Path) -> None:
    (waiting / "metrics.jsonl").write_text("")
    add_rows(waiting, metric_rows()[:1])
    part = judged("waiting")
    assert "The run has written 1 step, which are too few to judge it: 8 steady ones" in part
    assert "Bottleneck" not in part


def test_a_run_without_a_step_says_so(judged: Judged, waiting: Path) -> None:
    (waiting / "metrics.jsonl").unlink()
    assert "No step is complete yet." in judged("waiting")


def test_a_plan_of_another_version_is_judged_without_remedies(
    judged: Judged, growing: Path
) -> None:
    """The synthetic plan has keys that this Headrace does not know."""
    part = judged("going")
    assert "judged by the 60 steps" in part and "What to change" not in part
    assert "No remedies are forecast: the plan has no key" in part


def test_a_run_that_ended_meanwhile_leads_to_its_report(ask: Ask, make_run: MakeRun) -> None:
    make_run()
    part = ask("/runs/demo/doctor", x_part="1").text
    assert "The run has ended" in part and 'href="/runs/demo"' in part
    ask("/runs/none/doctor", 404)


def test_damaged_and_hostile_rows_are_a_message(ask: Ask, judged: Judged, waiting: Path) -> None:
    with (waiting / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "step_s": 1, "input_s": 0, "loss": "<script>alert(1)</script>"}\n')
    part = judged("waiting")
    assert "loss of row 41 is" in part and "mv " in part
    check(part)
    plan = (waiting / "plan.toml").read_text()
    (waiting / "plan.toml").write_text(f"{plan}\n[{EVIL!r}]\n")
    check(ask("/runs/waiting/doctor").text)


def test_what_is_too_large_is_left_to_the_command(
    judged: Judged, waiting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "LARGEST_BYTES", 10)
    part = judged("waiting")
    assert "a page judges up to" in part and f">headrace doctor {waiting}</pre>" in part


# --- beside the requests ---------------------------------------------------------------------


def test_no_request_waits_for_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "FIRST_S", 0.0)
    begun, goes_on, found = threading.Event(), threading.Event(), list[Path]()

    def find(path: Path) -> Safe:
        begun.set()
        assert goes_on.wait(60)
        found.append(path)
        return Safe(f"verdict {len(found)}")

    judge, run = Judge(find), Path("run")
    assert MAKES in judge.newest(run, 1) and begun.wait(60)
    assert MAKES in judge.newest(run, 2), "one is asked for at a time"
    goes_on.set()
    until(lambda: judge.newest(run, 1) == "verdict 1")
    assert found == [run]


def test_a_run_is_judged_again_when_it_has_written_more(monkeypatch: pytest.MonkeyPatch) -> None:
    count = list[int]()
    judge, run = Judge(lambda path: Safe(str(count.append(1) or len(count)))), Path("run")
    until(lambda: judge.newest(run, 1) == "1")
    assert judge.newest(run, 2) == "1", "not before some seconds have passed"
    monkeypatch.setattr(judging, "LEAST_S", 0.0)
    monkeypatch.setattr(judging, "TIMES", 0.0)
    assert judge.newest(run, 1) == "1", "nothing was written"
    until(lambda: judge.newest(run, 2) == "2")


def test_a_verdict_that_took_long_stands_for_longer() -> None:
    now_s = time.monotonic()
    assert KeptVerdict(1, Safe(""), 60.0, now_s - 500).stands(2)
    assert not KeptVerdict(1, Safe(""), 60.0, now_s - 700).stands(2)
    assert KeptVerdict(1, Safe(""), 60.0, now_s - 700).stands(1)


def test_an_error_of_ours_is_raised_and_not_hidden() -> None:
    def fails(path: Path) -> Safe:
        raise AssertionError("a bug")

    judge = Judge(fails)
    with pytest.raises(AssertionError, match="a bug"):
        until(lambda: MAKES not in judge.newest(Path("run"), 1))


def test_few_verdicts_are_remembered() -> None:
    judge = Judge(lambda path: Safe("found"))
    for number in range(MOST_KEPT + 3):
        until(lambda number=number: judge.newest(Path(str(number)), 1) == "found")
    assert len(judge._kept) == MOST_KEPT and Path("0") not in judge._kept


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    last_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < last_s
        time.sleep(0.01)
