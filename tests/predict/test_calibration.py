"""Measured steps of one plan set the model for others, or are refused, or say nothing of them."""

import json
from pathlib import Path

import pytest
from facts import in_order
from test_prediction import H200, on_h200

from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.costs.step import StepTime
from headrace.costs.work import EDGE_S
from headrace.plan.changes import changed
from headrace.predict.calibration import Calibration, MeasuredPlan
from headrace.predict.intervals import STEP
from headrace.predict.page import format_prediction
from headrace.predict.prediction import LAUNCHES, after, at, calibrated, predict


def test_measured_phases_are_met_and_carried_over() -> None:
    time = StepTime(
        {
            ("forward", "product"): 1.0,
            ("recompute", "stream"): 0.5,
            ("backward", "product"): 1.5,
            ("optimizer", "stream"): 0.25,
        },
        0.1,
    )
    phases = {"forward": 1.1, "backward": 2.6, "optimizer": 0.25, "input": 0.0}
    found = Calibration.of(time, MeasuredPlan(3.95 + EDGE_S, phases), "one")
    assert found.factors == pytest.approx(
        {"forward": 1.1, "recompute": 1.3, "backward": 1.3, "optimizer": 1.0}
    )
    assert found.step_s(time) == pytest.approx(3.95 + EDGE_S)
    other = StepTime({("forward", "product"): 2.0}, 0.1)
    assert found.step_s(other) == pytest.approx(2.2 + EDGE_S)
    waited = Calibration.of(
        time, MeasuredPlan(4.95 + EDGE_S, {**phases, "input": 1 + EDGE_S}), "one"
    )
    assert waited.factors == pytest.approx(found.factors) and waited.waits_s == pytest.approx(1.0)
    whole = Calibration.of(time, MeasuredPlan(6.5 + EDGE_S), "one")
    assert set(whole.factors.values()) == {2.0}
    with pytest.raises(ConfigError, match="too far apart"):
        Calibration.of(time, MeasuredPlan(60.0), "one")


