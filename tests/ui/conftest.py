"""Lend a server over a folder of synthetic runs, and a browser's questions to it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from synthetic_run import PLAN, add_rows, metric_rows
from synthetic_run import make_run as make_run  # a fixture

from headrace.ui.judging import MAKES
from headrace.ui.server import make_app

Ask = Callable[..., Any]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return the folder into which `make_run` writes."""
    folder = tmp_path / "runs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def ask(runs: Path) -> Ask:
    """Return what asks the server: `ask("/runs/demo", 404)` expects that status."""
    client = TestClient(make_app(runs), base_url="http://127.0.0.1")

    def get(path: str, status: int = 200, **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = client.get(path, headers=named, follow_redirects=False)
        assert answer.status_code == status, answer.text
        return answer

    return get


@pytest.fixture
def judged(ask: Ask) -> Ask:
    """Return what asks for the doctor's verdict on a run until it is there."""

    def get(name: str) -> str:
        until = time.monotonic() + 60
        while MAKES in (part := ask(f"/runs/{name}/doctor", x_part="1").text):
            assert time.monotonic() < until
            time.sleep(0.05)
        return part

    return get


@pytest.fixture
def growing(runs: Path) -> Path:
    """Return the folder of a run that goes on: it has rows, and no report."""
    folder = runs / "going"
    folder.mkdir()
    (folder / "plan.toml").write_text(PLAN)
    add_rows(folder, metric_rows()[:60])
    return folder
