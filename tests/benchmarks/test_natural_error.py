"""What forecasts assume of hosts is what natural runs showed."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import natural_error
import pytest
from probed_cpu import probed_cpu

from headrace.core.statistics import Interval
from headrace.costs.step import USUAL_LAUNCH, Launches
from headrace.doctor.forecast import HOSTS, ON_CPU, Hosts, MeasuredRun, by_ledger
from headrace.predict.intervals import NATURAL
from headrace.predict.prediction import EDGE

E = natural_error.EDGE_S
REST_S = natural_error.REST * natural_error.HOST_S


RESULTS = natural_error.ROOT / "results"


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    return natural_error.natural_runs(RESULTS)


@pytest.fixture(scope="module")
def one_run() -> Any:
    """Return a run of 1m on an H100 without changes."""
    plan = next(run.plan for run in natural_error.RUNS if run.id == "1m fp32 eager")
    asking = natural_error._asking(plan, RESULTS / "machines" / natural_error.MACHINES["H100"])
    before = natural_error.side(asking)
    assert before is not None and before.launched.eager > 0 and not before.launched.compiled
    return natural_error.NaturalRun("1m", "H100", MeasuredRun(0.01), before, ())


def test_the_constants_in_use_are_those_that_rows_ask_for(runs: list[Any]) -> None:
    """Check that the constants follow when rows come: `natural_error.py`."""
    gpus = [run for run in runs if not run.on_cpu]
    known = natural_error.fit(gpus)
    assert (known.eager_s, known.compiled_s) == pytest.approx(USUAL_LAUNCH, rel=0.01)
    assert known.hosts.drift == pytest.approx(HOSTS.drift, rel=0.01)
    assert known.hosts.spread == pytest.approx(HOSTS.spread, rel=0.01)
    h100 = {k: v for k, v in natural_error.wider_steps(gpus).items() if "H100" in k}
    assert [times for times, _ in h100.values()] == pytest.approx([NATURAL], rel=0.01)
    found = natural_error.left_out(gpus)
    firsts = [one.inside for one in found if one.first and "H100" in one.hardware]
    assert len(firsts) >= 20 and 0.7 <= sum(firsts) / len(firsts) <= 0.9


def test_a_row_tells_of_first_remedies_by_device(tmp_path: Path) -> None:
    def score(hardware: str, error: float, *, first: bool = True) -> Any:
        return natural_error.Score(hardware, first, True, error < 0.5, error)

    scored = [score("H100", e) for e in (0.1, 0.2, 0.9)]
    natural_error.write([*scored, score("H100", 3.0, first=False), score("H200", 0.4)], tmp_path)
    found = [json.loads(line) for line in (tmp_path / "natural_again.jsonl").open()]
    assert [(row["of"], row["n"]) for row in found] == [("H100", 3), ("H200", 1)]
    metrics = [{name: m["value"] for name, m in row["metrics"].items()} for row in found]
    assert metrics == [
        {"coverage": pytest.approx(2 / 3), "median_error": 0.2},
        {"coverage": 1.0, "median_error": 0.4},
    ]


def test_a_cpu_s_rates_are_as_far_off_as_its_rows_say() -> None:
    pairs = natural_error.recorded_pairs(RESULTS)
    assert sum(one.half for one in pairs) >= 20 and sum(not one.half for one in pairs) >= 10
    assert natural_error.fit_cpu(pairs) == pytest.approx(ON_CPU, rel=0.01)
    inside = [one.inside for one in natural_error.cpu_left_out(pairs)]
    assert 0.7 <= sum(inside) / len(inside) <= 0.9


def test_a_plan_of_other_memory_is_no_row_s_plan() -> None:
    """A recipe may change after its rows: they are no readings of today's plan."""
    plan = next(run.plan for run in natural_error.RUNS if run.id == "1m fp32 eager")
    asking = natural_error._asking(plan, RESULTS / "machines" / natural_error.MACHINES["H100"])
    changed = natural_error.side(asking, ("+tf32",))
    assert changed is not None
    peak = changed.prediction.memory.peak_bytes
    for times, is_same in ((1.0, True), (1.1, False)):
        answer = {"changes": [["+tf32"]], "peaks": [times * peak]}
        assert natural_error._same(asking, answer) == is_same


def made(run: Any, launched: Launches, said: float, came: float) -> Any:
    """Return a run that waits for launches, and how long one took when it was said and later."""
    time = replace(
        run.before.prediction.time, parts_s={"matrix products": 1e-4, EDGE: E}, host_s=0.02
    )
    prediction = replace(run.before.prediction, time=time)
    side = replace(run.before, prediction=prediction, launched=launched)
    said_s, came_s = (E + REST_S + 1000 * each_s for each_s in (said, came))
    change = natural_error.Change(("+x",), came_s, came_s, 0.0, True, True, side)
    return replace(run, measured=MeasuredRun(said_s, by_host=True), before=side, changes=(change,))


