"""What watching costs is measured whole on a tiny plan, and its rows are what the truth reads."""

import json
import sys
from math import isfinite
from pathlib import Path

import overhead
import pytest
from scoring.numbers import compute

PLAN = """
name = "tiny"
device = "cpu"
model = { dim = 8, layers = 1, heads = 1, ffn = 16, vocab = 64 }
data = { sequence_length = 8 }
goal = { steps = 3 }
batch = { tokens = 16 }
"""


def test_both_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tmp_path / "tiny.toml"
    plan.write_text(PLAN)
    words = ["--plan", plan, "--rounds", 1, "--steps", 3, "--every", 500, "--results", tmp_path]
    monkeypatch.setattr(sys, "argv", ["overhead", *map(str, words)])
    overhead.main()
    always, bursts = map(json.loads, (tmp_path / "overhead.jsonl").read_text().splitlines())
    assert (always["measurement"], bursts["measurement"]) == ("always_on", "with_bursts")
    assert (bursts["every_steps"], bursts["block_steps"], bursts["n"]) == (500, 16, 2)
    parts = bursts["metrics"]
    spread = parts["burst_s"]["value"] / (500 * parts["step_s"]["value"])
    told = parts["overhead"]["value"]
    assert told == pytest.approx(
        always["metrics"]["overhead"]["value"] + parts["lasting"]["value"] + spread
    )
    assert isfinite(parts["burst_s"]["value"])  # of three steps it is noise, of either sign
    for row in (always, bursts):
        metric = row["metrics"]["overhead"]
        assert metric["low"] <= metric["value"] <= metric["high"]
    assert compute(tmp_path)["overhead_with_bursts"]["value"] == told


def test_a_known_cost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure sides whose blocks take known times, on a clock that drifts by 0.01% a block."""

    class Known:
        steps, clock, loaded = 100, 1.0, 0.0

        def took(self, share: float, seconds: float = 0.0) -> float:
            self.clock *= 1.0001
            return self.clock * (10 * (1 + share + self.loaded) + seconds)

        def off(self) -> float:
            return self.took(0)

        def on(self) -> float:
            return self.took(0.002)

        def profiled(self) -> float:
            self.loaded = 0.003
            return self.took(0.002, 0.5)

    found = {kind: metrics for kind, _, metrics in overhead.measure(Known(), 8, 1000)}
    always, bursts = (found[kind]["overhead"] for kind in ("always_on", "with_bursts"))
    assert always["value"] == pytest.approx(0.002, abs=1e-4)
    assert always["low"] < 0.002 < always["high"]
    parts = found["with_bursts"]
    assert parts["burst_s"]["value"] == pytest.approx(0.5, rel=0.01)
    assert parts["lasting"]["value"] == pytest.approx(0.003, rel=0.01)
    assert bursts["value"] == pytest.approx(0.002 + 0.5 / 100 + 0.003, rel=0.05)