def test_a_run_sets_the_model_for_other_plans(tmp_path: Path) -> None:
    plan, context = on_h200("1b")
    before = predict(plan, context, H200)
    assert before.time.step_s
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    with pytest.raises(ConfigError, match="no steady steps"):
        after(tmp_path, catalogue(), context, H200)
    phases = {"input": 0.0, "forward": 9.0, "backward": 18.0, "optimizer": 0.4}
    report = {
        "steady_tokens_per_s": plan.batch.tokens / (1.1 * before.time.step_s),
        "steps": 30,
        "tokens": 30 * plan.batch.tokens,
        "phase_s": phases,
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    found = after(tmp_path, catalogue(), context, H200)
    assert predict(plan, context, H200, found).time.step_s == pytest.approx(
        1.1 * before.time.step_s
    )
    steps = [1.2 * before.time.step_s] * 20
    rows = [
        {"step_s": 9.0, "compile_s": 0.0},
        {"step_s": 0.0, "compile_s": 5.0},
        *({"step_s": s, "compile_s": 0.0} for s in steps),
    ]
    lines = "".join(json.dumps(r) + "\n" for r in rows)
    odd = '[]\n{"step_s": "0.1"}\n{"step_s": NaN}\n{"step_s": -1}\n{"step_s": null}\n'
    (tmp_path / "metrics.jsonl").write_text(lines + odd + '{"step_s": 0.')  # is being written
    found = after(tmp_path, catalogue(), context, H200)
    same = predict(plan, context, H200, found)
    assert same.time.step_s == pytest.approx(1.2 * before.time.step_s) and found.steps == 20
    assert same.rates.tier == "after_20_steps" and "measured steps of 1b" in format_prediction(
        plan, same
    )
    other, there = on_h200("160m")
    moved = predict(other, there, H200, found)
    plain = predict(other, there, H200)
    assert (same.rates.basis, moved.rates.basis) == ("same_workload", "after_20_steps")
    assert (
        moved.time.step_s
        and plain.time.step_s
        and 1.15 < moved.time.step_s / plain.time.step_s < 1.25
    )
    assert found == calibrated(plan, context, H200, MeasuredPlan(1.2 * before.time.step_s))


@pytest.mark.parametrize(
    ("same", "words"),
    [
        (True, "-torch_compile +full_checkpoint"),
        (True, "batch.micro_sequences=2"),
        (False, "batch.tokens=65536"),
        (False, "data.sequence_length=2048"),
        (False, "model.ffn=512"),
    ],
)
def test_the_measured_workload_has_its_own_interval(tmp_path: Path, same: bool, words: str) -> None:
    ran, context = on_h200("1b", "model.vocab=4096")  # a run writes what a plan left open
    (tmp_path / "plan.toml").write_text(ran.to_toml())
    row = {"step_s": predict(ran, context, H200).time.step_s, "compile_s": 0.0}
    (tmp_path / "metrics.jsonl").write_text(21 * f"{json.dumps(row)}\n")
    plan = changed(on_h200("1b", "model.vocab=0")[0], words.split(), catalogue())
    found = predict(plan, at(context, plan), H200, after(tmp_path, catalogue(), context, H200))
    width, ends = STEP["same_workload" if same else "after_20_steps"], found.time.step_between
    assert found.time.step_s and f"80% of {width.n} {width.says}" in format_prediction(plan, found)
    assert (ends.low / width.low, ends.high / width.high) == pytest.approx((found.time.step_s,) * 2)


def test_steps_that_wait_for_launches_tell_of_such_steps_alone(tmp_path: Path) -> None:
    small = ("model.layers=6", "batch.tokens=2048", "batch.micro_sequences=1")
    plan, context = on_h200("160m", *small)
    found = predict(plan, context, H200)
    assert found.time.step_s and LAUNCHES in found.time.parts_s and found.time.step_between is None
    assert (
        found.time.no_interval in format_prediction(plan, found)
        and "launches" in found.time.no_interval
    )
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    row = {"step_s": 1.5 * found.time.step_s - 0.5 * EDGE_S, "compile_s": 0.0}
    (tmp_path / "metrics.jsonl").write_text(21 * f"{json.dumps(row)}\n")
    by = after(tmp_path, catalogue(), context, H200)
    assert by.host == pytest.approx(1.5)
    again = predict(plan, context, H200, by)
    assert (
        again.time.step_s == pytest.approx(row["step_s"]) and again.rates.tier == "after_20_steps"
    )
    more, context = on_h200("160m", *small, "batch.tokens=8192")
    alone, told_by = (predict(more, context, H200, c) for c in (None, by))
    assert told_by.time.parts_s[LAUNCHES] > 1.4 * alone.time.parts_s[LAUNCHES]
    large, context = on_h200("1b")  # whose steps do not wait
    assert predict(large, context, H200, by) == predict(large, context, H200)
    small_s = found.time.step_s - EDGE_S
    for times in (0.0, 0.3, 3.3):  # another plan, or another device
        row["step_s"] = times * small_s + EDGE_S
        (tmp_path / "metrics.jsonl").write_text(21 * f"{json.dumps(row)}\n")
        with pytest.raises(ConfigError, match="too far apart"):
            after(tmp_path, catalogue(), context, H200)


def test_a_faster_host_tells_nothing_of_the_device() -> None:
    """Where launches, as measured, are no longer waited for, the rates say how far off it is."""
    plan, context = on_h200("160m", "batch.micro_sequences=2", without=["torch_compile"])
    found = predict(plan, context, H200)
    assert found.time.step_s and LAUNCHES in found.time.parts_s and found.time.no_interval
    quick = calibrated(plan, context, H200, MeasuredPlan(0.4 * found.time.step_s))
    faster = predict(plan, context, H200, quick)
    assert (
        faster.time.step_s
        and faster.time.step_s < found.time.step_s
        and faster.rates.calibrated_by == plan.name
    )
    assert LAUNCHES not in faster.time.parts_s and not faster.time.no_interval
    assert (faster.rates.tier, faster.rates.basis) == ("no_gpu", "no_gpu")
    assert faster.time.step_between.high == pytest.approx(STEP["no_gpu"].high * faster.time.step_s)


def test_a_run_of_another_device_sets_nothing(tmp_path: Path) -> None:
    plan, context = on_h200("1b")
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    ran = {"device": "cpu", "device_name": "a laptop"}
    (tmp_path / "environment.json").write_text(json.dumps(ran))
    with pytest.raises(ConfigError, match=in_order(tmp_path, "a laptop", "NVIDIA H200")):
        after(tmp_path, catalogue(), context, H200)
