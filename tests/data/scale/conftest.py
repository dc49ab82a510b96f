"""A text of several files, every one of which is a part."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.data import parts
from headrace.plan.plan import Plan

FILES, ROWS = 5, 40


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources, of five and of two files, where every file is a part; the last row is null."""
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    for source, files in (("a", FILES), ("b", 2)):
        (tmp_path / source).mkdir()
        for number in range(files):
            rows: list[Any] = [
                {"text": f"{source} {number} says {n * n}: {'the mill grinds. ' * (n % 5)}"}
                for n in range(ROWS)
            ]
            lines = [*map(json.dumps, rows), '{"text": null}', ""]
            (tmp_path / source / f"{number}.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def plan(texts: Path, make_plan: Callable[..., Plan]) -> Plan:
    """Make a plan of both sources."""
    return make_plan(sources=[str(texts / "a"), str(texts / "b")], validation=0.2)
