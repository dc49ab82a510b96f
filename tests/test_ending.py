"""When a run ends: its budgets, and what another run's loss curve tells of a target."""

import json
from pathlib import Path

import pytest
from test_foresight import H200, on_h200

from headrace.changes import changed
from headrace.cli import catalogue
from headrace.planner.ending import Curve
from headrace.planner.foresight import at, foresee, told
from headrace.planner.intervals import STEP
from headrace.trials.kinds import learns_otherwise


@pytest.mark.parametrize(
    ("goal", "until", "hours"),
    [
        (["goal.minutes=30", "goal.steps=10000000"], "30 minutes", 0.5),
        (["goal.dollars=8"], "step 24", None),
        (["goal.dollars=8", "goal.steps=10000000"], "$8.00", 2.0),
        (["goal.tokens=3276800", "goal.steps=1000"], "step 100", None),
        (["goal.bits_per_byte=1.1", "goal.minutes=6", "goal.steps=10000000"],
         "1.1 bits per byte, nobody knows when: no loss curve is measured yet; at the latest 6 "
         "minutes", 0.1),
    ],
)  # fmt: skip
def test_when_a_run_ends(goal: list[str], until: str, hours: float | None) -> None:
    plan, context = on_h200("1b", "hardware.dollars_per_hour=4", *goal)
    found = foresee(plan, context, H200)
    assert found.until == until and found.step_s and found.hours
    ends, width = found.between["hours"], STEP["no_gpu"]
    if hours is not None:
        assert found.hours == ends.low == ends.high == hours
    else:
        assert found.hours == pytest.approx(int(until.split()[1]) * found.step_s / 3600)
        assert ends.low == pytest.approx(width.low * found.hours)
        assert ends.high == pytest.approx(width.high * found.hours)
    assert found.between["dollars"].high == pytest.approx(4 * ends.high)
    assert f"until {until}" in told(plan, found)
    rate = found.between["tokens_per_s"]
    assert rate.high == pytest.approx(plan.batch.tokens / found.between["step_s"].low)


def test_a_target_alone_has_no_hours() -> None:
    plan, context = on_h200("1b", "goal.bits_per_byte=1.1", "schedule.steps=99")
    plan = plan.replaced(goal={"bits_per_byte": 1.1})
    found = foresee(plan, context, H200)
    assert found.hours is None and "nobody knows when" in told(plan, found)


@pytest.mark.parametrize(
    ("words", "until"),
    [
        ("goal.bits_per_byte=1.25 eval.every_steps=50", "step 150, 1.25 bits per byte as in ran"),
        ("goal.bits_per_byte=1.25 eval.every_steps=50 batch.micro_sequences=2", "step 150, 1.25 "),
        ("goal.bits_per_byte=1.25 -bf16_parameters +optimizer_offload", "ran, nobody knows"),
        ("goal.bits_per_byte=1.1", "nobody knows when: ran came down to 1.2 only"),
        ("goal.bits_per_byte=1.25 optimizer.lr=1e-5", "ran learned otherwise (optimizer.lr)"),
        ("goal.bits_per_byte=1.25 +stochastic_depth", "ran learned otherwise (other techniques)"),
        ("goal.bits_per_byte=1.25 schedule.steps=7", "a schedule of 200 steps, this one of 7"),
    ],
)  # fmt: skip
def test_a_run_tells_when_a_target_is_reached(tmp_path: Path, words: str, until: str) -> None:
    ran, context = on_h200("1b", "goal.steps=200", "model.vocab=4096")
    told_of = ((100, 1.3), (120, None), (200, 1.2), (220, 1.21), (230, 1.2))
    val = [{"tokens": n * ran.batch.tokens, "bits_per_byte": bits} for n, bits in told_of]
    (tmp_path / "ran").mkdir()
    (tmp_path / "ran" / "report.json").write_text(json.dumps({"val": val}))
    plan = changed(on_h200("1b", "goal.steps=200", "model.vocab=0")[0], words.split(), catalogue())
    curve = Curve.of(tmp_path / "ran", learns_otherwise(ran, plan))
    assert curve.why_not or curve.tokens_to(1.2) == 200 * ran.batch.tokens  # and not when again
    found = foresee(plan, at(context, plan), H200, curve=curve)
    assert until in found.until
    if found.step_s and until.startswith("step 150"):
        assert found.hours == pytest.approx(150 * found.step_s / 3600)
        assert found.between["hours"].high == pytest.approx(STEP["no_gpu"].high * found.hours)
        assert "step 150" in told(plan, found)
