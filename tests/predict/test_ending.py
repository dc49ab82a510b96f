"""When a run ends: its budgets, and what another run's loss curve tells of a target."""

import json
from pathlib import Path

import pytest
from facts import tells
from test_prediction import H200, on_h200

from headrace.cli.catalogue import catalogue
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.predict.ending import Curve, end_remedy, ending
from headrace.predict.intervals import STEP
from headrace.predict.page import format_prediction
from headrace.predict.prediction import at, predict
from headrace.tuner.effects import learns_otherwise, runs_otherwise

END_REMEDY = "headrace train PLAN until there, then headrace plan PLAN --after RUN, tell it"


@pytest.mark.parametrize(
    ("goal", "until", "hours"),
    [
        (["goal.minutes=30", "goal.steps=10000000"], "30 minutes", 0.5),
        (["goal.dollars=8"], "step 24", None),
        (["goal.dollars=8", "goal.steps=10000000"], "$8.00", 2.0),
        (["goal.tokens=3276800", "goal.steps=1000"], "step 100", None),
        (
            ["goal.bits_per_byte=1.1", "goal.minutes=6", "goal.steps=10000000"],
            f"1.1 bits per byte, nobody knows when: no loss curve is measured yet ({END_REMEDY}); "
            "at the latest 6 minutes",
            0.1,
        ),
    ],
)
def test_when_a_run_ends(goal: list[str], until: str, hours: float | None) -> None:
    plan, context = on_h200("1b", "hardware.dollars_per_hour=4", *goal)
    found = predict(plan, context, H200)
    assert found.run.until == until and found.time.step_s and found.run.hours
    ends, width = found.run.hours_between, STEP["no_gpu"]
    if hours is not None:
        assert found.run.hours == ends.low == ends.high == hours
    else:
        assert found.run.hours == pytest.approx(int(until.split()[1]) * found.time.step_s / 3600)
        assert ends.low == pytest.approx(width.low * found.run.hours)
        assert ends.high == pytest.approx(width.high * found.run.hours)
    assert found.run.dollars_between.high == pytest.approx(4 * ends.high)
    assert f"until {until}" in format_prediction(plan, found)
    rate = found.time.rate_between
    assert rate.high == pytest.approx(plan.batch.tokens / found.time.step_between.low)


def test_a_target_alone_has_no_hours() -> None:
    plan, context = on_h200("1b", "goal.bits_per_byte=1.1", "schedule.steps=99")
    plan = plan.replaced(goal={"bits_per_byte": 1.1})
    found = predict(plan, context, H200)
    assert found.run.hours is None and "nobody knows when" in format_prediction(plan, found)


@pytest.mark.parametrize(
    ("words", "until"),
    [
        ("goal.bits_per_byte=1.25 eval.every_steps=50", "step 150, 1.25 bits per byte as in ran"),
        ("goal.bits_per_byte=1.25 eval.every_steps=50 batch.micro_sequences=2", "step 150, 1.25 "),
        (
            "goal.bits_per_byte=1.25 -bf16_parameters -cudnn_attention +flex_attention "
            "model.precision=fp32",
            "ran, nobody knows",
        ),
        ("goal.bits_per_byte=1.1", "nobody knows when: ran came down to 1.2 only"),
        ("goal.bits_per_byte=1.25 optimizer.lr=1e-5", "ran learned otherwise (optimizer.lr)"),
        ("goal.bits_per_byte=1.25 +stochastic_depth", "ran learned otherwise (other techniques)"),
        ("goal.bits_per_byte=1.25 schedule.steps=7", "a schedule of 200 steps, this one of 7"),
    ],
)
def test_a_run_tells_when_a_target_is_reached(tmp_path: Path, words: str, until: str) -> None:
    ran, context = on_h200("1b", "goal.steps=200", "model.vocab=4096")
    told_of = ((100, 1.3), (120, None), (200, 1.2), (220, 1.21), (230, 1.2))
    val = [{"tokens": n * ran.batch.tokens, "bits_per_byte": bits} for n, bits in told_of]
    (tmp_path / "ran").mkdir()
    (tmp_path / "ran" / "report.json").write_text(json.dumps({"val": val}))
    plan = changed(on_h200("1b", "goal.steps=200", "model.vocab=0")[0], words.split(), catalogue())
    curve = Curve.of(tmp_path / "ran", learns_otherwise(ran, plan))
    assert curve.why_not or curve.tokens_to(1.2) == 200 * ran.batch.tokens  # and not when again
    found = predict(plan, at(context, plan), H200, curve=curve)
    assert until in found.run.until
    if found.time.step_s and until.startswith("step 150"):
        assert found.run.hours == pytest.approx(150 * found.time.step_s / 3600)
        assert found.run.hours_between.high == pytest.approx(STEP["no_gpu"].high * found.run.hours)
        assert "step 150" in format_prediction(plan, found)


