"""Trains: a tiny run with every technique ends, repeats itself from a checkpoint, and reports.

Active: its evidence is in the report, and is not there when apply had run and its effect is gone.
"""

import json
import math
from pathlib import Path
from typing import Any

import house
import pytest
from facts import in_order
from house import Variant

from headrace.assemble.filled import check_active
from headrace.cli.catalogue import catalogue
from headrace.core.errors import RunError
from headrace.inference.load import open_model
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.train.run_folder import RunFolder
from headrace.train.train import step

SHORT = {
    "eval": {"every_steps": 2, "tokens": 4 * house.LENGTH},
    "checkpoint": {"every_steps": 2, "keep_last": 3},
}


def run(plan: Plan, **how: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train, and open what was trained; returns the report and the rows of metrics."""
    folder = train.run(plan, **how).folder
    assert open_model(folder, catalogue()).model is not None
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return RunFolder(folder).read("report"), [json.loads(row) for row in rows]


@pytest.mark.knobs_slow
def test_trains_resumes_and_reports(device: str, variant: Variant, tmp_path: Path) -> None:
    plan = house.plan_of(
        variant,
        device=device,
        directory=str(tmp_path),
        **SHORT,
        micro_rows=2 if house.fits(variant, device=device, micro_rows=2) else 0,
    )
    plan = house.with_weights(plan, tmp_path)
    report, rows = run(plan)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert report["status"] == "done" and len(report["val"]) == 2

    evidence = report["techniques"][variant.name]
    assert evidence["active"] is True and evidence["detail"]
    assert all(math.isfinite(number) for number in evidence["numbers"].values())
    assert report["signals"]["lost_techniques"] == [], "its evidence holds at the end of a run"

    again, repeated = run(plan, resume=True, checkpoint="step-2")
    near = 0.0 if device == "cpu" else 1e-2
    for before, after in zip(rows, repeated, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=near, abs=0)
    assert again["stream_sha256"] == report["stream_sha256"]
    assert again["techniques"][variant.name]["active"] is True


def test_is_active_after_a_step(device: str, variant: Variant) -> None:
    build = house.build_of(house.plan_of(variant, device=device))
    rows = house.make_rows(build.config.vocab, ignored=False)
    micros = house.make_micros(
        rows, micro_rows=build.plan.batch.micro_sequences, segments=build.mask.document
    )
    with house.flags_of(build):  # as a run looks, which some evidence needs
        step(build, micros, 0)
        found = check_active(build)
    assert found[variant.name].active and found[variant.name].detail


def test_is_not_active_when_its_effect_is_gone(device: str, variant: Variant) -> None:
    """Its `apply` has run and left its notes, but it is the baseline that then takes the step, or
    what must stand beside it alone."""
    technique = variant.technique()
    build = house.build_of(house.plan_without(variant, device))
    build.notes = house.build_of(house.plan_of(variant, device=device)).notes
    build.techniques = [technique]
    house.take_step(build, house.make_rows(build.config.vocab, ignored=False))
    assert not technique.active(build).active
    with pytest.raises(RunError, match=in_order(variant.name, "not in force")) as told:
        check_active(build)
    assert told.value.remedy.changes == ((f"-{variant.name}",),)
