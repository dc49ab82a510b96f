"""What `truth` makes of its numbers: met, not met or too few of what, and the table of them."""

import math
from pathlib import Path
from statistics import median

import pytest
from facts import tells
from scoring import HEAD, MARKS, compute, judge, notes, table
from scoring.number import as_errors
from truth_rows import Row, all_topics, fault, write


def test_faults_at_few_severities_are_named(tmp_path: Path) -> None:
    told = {"full_memory": (0.2,), "items": (0.2,), "spikes": (0.2, 0.4), "slow": (0.1, 0.2, 0.4)}
    rows = [fault(name, "input", severity=s) for name, levels in told.items() for s in levels]
    found = compute(write(tmp_path, {"doctor": rows}))["doctor_top1"]
    marked = judge("doctor_top1", {**found, "faults": 12})
    once, twice = ("(full memory, items)", "one severity"), ("(spikes)", "two severities")
    assert tells(marked, "too few:", *once, *twice, "three")


@pytest.mark.parametrize(
    ("name", "found", "verdict"),
    [
        ("forecast_median_error", {"value": 0.20, "n": 40}, "met"),
        ("forecast_median_error", {"value": 0.15, "n": 40}, "aim met"),
        ("forecast_median_error", {"value": 0.26, "n": 400}, "not met"),
        ("forecast_median_error", {"value": 0.15, "n": 39}, "too few: 39 of 40 wanted"),
        ("forecast_coverage", {"value": 0.95, "n": 40, "width": 0.1}, "not met"),
        ("forecast_coverage", {"value": 0.85, "n": 40, "width": 0.59}, "met"),
        (
            "forecast_coverage",
            {"value": 0.85, "n": 40, "width": 0.7},
            "not met: their median width, 70% of the gain, is above 60%",
        ),
        ("false_fits", {"value": 0, "n": 200, "risky_run": 30, "risky_not_run": 0}, "met"),
        ("false_fits", {"value": 1, "n": 900, "risky_run": 30, "risky_not_run": 0}, "not met"),
        (
            "false_fits",
            {"value": 0, "n": 200, "risky_run": 0, "risky_not_run": 0},
            "too few: 0 of 1 wanted runs of risky ones",
        ),
        (
            "false_fits",
            {"value": 0, "n": 200, "risky_run": 9, "risky_not_run": 1},
            "not met: 1 of the risky ones not run",
        ),
        ("tuner_ratio", {"value": 1.03, "n": 4, "workloads": 4}, "aim met"),
        ("tuner_ratio", {"value": 0.96, "n": 4, "workloads": 4}, "not met"),
        ("kendall_tau", {"value": 0.89, "n": 1}, "not met"),
        ("overhead_always_on", {"value": -0.0001, "high": 0.0005, "n": 1}, "aim met"),
        (
            "overhead_with_bursts",
            {"value": 0.00346, "high": 0.00759, "n": 1},
            "not met: its upper end, 0.759%, is above 0.5%",
        ),
    ],
)
def test_marks(name: str, found: Row, verdict: str) -> None:
    assert judge(name, found) == verdict


def test_every_need_of_a_mark_has_words(tmp_path: Path) -> None:
    found = compute(tmp_path)
    for name, mark in MARKS.items():
        for need, (low, high) in mark.needs.items():
            for off, side in ((high + 1, "not met: "), (low - 1, "too few: ")):
                if abs(off) == math.inf or off < 0:
                    continue
                enough = {key: max(least, 0) for key, (least, _) in mark.needs.items()}
                value = {"value": mark.must[1] if mark.must[1] < 2 else 1, **enough, need: off}
                told = judge(name, {**found[name], **value, "severities_of": {"a": 1}})
                assert told.startswith(side) and "_" not in told, (name, need, told)


def test_the_table_says_what_must_be_beside_what_is(tmp_path: Path) -> None:
    found = compute(write(tmp_path, all_topics()))
    rows = dict(zip(MARKS, table(found), strict=True))
    assert {len(row) for row in rows.values()} == {len(HEAD)}
    assert rows["forecast_coverage"][1:] == [
        "66.7% (20.8% to 93.9%)",
        "80% to 90%",
        "3/40",
        "",
        "not met",
    ]
    assert rows["false_fits"][1:] == ["1", "0", "7/200", "all", "not met"]
    assert rows["tuner_ratio"][2:] == [">= 97% (102%)", "2/4", "", "too few"]
    assert rows["overhead_always_on"][2] == "<= 0.3% (0.1%)"
    assert rows["doctor_top1"][4] == "50% of 2"
    assert rows["step_time_error_after_20_steps"][1:] == [
        "-",
        "<= 1.5% (1.9%)",
        "0/40",
        "-",
        "not measured yet",
    ]
    told = notes(found)
    left_out = "1 abstained; 1 more took under 10% of the step: not counted"
    assert f"planted faults named: {left_out}" in told
    (best,) = (line for line in told if line.startswith("tuned over the best"))
    assert tells(best, "2 of 4", "worst 99%", "160m 99%", "1b 103%")
    assert not any(line.startswith("step time after 20 steps") for line in told)


def test_nineteen_of_twenty_errors_are_within_what_is_told() -> None:
    found = as_errors([n / 100 for n in range(20, 0, -1)], median)
    assert (found["p95"], found["worst"], found["value"]) == (0.19, 0.2, pytest.approx(0.105))
    assert as_errors([0.5], median)["p95"] == 0.5