def ran_on_a_cpu(folder: Path, plan: Plan, *words: str) -> tuple[Plan, Curve]:
    """A plan with changes, and the run of the plan: 3 s a step, and 2, 4 and 3 s to validate."""
    val, clock = [], ((100, 302.0, 1.3), (200, 606.0, 1.25), (300, 909.0, 1.2))
    for step, wall_s, bits in clock:
        tokens = step * plan.batch.tokens
        val.append({"tokens": tokens, "wall_s": wall_s, "bits_per_byte": bits})
    report = {"val": val, "tokens": 350 * plan.batch.tokens, "wall_s": 1059.0}
    (folder / "ran").mkdir(exist_ok=True)
    (folder / "ran" / "report.json").write_text(json.dumps(report))
    asked = changed(plan, words, catalogue())
    why_not, otherwise = learns_otherwise(plan, asked), runs_otherwise(plan, asked)
    return asked, Curve.of(folder / "ran", why_not, otherwise)


CPU = ["device=cpu", "goal.steps=350", "eval.every_steps=100"]
OTHERWISE = (
    f"a step's time is not predicted, and ran ran otherwise (eval.every_steps) ({END_REMEDY})"
)


@pytest.mark.parametrize(
    ("words", "until", "seconds"),
    [
        ("goal.bits_per_byte=1.28", "step 200, 1.28 bits per byte as in ran, on the clock", 606.0),
        ("goal.bits_per_byte=1.1", "ran came down to 1.2 only, after 15 min", 1059.0),
        (
            "goal.bits_per_byte=1.28 goal.minutes=10",
            "step 200, 1.28 bits per byte as in ran, which takes 10 min; at the latest 10 minutes",
            600.0,
        ),
        ("goal.steps=400", "step 400, on the clock of ran", 1209.0),
        (
            "goal.bits_per_byte=1.28 eval.every_steps=50",
            f"step 350 or step 150, 1.28 bits per byte as in ran, nobody knows when: {OTHERWISE}",
            None,
        ),
        (
            "eval.every_steps=50 goal.minutes=6",
            f"step 350, nobody knows when: {OTHERWISE}; at the latest 6 minutes",
            360.0,
        ),
        ("goal.bits_per_byte=1.28 optimizer.lr=1e-5", "(optimizer.lr)", 1059.0),
    ],
)
def test_the_clock_of_a_run_tells_where_no_step_is_foreseen(
    tmp_path: Path, words: str, until: str, seconds: float | None
) -> None:
    plan = on_h200("1b", *CPU, "schedule.steps=350")[0]
    plan, curve = ran_on_a_cpu(tmp_path, plan, *words.split())
    told, hours, between = ending(plan, None, None, curve)
    assert until in told and told.count(END_REMEDY) <= 1
    if seconds is None:
        assert hours is None and not between
        return
    assert hours is not None and 3600 * hours == pytest.approx(seconds, rel=2e-3)
    ends = between
    assert ends is not None
    if told.endswith("between validations)"):
        paces = (1059 - 909) / 50, (1059 - 302) / 250, (606 - 302) / 100
        assert ends.low == pytest.approx(hours * paces[0] / paces[1])
        assert ends.high == pytest.approx(hours * paces[2] / paces[1])
    else:
        assert ends.low <= ends.high == hours


def test_few_stretches_say_nothing_of_how_steady_a_clock_was(tmp_path: Path) -> None:
    plan, whole = ran_on_a_cpu(tmp_path, on_h200("1b", *CPU)[0])
    curve = Curve("ran", whole.points, clock=whole.clock[:3])
    told, hours, between = ending(plan, None, None, curve)
    assert tells(told, "step 350", "clock", "ran") and hours and not between
    one = Curve("ran", whole.points, clock=whole.clock[:1])
    _, hours, _ = ending(plan, None, None, one)
    assert hours is not None and 3600 * hours == pytest.approx(3.5 * 302)
    told, hours, _ = ending(plan, None, None, Curve("ran", whole.points))
    assert hours is None and "ran has no clock" in told


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        (["mesh.data=4"], "torchrun --nproc-per-node 4 -m headrace train"),
        (
            ["mesh.data=16", "batch.tokens=65536"],
            "torchrun --nnodes 2 --nproc-per-node 8 ... -m headrace train",
        ),
        (
            ["mesh.data=16", "batch.tokens=65536", "device=cpu"],
            "torchrun --nproc-per-node 16 -m headrace train",
        ),
    ],
)
def test_a_run_of_several_ranks_is_started_by_torchrun(words: list[str], begin: str) -> None:
    plan, _ = on_h200("1b", "goal.bits_per_byte=1.1", *words)
    assert end_remedy(plan) == END_REMEDY.replace("headrace train", begin, 1)
    assert end_remedy(plan) in ending(plan, None, None)[0]