def test_a_fit_finds_what_launches_took(one_run: Any) -> None:
    eager = [made(one_run, Launches(1000.0, 1000.0, 0.0, 0.0), 2e-5, 3e-5) for _ in range(3)]
    compiled = made(one_run, Launches(1000.0, 0.0, 1000.0, 0.0), 2e-5, 1e-5)
    known = natural_error.fit([*eager, compiled])
    assert known.eager_s == pytest.approx(3e-5) and known.compiled_s == pytest.approx(1e-5)
    assert known.hosts.spread == pytest.approx(1.0)
    least = math.exp(abs(math.log((E + REST_S + 0.01) / (E + REST_S + 0.02))))
    most = (E + REST_S + 0.03) / (E + REST_S + 0.02)
    assert known.hosts.drift == pytest.approx(max(least, most))


def test_a_gain_is_forecast_by_the_constants_that_are_given(one_run: Any) -> None:
    """Compiled code that launches at half the cost halves what its launches take."""
    run = made(one_run, Launches(1000.0, 1000.0, 0.0, 0.0), 2e-5, 2e-5)
    other = replace(run.before, launched=Launches(1000.0, 0.0, 1000.0, 0.0))
    change = replace(run.changes[0], after=other)
    constants = natural_error.Constants(2e-5, 1e-5, Hosts(1.0, 1.0))
    gain = natural_error.forecast(run, change, constants)
    ends_s = (E + REST_S + 0.02), (E + REST_S + 0.01)
    assert gain is not None and gain.value == pytest.approx(ends_s[0] / ends_s[1] - 1)
    same = natural_error.Constants(2e-5, 2e-5, Hosts(1.0, 1.0))
    nothing = natural_error.forecast(run, change, same)
    assert nothing is not None and nothing.value == pytest.approx(0.0)


def test_a_factor_holds_four_of_five() -> None:
    ratios = [math.exp(0.1 * n * (-1) ** n) for n in range(1, 10)]
    assert natural_error.factor(ratios) == pytest.approx(math.exp(0.8))
    assert natural_error.factor([2.0]) == 2.0


def test_a_score_is_inside_and_as_far_off_as_it_came() -> None:
    forecast = Interval(0.1, 0.2, 0.3, 0)
    one = natural_error.Score.of("a", True, forecast, 0.25)
    assert one.inside and one.error == pytest.approx(0.2)
    assert not natural_error.Score.of("a", True, forecast, 0.4).inside
    assert natural_error.Score.of("a", True, forecast, 0.0).error == pytest.approx(20)


def test_a_row_that_names_its_rates_is_forecast_by_them(tmp_path: Path) -> None:
    """Check that a CPU's row is read with what its doctor knew, and scored."""
    machine = probed_cpu()
    (tmp_path / "machines").mkdir()
    machine.write(tmp_path / "machines" / "here.json")
    run = next(run for run in natural_error.RUNS if run.id == "300k eager")
    asking = natural_error._asking(run.plan, tmp_path / "machines" / "here.json")
    words = ("+torch_compile",)
    before, after = natural_error.side(asking), natural_error.side(asking, words)
    assert before is not None and after is not None
    knew = {"step_s": before.prediction.time.step_s, "waits_s": 0.0, "slack_s": 0.0}
    wanted = by_ledger(before.prediction, after.prediction, MeasuredRun(**knew)).gain
    assert wanted is not None
    place = {"id": run.id, "workload": run.shape, "hardware": "here, 2 cores", "device": "cpu"}
    first = {"change": words, "gain": {"low": 0.1, "value": 0.2, "high": 0.3}}
    answer = place | {
        "machine": "here.json",
        "knew": {**knew, "by_host": False},
        "first": first,
        "remedies": [first],
        "changes": [words],
        "peaks": [after.prediction.memory.peak_bytes],
    }
    change = {"change": words, "gain": {"value": wanted.value}, "before_s": 1.0, "after_s": 0.9}
    (tmp_path / "natural_said.jsonl").write_text(json.dumps(answer))
    (tmp_path / "natural.jsonl").write_text(json.dumps(place | {"measured": [change]}))
    (read,) = natural_error.natural_runs(tmp_path)
    assert read.on_cpu and not natural_error.recorded_pairs(tmp_path)
    constants = natural_error.Constants(2e-5, 1e-5, HOSTS)
    assert natural_error.forecast(read, read.changes[0], constants) == wanted
    (pair,) = natural_error.replayed_pairs([read], constants)
    assert pair.first and not pair.half and pair.score(1.0).inside
