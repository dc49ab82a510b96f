"""`truth` from rows whose numbers were worked out by hand, and rows that must not count."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import tells
from scoring import MARKS, compute, judge, notes, table
from scoring.accuracy import wilson
from scoring.marks import places
from scoring.numbers import QUIET
from scoring.pairs import retracted
from truth_rows import (
    Row,
    Topics,
    all_topics,
    fault,
    forecast,
    healthy,
    metric,
    outcome,
    pick,
    prediction,
    said,
    write,
)

from headrace.core.errors import ConfigError
from headrace.plan.symptoms import BOTTLENECKS

EXPECTED = {
    "doctor_top1": (2 / 4, 4),
    "doctor_false_alarms": (1 / 4, 4),
    "doctor_first_remedy_near_best": (2 / 3, 3),
    "doctor_healthy_wrong": (0, 3),
    "forecast_coverage": (2 / 3, 3),
    "forecast_median_error": (0.25, 3),
    "forecast_natural_coverage": (1 / 2, 2),
    "overhead_always_on": (0.002, 2),
    "overhead_with_bursts": (0.004, 1),
    "step_time_error_no_gpu": (0.2, 2),  # 0.1 and 0.3
    "step_time_error_after_probes": (0.05, 1),
    "step_time_error_after_20_steps": (None, 0),
    "cpu_step_time_error": (0.1, 1),
    "memory_allocated_error": (0.1, 3),  # 0.1, 0.25 and 0.01
    "memory_reserved_error": (0.495, 3),  # 0.45, 0.625 and 0.495
    "false_fits": (1, 7),  # a, b twice, c, d, f, and e, which nobody ran
    "pick_regret": ((0.1 + 0 + 0.4) / 3, 3),
    "kendall_tau": ((1 / 3 + 1 + 0) / 3, 3),
    "tuner_ratio": (1.01, 2),
    "tuner_small_ratio": (1.03, 1),
    "tuner_exact_rejected": (1, 2),
    "tuner_losers_kept": (1, 1),
}


def test_forecasts_of_runs_count_alone_once_there_are_enough(tmp_path: Path) -> None:
    """Check that forecasts of plans that nobody ran no longer count once there are 40 of runs."""
    inside, outside = forecast(0.1, 0.2, 0.3, 0.2), forecast(0.1, 0.2, 0.3, 0.4)
    plans = [outside, *[inside] * 3]
    for n, counted in ((39, 43), (40, 40)):
        runs = [{**inside, "of": "run"}] * n
        rows = [*plans, *runs]
        found = compute(write(tmp_path, {"forecasts": rows, "forecasts_said": [*map(said, rows)]}))
        told = found["forecast_coverage"]
        assert told["n"] == found["forecast_median_error"]["n"] == counted
        assert told["value"] == (1.0 if n == 40 else pytest.approx(42 / 43))
        assert (told["of"]["plan"]["value"], told["of"]["plan"]["n"]) == (0.75, 4)
        assert (told["of"]["run"]["value"], told["of"]["run"]["n"]) == (1.0, n)
        (line,) = (line for line in notes(found) if line.startswith("gains in their interval"))
        assert tells(line, "run", "100%", n, "plan", "75%", 4)
    refused = {"remedy": "x", "workload": "w", "refused": "out of memory", "metrics": {}}
    rows = [*[outside] * 60, *runs, refused]
    found = compute(write(tmp_path, {"forecasts": rows}))
    error, told = found["forecast_median_error"], found["forecast_coverage"]
    assert (error["value"], told["value"]) == (0, 1) and error["refused"] == told["refused"] == 1


def test_every_number_is_that_of_the_hand(tmp_path: Path) -> None:
    found = compute(write(tmp_path, all_topics()))
    assert list(found) == list(MARKS) == list(EXPECTED)
    for name, (value, n) in EXPECTED.items():
        assert found[name]["n"] == n, name
        assert found[name]["value"] == (None if value is None else pytest.approx(value)), name
    json.dumps(found, allow_nan=False)


def test_what_stands_beside_the_values(tmp_path: Path) -> None:
    found = compute(write(tmp_path, all_topics()))
    top1 = found["doctor_top1"]
    counted = ("abstained", "mild", "faults", "workloads", "held_out_faults", "held_out_workloads")
    assert [top1[key] for key in counted] == [1, 1, 3, 2, 1, 1]
    assert top1["held_out"]["value"] == 0.5 and top1["held_out"]["n"] == 2
    assert (top1["low"], top1["high"]) == (wilson(2, 4).low, wilson(2, 4).high)
    assert found["forecast_coverage"]["width"] == pytest.approx(1.0)
    always = found["overhead_always_on"]
    assert (always["low"], always["high"], always["worst"]) == (0.0005, 0.005, 0.003)
    assert found["tuner_ratio"]["worst"] == 0.99 and found["tuner_ratio"]["workloads"] == 2
    fits = found["false_fits"]
    told = ("run", "risky_run", "risky_not_run", "false_refusals")
    assert [fits[key] for key in told] == [6, 4, 0, 1]
    assert found["step_time_error_no_gpu"]["open"] == 1
    assert found["step_time_error_after_probes"]["late"] == 1
    assert found["memory_allocated_error"]["configurations"] == 2


def test_severities_are_counted_as_they_were_asked_for(tmp_path: Path) -> None:
    rows = [
        fault("item", "launch", severity=s, wanted=w)
        for s, w in ((0.21, 0.2), (0.22, 0.2), (0.43, 0.4))
    ]
    assert compute(write(tmp_path, {"doctor": rows}))["doctor_top1"]["severities"] == 2


def test_repeats_of_an_overhead_count_by_their_precision(tmp_path: Path) -> None:
    wide = metric(
        "overhead",
        -0.003,
        0.002,
        0.007,
        measurement="with_bursts",
        shape="a",
        hardware="GPU",
        every_steps=1000,
        n=8,
    )
    narrow = {**wide, **metric("overhead", 0.0, 0.001, 0.002), "n": 40}
    path = write(tmp_path, {"overhead": [wide, narrow]})
    found = compute(path)["overhead_with_bursts"]
    value, half = (1 * 2 + 25 * 1) / 26 / 1000, 26**-0.5 * 5 / 1000  # weights 1 and 25
    assert (found["n"], found["readings"]) == (1, 48)
    told = [found[key] for key in ("value", "worst", "low", "high")]
    assert told == pytest.approx([value, value, value - half, value + half])
    assert judge("overhead_with_bursts", found) == "met"
    far = {**narrow, **metric("overhead", 0.011, 0.012, 0.013)}  # repeats that contradict it
    found = compute(write(tmp_path, {"overhead": [narrow, far]}))["overhead_with_bursts"]
    half = 1.96 * (2 * 5.5**2) ** 0.5 * 2**-0.5 / 1000
    assert [found["low"], found["high"]] == pytest.approx([0.0065 - half, 0.0065 + half])
    for other in ({"shape": "b"}, {"hardware": "other"}, {"every_steps": 100}):
        apart = compute(write(tmp_path, {"overhead": [wide, {**narrow, **other}]}))
        told = [apart["overhead_with_bursts"][key] for key in ("value", "low", "high")]
        assert told == pytest.approx([0.0015, -0.003, 0.007]), other
    exact = [metric("overhead", v, v, v, measurement="always_on") for v in (0.001, 0.003)]
    found = compute(write(tmp_path, {"overhead": exact}))["overhead_always_on"]
    assert found["value"] == pytest.approx(0.002)


def test_verdicts_are_told_apart_by_device(tmp_path: Path) -> None:
    cpu, gpu = {"hardware": "Xeon (R), 2 cores"}, {"hardware": "NVIDIA H200"}
    more = {"hardware": "Other, 8 cores"}
    rows = [
        fault("item", "input", **cpu),
        fault("item", "launch", **cpu),
        fault("item", "input", **more),
        fault("item", "input", **gpu),
        fault("item", "input", severity=0.01, **gpu),
        {**healthy("launch"), **gpu},
    ]
    found = compute(write(tmp_path, {"doctor": rows}))
    top1, alarms = found["doctor_top1"], found["doctor_false_alarms"]
    by = {name: (part["value"], part["n"]) for name, part in top1["by_hardware"].items()}
    assert by == {"Xeon (R), 2 cores": (0.5, 2), "NVIDIA H200": (1.0, 1), "Other, 8 cores": (1, 1)}
    assert alarms["by_hardware"]["NVIDIA H200"]["n"] == 1
    assert tells(places(top1), 3, "CPU", 1, "NVIDIA H200")
    assert any(tells(note, "healthy", "blamed", 1, "NVIDIA H200") for note in notes(found))
    assert places(found["tuner_ratio"]) == ""


def test_without_rows_nothing_is_said(tmp_path: Path) -> None:
    found = compute(tmp_path)
    assert {(name, n["value"], n["n"]) for name, n in found.items()} == {
        (name, None, 0) for name in EXPECTED
    }
    assert {row[-1] for row in table(found)} == {"not measured yet"}
    only_said = [prediction("a", "no_gpu", 1.0, 1, True), prediction("b", "no_gpu", 1.0, 1, True)]
    assert compute(write(tmp_path, {"plans": only_said}))["false_fits"]["value"] is None
    with pytest.raises(ConfigError, match="there is no folder"):
        compute(tmp_path / "nowhere")


def test_rows_that_do_not_count(tmp_path: Path) -> None:
    before = compute(write(tmp_path, all_topics()))
    topics = all_topics()
    for rows in topics.values():
        rows.insert(0, {**rows[0], "kind": "tune"})
        rows.append({"refused": "out of memory", "metrics": {}})
        rows.append(
            {
                **rows[1],
                "id": "z",
                "nonsense": True,
                "held_out": "no",
                "forecast": None,
                "tier": 3,
                "candidates": [],
                "metrics": None,
            }
        )
        rows.append({"retracts": len(rows), "reason": "written wrong", "metrics": {}})
    after = compute(write(tmp_path, topics))
    assert {n: (f["value"], f["n"]) for n, f in before.items()} == {
        n: (f["value"], f["n"]) for n, f in after.items()
    }
    assert after["pick_regret"]["refused"] == after["doctor_top1"]["refused"] == 1


@pytest.mark.parametrize("name", BOTTLENECKS)
def test_a_healthy_run_is_blamed_by_every_bottleneck(tmp_path: Path, name: str) -> None:
    found = compute(write(tmp_path, {"doctor": [healthy(name)]}))["doctor_false_alarms"]
    assert (found["value"], found["n"]) == (float(name not in QUIET), 1)
    assert QUIET == (None, "computation", "not measured")


def test_a_retracted_prediction_is_told_beside_an_outcome_that_stands(tmp_path: Path) -> None:
    rows: list[Row] = [
        prediction("a", "no_gpu", 1.0, 100, True),
        outcome("a", 1.5, 100, True),
        {"retracts": 1, "reason": "a wrong probe"},
    ]
    assert [why for *_, why in retracted(write(tmp_path, {"plans": rows}))] == ["a wrong probe"]
    rows.append({"retracts": 2, "reason": "another plan"})
    assert retracted(write(tmp_path, {"plans": rows})) == []
    rows.append(outcome("a", 2.0, 100, True))
    (told,) = retracted(write(tmp_path, {"plans": rows}))
    assert told[1].step_s == 2.0


def test_a_prediction_after_its_outcome_is_none(tmp_path: Path) -> None:
    said, came = prediction("a", "no_gpu", 1.0, 100, True), outcome("a", 1.5, 100, False)
    right = compute(write(tmp_path, {"plans": [said, came]}))
    late = compute(write(tmp_path, {"plans": [came, said]}))
    for name in ("step_time_error_no_gpu", "memory_allocated_error", "false_fits"):
        assert right[name]["n"] == 1 and late[name]["n"] == 0, name


@pytest.mark.parametrize(
    "other",
    [
        {"date": "2026-11-24"},
        {"commit": "def5678"},
        {"of": "run"},
        {"remedy": "fused_rope"},
        {"workload": "long"},
        {"baseline_sha256": "0"},
        *(
            {"forecast": {"low": 0.1, "value": 0.2, "high": 0.3, key: v}}
            for key, v in (("low", 0.05), ("value", 0.25), ("high", 0.5))
        ),
    ],
    ids=str,
)
def test_a_forecast_that_was_not_said_by_then_is_late(tmp_path: Path, other: Row) -> None:
    rows = [forecast(0.1, 0.2, 0.3, 0.2), {**forecast(0.1, 0.2, 0.4, 0.9), "remedy": "x"}]
    told: Topics = {"forecasts": rows, "forecasts_said": [said(row) for row in rows]}
    assert compute(write(tmp_path, told))["forecast_coverage"]["n"] == 2
    told["forecasts_said"][0] |= other
    found = compute(write(tmp_path, told))
    for name in ("forecast_coverage", "forecast_median_error"):
        assert (found[name]["n"], found[name]["late"]) == (1, 1)
    assert found["forecast_coverage"]["value"] == 0
    (line,) = (line for line in notes(found) if line.startswith("error of a forecast gain"))
    assert tells(line, 1, "before their outcome", "not counted")


def test_a_forecast_of_which_nothing_was_said_or_stands_is_late(tmp_path: Path) -> None:
    row = forecast(0.1, 0.2, 0.3, 0.2)
    alone = compute(write(tmp_path, {"forecasts": [row]}))["forecast_coverage"]
    gone = [said(row), {"retracts": 1, "reason": "said again"}]
    found = compute(write(tmp_path, {"forecasts_said": gone}))["forecast_coverage"]
    assert alone == found and (found["value"], found["n"], found["late"]) == (None, 0, 1)
    again = compute(write(tmp_path, {"forecasts_said": [*gone, said(row)]}))["forecast_coverage"]
    assert (again["n"], again["late"]) == (1, 0)


def test_every_forecast_that_was_measured_here_was_said_before() -> None:
    found = compute(Path(__file__).parents[2] / "results")["forecast_coverage"]
    assert found["late"] == 0 and sum(part["n"] for part in found["of"].values()) >= 160


def test_retracted_rows_are_told_beside_what_stands(tmp_path: Path) -> None:
    topics = all_topics()
    topics["plans"] += [{"retracts": 1, "reason": "a wrong probe"}]  # off by 0.1
    topics["doctor"] += [{"retracts": number, "reason": "wrong"} for number in (3, 5, 9)]
    topics["tuner"] += [{"retracts": 1, "reason": "by another tuner"}]
    topics["picks"] += [{"retracts": 3, "reason": "wrong"}]
    topics["forecasts"] += [{"retracts": 1, "reason": "wrong"}]
    found = compute(write(tmp_path, topics))
    for name, value, n, gone, every in (
        ("step_time_error_no_gpu", 0.3, 1, 1, 0.2),
        ("doctor_top1", 2 / 3, 3, 2, 2 / 5),  # one of them was mild
        ("doctor_false_alarms", 0, 3, 1, 1 / 4),
        ("tuner_ratio", 1.03, 1, 1, 1.01),
        ("pick_regret", 0.05, 2, 1, 0.5 / 3),
    ):
        assert (found[name]["value"], found[name]["n"]) == (pytest.approx(value), n), name
        told = found[name]["with_retracted"]
        assert (told["value"], told["n"]) == (pytest.approx(every), n + gone), name
        assert found[name]["retracted"] == gone, name
    assert found["forecast_coverage"]["retracted"] == 1
    told = "; ".join(notes(found))
    assert tells(told, "2 retracted", "not counted", "40%", 5)
    assert tells(told, "1 retracted", "not counted", "20%", 2)
    assert "with_retracted" not in found["step_time_error_after_probes"]


def test_the_newest_try_of_each_workload_is_told_beside_the_mean(tmp_path: Path) -> None:
    topics = all_topics()
    facts = {"workload": "160m", "date": "2026-11-23", "commit": "abc1234", "minutes": 8.0}
    topics["tuner"].append(metric("ratio_to_best", 1.0, 1.02, 1.03, **facts))
    found = compute(write(tmp_path, topics))
    told = found["tuner_ratio"]
    assert (told["n"], told["worst"], told["value"]) == (3, 0.99, pytest.approx(3.04 / 3))
    newest = {key: value for key, value in facts.items() if key != "workload"}
    assert told["of"]["160m"] == {"value": 1.02, **newest}
    assert told["of"]["1b"]["value"] == 1.03
    (line,) = (line for line in notes(found) if line.startswith("tuned over the best row"))
    assert tells(line, "worst 99%", "newest", "160m 102%", "1b 103%")


def _set(topic: str, at: int, **to: Any) -> Callable[[Topics], None]:
    def change(topics: Topics) -> None:
        topics[topic][at] = {**topics[topic][at], **to}

    return change


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (_set("doctor", 2, verdict=3), "doctor.jsonl:3", "fault.verdict"),
        (_set("doctor", 0, measurement="faults"), "doctor.jsonl:1", "measurement"),
        (_set("doctor", 0, abstained="no"), "doctor.jsonl:1", "abstained"),
        (_set("forecasts", 1, measured=0), "forecasts.jsonl:2", "exactly 0"),
        (_set("forecasts", 1, forecast={"low": 2, "value": 1, "high": 3}), ":2", "2.0 <= 1.0"),
        (_set("overhead", 0, metrics={}), "overhead.jsonl:1", "metrics.overhead"),
        (_set("plans", 1, id="a"), "plans.jsonl:2", "a second prediction of 'a'"),
        (_set("plans", 9, id="a"), "plans.jsonl:10", "a second outcome of 'a'"),
        (_set("plans", 6, step_s=-1.0), "plans.jsonl:7", "outcome.step_s"),
        (_set("forecasts", 1, measured=float("nan")), "forecasts.jsonl:2", "measured"),
        (_set("plans", 0, tier="guess"), "plans.jsonl:1", "tier"),
        (_set("picks", 0, candidates=[]), "picks.jsonl:1", "candidates"),
        (_set("tuner", 1, retracts=2), "tuner.jsonl:2", "retracts 2, which is no row before it"),
        (_set("tuner", 1, retracts=0), "tuner.jsonl:2", "retracts 0, which is no row before it"),
    ],
)
def test_a_wrong_row_is_told_by_file_and_line(
    tmp_path: Path, change: Callable[[Topics], None], where: str, what: str
) -> None:
    topics = all_topics()
    change(topics)
    with pytest.raises(ConfigError) as caught:
        compute(write(tmp_path, topics))
    assert where in caught.value.message and what in caught.value.message


def test_half_a_row_is_told_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "picks.jsonl").write_text(json.dumps(pick((1, 1), (2, 2))) + '\n\n{"workload":\n')
    with pytest.raises(ConfigError, match=r"picks\.jsonl:3: not JSON"):
        compute(tmp_path)
