"""The doctor's door: which of a run and traces it was given."""

import json
import time
from pathlib import Path

import pytest
import torch

import headrace
from headrace.core.errors import ConfigError, HeadraceError, RunError
from headrace.doctor.run import diagnose, narrowest


def test_two_runs_are_not_judged_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one run is judged at a time"):
        diagnose([tmp_path / "one", tmp_path / "two"])
    with pytest.raises(HeadraceError):
        diagnose([tmp_path / "one"])


def test_a_trace_is_told_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ConfigError, match="event"):
        diagnose([file])


def test_nothing_found_is_said() -> None:
    assert narrowest([])["sentence"] == "No step was measured."


def test_what_a_watch_saved_is_judged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with headrace.watch(model, optimizer, [torch.randn(2, 4)] * 12) as watched:
        for batch in watched.loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.002)
    file = tmp_path / "watched.json"
    watched.save(file)
    found = diagnose([file])
    assert {"computation", "optimizer"} <= {f.bottleneck for f in found}
    with pytest.raises(ConfigError, match="one at a time"):
        diagnose([file, file])
    file.write_text(file.read_text().replace('"wasted_token_fraction"', '"else"'))
    with pytest.raises(RunError, match="is damaged, or of another version"):
        diagnose([file])
