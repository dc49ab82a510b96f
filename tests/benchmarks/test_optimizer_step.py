"""The share of Muon in a step is measured whole on a tiny plan."""

import sys
from pathlib import Path

import optimizer_step
import pytest
import receipts
from programs import rows

from headrace.techniques.optim.muon import Muon

PLAN = """
name = "tiny"
device = "cpu"
model = { dim = 16, layers = 2, heads = 2, ffn = 32, vocab = 64 }
data = { sequence_length = 8 }
goal = { steps = 3 }
batch = { tokens = 16 }
"""


def test_a_row_is_of_both_sides_of_one_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "tiny.toml"
    plan.write_text(PLAN)
    words = ["--shapes", plan, "--rounds", 1, "--block_s", 0.01, "--results", tmp_path]
    words += ["--set", "techniques.muon.normalize_rows=true"]
    monkeypatch.setattr(sys, "argv", ["optimizer_step", *map(str, words)])
    optimizer_step.main()
    (row,) = rows(tmp_path, "learning")
    assert (row["kind"], row["shape"], row["n"]) == ("optimizer_share", "tiny", 2)
    assert row["knobs"]["normalize_rows"] and "even rows" in row["evidence"]
    values = {name: metric["value"] for name, metric in row["metrics"].items()}
    assert 0 < values["muon_share"] < values["update_share"] < 1
    assert 0 < values["adamw_share"] < 1 and values["extra_share"] < 1
    assert values["peak_ratio"] == values["muon_peak_bytes"] / values["adamw_peak_bytes"]


def test_the_peak_of_a_side_is_without_the_other_sides_states(tmp_path: Path) -> None:
    """AdamW keeps two numbers of each weight, and Muon one of each in a block's matrix."""
    (plan := tmp_path / "tiny.toml").write_text(PLAN)
    with optimizer_step.opened(optimizer_step.plan_of(str(plan), [])) as (build, micros):
        plain, muon = optimizer_step.sides_of(build)
        assert set(muon.optimizers) == {"muon", "adamw"} and set(plain.optimizers) == {"adamw"}
        for side in (plain, muon):
            side.run(micros, 0, 1)
        matrices = sum(p.numel() for p in muon.routed["muon"].values())
        scalars = len(plain.routed["adamw"]) - len(muon.routed["adamw"])  # AdamW's step counts
        assert plain.state_bytes() - muon.state_bytes() == 4 * (matrices + scalars)
        for one, other in ((plain, muon), (muon, plain)):
            one.read_peak(micros, other)
        assert plain.peak_bytes and muon.peak_bytes
    assert all(receipts.plan_file(name).is_file() for name, _ in optimizer_step.SHAPES.values())
    for shape in optimizer_step.SHAPES:
        found = optimizer_step.plan_of(shape, [])
        assert isinstance(found.techniques["muon"], Muon)
        assert optimizer_step.LEFT_OUT not in found.techniques
