"""The examples of python.md are run in order, on a plan made tiny, and print what they promise."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from snippets import ROOT, blocks_of
from test_snippets import TINY

import headrace
from headrace.api import calls, plans

PAGE = "docs/guide/python.md"


def test_the_page_runs_from_top_to_bottom(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, asked = plans.read_plan, []
    tiny = [word for word in TINY if not word.startswith(("goal.", "data.sources"))]

    def read_tiny(name: str, *overrides: str, **how: Any) -> headrace.Plan:
        return read(name, *tiny, *overrides, "goal.steps=4", **how)

    def tune(plan: headrace.Plan, **how: Any) -> Any:
        asked.append(how)
        return type("Tuned", (), {"sentence": lambda self: "tuned", "plan": plan})()

    monkeypatch.setattr(plans, "read_plan", read_tiny)
    monkeypatch.setattr(calls, "tune", tune)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(PAGE):
        if block.language == "python":
            exec(compile(block.text, "python.md", "exec"), names)
    assert asked == [{"minutes": 5}]
    assert names["lost"] > 0 and "muon" in names["names"] and names["card"]
    said = capsys.readouterr().out
    assert "did you mean model.dim" in said and "on NVIDIA H200" in said
    assert names["small"].techniques["muon"].lr == 0.02


@pytest.mark.slow
def test_the_page_is_well_typed(tmp_path: Path) -> None:
    text = "\n".join(block.text for block in blocks_of(PAGE) if block.language == "python")
    (file := tmp_path / "page.py").write_text(text)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
