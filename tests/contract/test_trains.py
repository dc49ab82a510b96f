"""Trains: a tiny run with every technique ends, repeats itself from a checkpoint, and reports.

Quick runs have a set of techniques each, as users' runs do, and the slow tests each alone. Active:
its evidence is in the report, and is not there when apply had run and its effect is gone.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import house
import pytest
import sets
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


@pytest.mark.slow
@pytest.mark.knobs_slow
def test_trains_resumes_and_reports(device: str, variant: Variant, tmp_path: Path) -> None:
    plan = house.plan_of(
        variant,
        device=device,
        directory=str(tmp_path),
        **SHORT,
        micro_rows=2 if house.fits(variant, device=device, micro_rows=2) else 0,
    )
    run_twice(house.with_weights(plan, tmp_path), [variant.name])


@pytest.mark.parametrize("variants", sets.sets_of(sets.leading()), ids=sets.name_of)
def test_many_train_resume_and_report(variants: Sequence[Variant], tmp_path: Path) -> None:
    keys = {"directory": str(tmp_path), **SHORT}
    plan = sets.plan_of(variants, **keys, micro_rows=2) or sets.plan_of(variants, **keys)
    assert plan is not None
    run_twice(house.with_weights(plan, tmp_path), [*plan.techniques])


def test_every_technique_is_in_a_set() -> None:
    held = {n for s in sets.sets_of(sets.leading()) for n in house.plan_of(*s).techniques}
    assert held == {n for n in house.names_on("cpu") if not house.variants(n, "cpu")[0].dear}


def run_twice(plan: Plan, names: Sequence[str]) -> None:
    """Train, and again from the second of four steps; `names` were in force both times."""
    device = plan.device
    report, rows = run(plan)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert report["status"] == "done" and len(report["val"]) == 2

    for name in names:
        evidence = report["techniques"][name]
        assert evidence["active"] is True and evidence["detail"], name
        assert all(math.isfinite(number) for number in evidence["numbers"].values())
    assert report["signals"]["lost_techniques"] == [], "its evidence holds at the end of a run"

    again, repeated = run(plan, resume=True, checkpoint="step-2")
    near = 0.0 if device == "cpu" else 1e-2
    for before, after in zip(rows, repeated, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=near, abs=0)
    assert again["stream_sha256"] == report["stream_sha256"]
    assert all(again["techniques"][name]["active"] is True for name in names)


ZEROS = {"head_init": "zero", "output_init": "zero", "tied_embeddings": False}
"""Starts behind which no gradient reaches a block in the first step."""


def test_is_active_after_a_step(device: str, variant: Variant) -> None:
    assert_active(device, variant, {})


@pytest.mark.knobs_slow
def test_is_active_behind_a_head_of_zeros(device: str, variant: Variant) -> None:
    if "frozen" in variant.technique().composes or variant.name == "tied_embeddings":
        return  # behind a frozen head of zeros nothing ever learns; a tied one is refused
    assert_active(device, variant, ZEROS)


def assert_active(device: str, variant: Variant, model: dict[str, Any]) -> None:
    """Take a step from a start with these keys of the model, and look for evidence."""
    build = house.build_of(house.plan_of(variant, device=device, model=model))
    rows = house.make_rows(build.config.vocab, ignored=False)
    micros = house.make_micros(
        rows, micro_rows=build.plan.batch.micro_sequences, segments=build.mask.document
    )
    with house.flags_of(build):  # as a run looks, which some evidence needs
        step(build, micros, 0)
        found = check_active(build)
    assert found[variant.name].active and found[variant.name].detail


@pytest.mark.knobs_slow
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
