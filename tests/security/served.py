"""Ask `headrace ui` for the pages of files that were spoiled."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from headrace.core.errors import ConfigError
from headrace.core.statistics import Interval
from headrace.tuner.trial_row import TrialRow
from headrace.ui.server import make_app


def tuning(folder: Path) -> Path:
    """Write the path of a tuning."""
    ends = Interval(1.1, 1.2, 1.3, 9)
    known: Any = {"ratio": ends, "steps": 54, "spent_s": 60.0, "predicted_speed": 1.1}
    rows = [
        asdict(TrialRow(1, ("+muon",), "kept", "faster", "accept", **known)),
        asdict(TrialRow(2, ("+lion",), "reverted", "slower", "screen", memory=0.9, **known)),
    ]
    path = {"name": "tiny", "aim": "time", "path": rows, "left": ["+z_loss"], "tuning_s": 9.0}
    (folder / "tiny-tune").mkdir()
    file = folder / "tiny-tune" / "path.json"
    file.write_text(json.dumps(path))
    return file


def served(where: str) -> Callable[[Path], None]:
    """Return what asks `headrace ui` for the page of a run or a tuning, as for the list of all."""

    def read(file: Path) -> None:
        asks = TestClient(make_app(file.parents[1]), base_url="http://127.0.0.1")
        assert asks.get("/").status_code == 200
        answer = asks.get(f"/{where}/{file.parent.name}")
        if answer.status_code != 200:
            assert answer.status_code == 422
            raise ConfigError("the page says what is wrong", "nothing")

    return read
