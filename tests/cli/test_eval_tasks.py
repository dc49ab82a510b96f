"""`eval --tasks` scores files of questions, and refuses words of the validation text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_a_folder_of_questions_is_scored_and_told(
    call: Callable[..., Any], say: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        row = {"query": "the river", "choices": ["bends", "is"], "gold": 0}
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    told = call("eval", "demo", "--tasks", str(tmp_path), "--limit", "2")
    assert [(task["name"], task["questions"]) for task in told["tasks"]] == [("one", 2), ("two", 2)]
    assert told["tasks"][0]["values"] == told["tasks"][1]["values"]
    assert told["tasks"][0]["chance"] == 0.5
    out, _ = say("eval", "demo", "--tasks", str(tmp_path / "one.jsonl"))
    assert "acc_norm" in out and "0.5000" in out
