"""`headrace data inspect` answers a person, a program and a browser, and prepares nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_inspect_answers_all(
    call: Callable[..., Any], say: Callable[..., tuple[str, str]], workshop: Path, tmp_path: Path
) -> None:
    rows = [{"body": f"the mill wheel {n % 30} turns"} for n in range(40)]
    (text := tmp_path / "in").mkdir()
    (text / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (text / "b.jsonl").write_text('{"txt": "one"}\n')
    before = {path for path in workshop.rglob("*")}
    page = tmp_path / "page.html"
    told = call("data", "inspect", str(text), "data.text_key=body", "--page", str(page))
    assert (told["documents"], told["exit_code"], told["page"]) == (40, 0, str(page))
    assert told["repeated_documents"]["share"] == 0.25
    assert told["refused"][0]["remedy"] == "data.text_key=txt"
    assert "<svg" in page.read_text()
    out, error = say("data", "inspect", str(text), "data.text_key=body")
    assert "25.0%" in out and "packing that wins" in out
    assert "would be refused" in error and "data.text_key=txt" in error
    assert {path for path in workshop.rglob("*")} == before


def test_sources_come_from_the_plan_where_none_are_named(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    (text := tmp_path / "a.txt").write_text("the mill wheel turns " * 9)
    plan = tmp_path / "plan.toml"
    plan.write_text(f"[data]\nsources = '{text}'\nsequence_length = 16\n[goal]\nsteps = 1\n")
    told = call("data", "inspect", "--plan", str(plan))
    assert (told["sources"], told["sequence_length"]) == ([str(text)], 16)
    other = call("data", "inspect", str(text), "data.sources=nowhere", code=2)
    assert "nowhere" in other["error"], "what a remedy adds to the line counts"
