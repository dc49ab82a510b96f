"""The program that prints how right Headrace was: its numbers, its page, and its errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TUNED = '{"workload": "a", "metrics": {"ratio_to_best": {"low": 1.0, "value": 1.0, "high": 1.0}}}'


def truth(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    command = [sys.executable, str(ROOT / "benchmarks" / "truth.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def document(folder: Path, code: int) -> dict[str, Any]:
    ended = truth("--json", "--results", folder)
    assert ended.returncode == code, ended.stderr
    found = json.loads(ended.stdout)
    assert found["exit_code"] == code
    return found


def test_it_says_of_each_number_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "tuner.jsonl").write_text(f"{TUNED}\n")
    found = document(tmp_path, 0)
    assert found["tuner_ratio"]["n"] == found["tuner_ratio"]["value"] == 1
    assert found["doctor_top1"] == {**found["doctor_top1"], "value": None, "n": 0}


def test_the_page_is_written_beside_its_pictures(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    ended = truth("--results", ROOT / "results", "--page", page)
    assert ended.returncode == 0 and str(page) in ended.stdout.splitlines()
    assert page.read_text() == (ROOT / "docs" / "how-right.md").read_text()


@pytest.mark.parametrize("line", ['{"workload": 3}', "{"], ids=["wrong", "unread"])
def test_what_mends_a_wrong_row_is_run_as_it_is_printed(line: str, tmp_path: Path) -> None:
    (tmp_path / "tuner.jsonl").write_text(f"{TUNED}\n{line}\n{TUNED}\n")
    error = document(tmp_path, 2)
    assert f"{tmp_path / 'tuner.jsonl'}:2" in error["error"]
    subprocess.run(["bash", "-ec", error["remedy"]], check=True)
    assert document(tmp_path, 0)["tuner_ratio"]["n"] == 2


def test_receipts_are_looked_for_in_a_checkout(tmp_path: Path) -> None:
    error = document(tmp_path / "nothing", 2)
    assert "repository" in error["error"] and "--results DIR" in error["remedy"]
    ended = truth("--results", tmp_path, "--page", "x.txt")
    assert ended.returncode == 2 and "--page docs/how-right.md" in ended.stderr
