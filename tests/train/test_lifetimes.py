"""What failures and stops took of a run's time, and what is paid for it."""

import json
import os
import time
from pathlib import Path

import pytest

from headrace.train.lifetimes import FILE, Lifetimes, Stint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("")
    return tmp_path


def lived(folder: Path, **last: float) -> None:
    """Write one lifetime that began 1,000 s ago, was ready after 100 s, and ended after 600 s."""
    began = time.time() - 1000
    one = {"began": began, "ready": began + 100, **last}
    (folder / FILE).write_text(json.dumps([one]))
    for file in folder.iterdir():
        os.utime(file, (began + 600, began + 600))


def test_a_first_start_has_nothing_before_it(folder: Path) -> None:
    new = Lifetimes.begin(folder, None, age_s=5.0)
    assert new.paid_s() == 0
    new.ready()
    told = new.account()
    assert (told["restarts"], told["resumes"], told["uptime"]["lost_steps"]) == (0, 0, 0)
    assert told["uptime"]["start_s"] == pytest.approx(5, abs=1)


@pytest.mark.parametrize(("status", "restarts"), [("failed", 1), ("running", 1), ("done", 0)])
def test_a_failure_is_apart_from_a_stop(folder: Path, status: str, restarts: int) -> None:
    lived(folder)
    told = Lifetimes.begin(folder, status, age_s=0.0).account()
    assert (told["restarts"], told["resumes"]) == (restarts, 1 - restarts)
    assert told["uptime"]["down_s"] == pytest.approx(400 * restarts, abs=1)


def test_goodput_is_the_time_of_the_steps_that_the_run_has(folder: Path) -> None:
    """From 600 s lived and 400 s down go 100 s of start-up and 200 s of steps that were lost."""
    lived(folder)
    new = Lifetimes.begin(folder, "failed", age_s=0.0)
    new.lost(40, 200.0)
    told = new.account()["uptime"]
    assert told["lost_steps"] == 40 and told["lost_s"] == 200
    assert told["goodput"] == pytest.approx(0.3, abs=0.01)
    assert told["total_s"] == pytest.approx(1000, abs=2)


@pytest.mark.parametrize(("count", "paid"), [("1", 400), ("0", 0)])
def test_machines_that_were_kept_are_paid_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: str, paid: float
) -> None:
    """Check what torchrun does, which starts processes anew and keeps its machines."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    lived(folder)
    assert Lifetimes.begin(folder, "failed", age_s=0.0).paid_s() == pytest.approx(paid, abs=2)
    lived(folder)
    assert Lifetimes.begin(folder, "interrupted", age_s=0.0).paid_s() == 0


def test_a_lifetime_without_a_step_is_all_start_up(folder: Path) -> None:
    lived(folder, ready=None)
    told = Lifetimes.begin(folder, "failed", age_s=0.0).account()["uptime"]
    assert told["start_s"] == pytest.approx(600, abs=2) and told["goodput"] < 0.01


@pytest.mark.parametrize("text", ["{]", "7", '[{"began": "a"}]', '[{"began": 1, "ended": [2]}]'])
def test_a_damaged_file_counts_the_failure_all_the_same(folder: Path, text: str) -> None:
    (folder / FILE).write_text(text)
    told = Lifetimes.begin(folder, "failed", age_s=0.0).account()
    assert told["restarts"] == 1 and told["uptime"]["down_s"] == 0


def test_only_the_rank_that_keeps_them_writes(tmp_path: Path) -> None:
    other = Lifetimes(tmp_path, [])
    other.ready()
    other.lost(3, 1.0)
    assert not any(tmp_path.iterdir())
    assert Lifetimes(tmp_path, [Stint(time.time() - 10)]).account()["restarts"] == 0
