"""`truth` from rows whose numbers were worked out by hand, and rows that must not count."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.core.statistics import wilson
from headrace.core.symptoms import BOTTLENECKS
from headrace.truth import HEAD, MARKS, compute, judge, notes, table
from headrace.truth.marks import places
from headrace.truth.numbers import QUIET, retracted

Row = dict[str, Any]
Topics = dict[str, list[Row]]


def _fault(fault: str, verdict: str | None, **other: Any) -> Row:
    return {
        "measurement": "fault", "fault": fault, "severity": 0.2, "workload": "dense",
        "held_out": False, "expected": "input", "verdict": verdict, "abstained": False,
        "thresholds": "abc1234", "metrics": {}, **other,
    }  # fmt: skip


def _healthy(verdict: str | None, abstained: bool = False) -> Row:
    return {"measurement": "healthy", "fault": None, "severity": 0, "workload": "dense",
            "verdict": verdict, "abstained": abstained}  # fmt: skip


def _forecast(low: float, value: float, high: float, measured: float) -> Row:
    told = {"low": low, "value": value, "high": high}
    return {"remedy": "torch_compile", "workload": "dense", "forecast": told, "measured": measured}


def _metric(name: str, low: float, value: float, high: float, **facts: Any) -> Row:
    return {**facts, "metrics": {name: {"low": low, "value": value, "high": high, "unit": "x"}}}


def _said(name: str, tier: str, step_s: float | None, bytes_: int | None, fits: bool | None) -> Row:
    return {"kind": "prediction", "id": name, "tier": tier, "step_s": step_s,
            "allocated_bytes": bytes_, "reserved_bytes": bytes_, "fits": fits}  # fmt: skip


def _came(name: str, step_s: float | None, allocated: int | None, fits: bool | None,
          risky: bool = False) -> Row:  # fmt: skip
    reserved = allocated and 2 * allocated
    return {"kind": "outcome", "id": name, "step_s": step_s, "allocated_bytes": allocated,
            "reserved_bytes": reserved, "fits": fits, "risky": risky}  # fmt: skip


def _pick(*times: tuple[float, float]) -> Row:
    told = [{"id": i, "predicted_s": p, "measured_s": m} for i, (p, m) in enumerate(times)]
    return {"workload": "dense", "candidates": told}


def _topics() -> Topics:
    return {
        "doctor": [
            _fault("slow_loader", "input"),
            _fault("slow_loader", "input", workload="long", held_out=True),
            _fault("tiny_kernels", "launch"),  # wrong
            _fault("item", "input", abstained=True, held_out=True),  # right, and not stood by
            _fault("slow_loader", "launch", severity=0.05),  # below the line
            _healthy("computation"),
            _healthy(None, abstained=True),
            _healthy("input", abstained=True),
            _healthy("launch"),  # a false alarm
        ],
        "forecasts": [
            _forecast(0.1, 0.2, 0.3, 0.2),  # off by 0, as wide as the gain
            _forecast(0.1, 0.2, 0.3, 0.4),  # off by a half, half as wide, outside
            _forecast(-0.15, -0.1, -0.05, -0.08),  # off by a quarter, 1.25 times as wide
        ],
        "overhead": [
            _metric("overhead", 0.0005, 0.001, 0.0015, measurement="always_on", shape="a"),
            _metric("overhead", 0.001, 0.003, 0.005, measurement="always_on", shape="b"),
            _metric("overhead", 0.003, 0.004, 0.005, measurement="with_bursts"),
        ],
        "plans": [
            _said("a", "no_gpu", 1.1, 110, True),
            _said("b", "no_gpu", 1.4, 150, True),
            _said("c", "no_gpu", 1.0, 300, True),
            _said("d", "no_gpu", 1.0, None, False),
            _said("e", "no_gpu", 1.0, 100, True),
            _said("f", "no_gpu", None, None, False),
            _came("a", 1.0, 100, True),
            _said("a", "after_probes", 1.0, 100, True),  # too late
            _said("b", "after_probes", 2.1, 202, True),
            _came("b", 2.0, 200, True, risky=True),
            _came("c", None, None, False, risky=True),  # said to fit, and did not
            _came("d", None, None, True),  # said not to fit, and did
            _came("f", None, None, False, risky=True),  # said not to fit, and did not
        ],
        "picks": [
            _pick((1.0, 1.1), (2.0, 1.0), (3.0, 1.2)),  # 10% lost; one of three pairs is wrong
            _pick((1.0, 1.0), (2.0, 2.0)),
            _pick((1.0, 1.0), (1.0, 1.4)),  # no order at all
        ],
        "tuner": [
            _metric("ratio_to_best", 0.98, 0.99, 1.0, workload="160m"),
            _metric("ratio_to_best", 1.0, 1.03, 1.05, workload="1b"),
        ],
    }


EXPECTED = {
    "doctor_top1": (2 / 4, 4),
    "doctor_false_alarms": (1 / 4, 4),
    "forecast_coverage": (2 / 3, 3),
    "forecast_median_error": (0.25, 3),
    "overhead_always_on": (0.002, 2),
    "overhead_with_bursts": (0.004, 1),
    "step_time_error_no_gpu": (0.2, 2),  # 0.1 and 0.3
    "step_time_error_after_probes": (0.05, 1),
    "step_time_error_after_20_steps": (None, 0),
    "memory_allocated_error": (0.1, 3),  # 0.1, 0.25 and 0.01
    "memory_reserved_error": (0.495, 3),  # 0.45, 0.625 and 0.495
    "false_fits": (1, 7),  # a, b twice, c, d, f, and e, which nobody ran
    "pick_regret": ((0.1 + 0 + 0.4) / 3, 3),
    "kendall_tau": ((1 / 3 + 1 + 0) / 3, 3),
    "tuner_ratio": (1.01, 2),
}


def _write(folder: Path, topics: Topics) -> Path:
    for topic, rows in topics.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{topic}.jsonl").write_text(text)
    return folder


def test_forecasts_of_runs_count_alone_once_there_are_enough(tmp_path: Path) -> None:
    """Those of plans that nobody ran are told beside them."""
    inside, outside = _forecast(0.1, 0.2, 0.3, 0.2), _forecast(0.1, 0.2, 0.3, 0.4)
    plans = [outside, *[inside] * 3]
    for n, counted in ((39, 43), (40, 40)):
        runs = [{**inside, "of": "run"}] * n
        (tmp_path / "forecasts.jsonl").write_text("\n".join(map(json.dumps, [*plans, *runs])))
        found = compute(tmp_path)
        told = found["forecast_coverage"]
        assert told["n"] == found["forecast_median_error"]["n"] == counted
        assert told["value"] == (1.0 if n == 40 else pytest.approx(42 / 43))
        assert (told["of"]["plan"]["value"], told["of"]["plan"]["n"]) == (0.75, 4)
        assert (told["of"]["run"]["value"], told["of"]["run"]["n"]) == (1.0, n)
        (line,) = (line for line in notes(found) if line.startswith("gains in their interval"))
        assert f"of a run 100% of {n}; of a plan 75% of 4" in line
    refused = {"remedy": "x", "workload": "w", "refused": "out of memory", "metrics": {}}
    rows = [*[outside] * 60, *runs, refused]
    (tmp_path / "forecasts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = compute(tmp_path)
    error, told = found["forecast_median_error"], found["forecast_coverage"]
    assert (error["value"], told["value"]) == (0, 1) and error["refused"] == told["refused"] == 1


def test_every_number_is_that_of_the_hand(tmp_path: Path) -> None:
    found = compute(_write(tmp_path, _topics()))
    assert list(found) == list(MARKS) == list(EXPECTED)
    for name, (value, n) in EXPECTED.items():
        assert found[name]["n"] == n, name
        assert found[name]["value"] == (None if value is None else pytest.approx(value)), name
    json.dumps(found, allow_nan=False)


def test_what_stands_beside_the_values(tmp_path: Path) -> None:
    found = compute(_write(tmp_path, _topics()))
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
    rows = [_fault("item", "launch", severity=s, wanted=w)
            for s, w in ((0.21, 0.2), (0.22, 0.2), (0.43, 0.4))]  # fmt: skip
    assert compute(_write(tmp_path, {"doctor": rows}))["doctor_top1"]["severities"] == 2


def test_repeats_of_an_overhead_count_by_their_precision(tmp_path: Path) -> None:
    wide = _metric("overhead", -0.003, 0.002, 0.007, measurement="with_bursts", shape="a",
                   hardware="GPU", every_steps=1000, n=8)  # fmt: skip
    narrow = {**wide, **_metric("overhead", 0.0, 0.001, 0.002), "n": 40}
    path = _write(tmp_path, {"overhead": [wide, narrow]})
    found = compute(path)["overhead_with_bursts"]
    value, half = (1 * 2 + 25 * 1) / 26 / 1000, 26**-0.5 * 5 / 1000  # weights 1 and 25
    assert (found["n"], found["readings"]) == (2, 48)
    told = [found[key] for key in ("value", "worst", "low", "high")]
    assert told == pytest.approx([value, value, value - half, value + half])
    assert judge("overhead_with_bursts", found) == "met"
    far = {**narrow, **_metric("overhead", 0.011, 0.012, 0.013)}  # repeats that contradict it
    found = compute(_write(tmp_path, {"overhead": [narrow, far]}))["overhead_with_bursts"]
    half = 1.96 * (2 * 5.5**2) ** 0.5 * 2**-0.5 / 1000
    assert [found["low"], found["high"]] == pytest.approx([0.0065 - half, 0.0065 + half])
    for other in ({"shape": "b"}, {"hardware": "other"}, {"every_steps": 100}):
        apart = compute(_write(tmp_path, {"overhead": [wide, {**narrow, **other}]}))
        told = [apart["overhead_with_bursts"][key] for key in ("value", "low", "high")]
        assert told == pytest.approx([0.0015, -0.003, 0.007]), other
    exact = [_metric("overhead", v, v, v, measurement="always_on") for v in (0.001, 0.003)]
    found = compute(_write(tmp_path, {"overhead": exact}))["overhead_always_on"]
    assert found["value"] == pytest.approx(0.002)


def test_verdicts_are_told_apart_by_device(tmp_path: Path) -> None:
    cpu, gpu = {"hardware": "Xeon (R), 2 cores"}, {"hardware": "NVIDIA H200"}
    more = {"hardware": "Other, 8 cores"}
    rows = [_fault("item", "input", **cpu), _fault("item", "launch", **cpu),
            _fault("item", "input", **more), _fault("item", "input", **gpu),
            _fault("item", "input", severity=0.01, **gpu),
            {**_healthy("launch"), **gpu}]  # fmt: skip
    found = compute(_write(tmp_path, {"doctor": rows}))
    top1, alarms = found["doctor_top1"], found["doctor_false_alarms"]
    by = {name: (part["value"], part["n"]) for name, part in top1["by_hardware"].items()}
    assert by == {"Xeon (R), 2 cores": (0.5, 2), "NVIDIA H200": (1.0, 1), "Other, 8 cores": (1, 1)}
    assert alarms["by_hardware"]["NVIDIA H200"]["n"] == 1
    assert places(top1) == "3 on a CPU, 1 on an NVIDIA H200"
    assert "healthy runs blamed: 1 on an NVIDIA H200" in notes(found)
    assert places(found["tuner_ratio"]) == ""


def test_faults_at_few_severities_are_named(tmp_path: Path) -> None:
    told = {"full_memory": (0.2,), "items": (0.2,), "spikes": (0.2, 0.4), "slow": (0.1, 0.2, 0.4)}
    rows = [_fault(name, "input", severity=s) for name, levels in told.items() for s in levels]
    found = compute(_write(tmp_path, {"doctor": rows}))["doctor_top1"]
    marked = judge("doctor_top1", {**found, "faults": 12})
    assert marked == (
        "too few: two kinds (full memory, items) were run at one severity only, "
        "one kind (spikes) was run at two severities only, of three wanted"
    )


def test_without_rows_nothing_is_said(tmp_path: Path) -> None:
    found = compute(tmp_path)
    assert {(name, n["value"], n["n"]) for name, n in found.items()} == {
        (name, None, 0) for name in EXPECTED
    }
    assert {row[-1] for row in table(found)} == {"not measured"}
    only_said = [_said("a", "no_gpu", 1.0, 1, True), _said("b", "no_gpu", 1.0, 1, True)]
    assert compute(_write(tmp_path, {"plans": only_said}))["false_fits"]["value"] is None
    with pytest.raises(ConfigError, match="there is no folder"):
        compute(tmp_path / "nowhere")


def test_rows_that_do_not_count(tmp_path: Path) -> None:
    before = compute(_write(tmp_path, _topics()))
    topics = _topics()
    for rows in topics.values():
        rows.insert(0, {**rows[0], "kind": "tune"})
        rows.append({"refused": "out of memory", "metrics": {}})
        rows.append({**rows[1], "id": "z", "nonsense": True, "held_out": "no", "forecast": None,
                     "tier": 3, "candidates": [], "metrics": None})  # fmt: skip
        rows.append({"retracts": len(rows), "reason": "written wrong", "metrics": {}})
    after = compute(_write(tmp_path, topics))
    assert {n: (f["value"], f["n"]) for n, f in before.items()} == {
        n: (f["value"], f["n"]) for n, f in after.items()
    }
    assert after["pick_regret"]["refused"] == after["doctor_top1"]["refused"] == 1


@pytest.mark.parametrize("name", BOTTLENECKS)
def test_a_healthy_run_is_blamed_by_every_bottleneck(tmp_path: Path, name: str) -> None:
    found = compute(_write(tmp_path, {"doctor": [_healthy(name)]}))["doctor_false_alarms"]
    assert (found["value"], found["n"]) == (float(name not in QUIET), 1)
    assert QUIET == (None, "computation", "not measured")


def test_a_retracted_prediction_is_told_beside_an_outcome_that_stands(tmp_path: Path) -> None:
    rows: list[Row] = [
        _said("a", "no_gpu", 1.0, 100, True), _came("a", 1.5, 100, True),
        {"retracts": 1, "reason": "a wrong probe"},
    ]  # fmt: skip
    assert [why for *_, why in retracted(_write(tmp_path, {"plans": rows}))] == ["a wrong probe"]
    rows.append({"retracts": 2, "reason": "another plan"})
    assert retracted(_write(tmp_path, {"plans": rows})) == []
    rows.append(_came("a", 2.0, 100, True))
    (told,) = retracted(_write(tmp_path, {"plans": rows}))
    assert told[1].step_s == 2.0


def test_a_prediction_after_its_outcome_is_none(tmp_path: Path) -> None:
    said, came = _said("a", "no_gpu", 1.0, 100, True), _came("a", 1.5, 100, False)
    right = compute(_write(tmp_path, {"plans": [said, came]}))
    late = compute(_write(tmp_path, {"plans": [came, said]}))
    for name in ("step_time_error_no_gpu", "memory_allocated_error", "false_fits"):
        assert right[name]["n"] == 1 and late[name]["n"] == 0, name


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
    topics = _topics()
    change(topics)
    with pytest.raises(ConfigError) as caught:
        compute(_write(tmp_path, topics))
    assert where in caught.value.message and what in caught.value.message


def test_half_a_row_is_told_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "picks.jsonl").write_text(json.dumps(_pick((1, 1), (2, 2))) + '\n\n{"workload":\n')
    with pytest.raises(ConfigError, match=r"picks\.jsonl:3: not JSON"):
        compute(tmp_path)


@pytest.mark.parametrize(
    ("name", "found", "verdict"),
    [
        ("forecast_median_error", {"value": 0.20, "n": 40}, "met"),
        ("forecast_median_error", {"value": 0.15, "n": 40}, "aim met"),
        ("forecast_median_error", {"value": 0.26, "n": 400}, "not met"),
        ("forecast_median_error", {"value": 0.15, "n": 39}, "too few: 39 of 40 wanted"),
        ("forecast_coverage", {"value": 0.95, "n": 40, "width": 0.1}, "not met"),
        ("forecast_coverage", {"value": 0.85, "n": 40, "width": 0.59}, "met"),
        ("forecast_coverage", {"value": 0.85, "n": 40, "width": 0.7},
         "not met: their median width, 70% of the gain, is above 60%"),
        ("false_fits", {"value": 0, "n": 200, "risky_run": 30, "risky_not_run": 0}, "met"),
        ("false_fits", {"value": 1, "n": 900, "risky_run": 30, "risky_not_run": 0}, "not met"),
        ("false_fits", {"value": 0, "n": 200, "risky_run": 0, "risky_not_run": 0},
         "too few: 0 of 1 wanted runs of risky ones"),
        ("false_fits", {"value": 0, "n": 200, "risky_run": 9, "risky_not_run": 1},
         "not met: 1 of the risky ones not run"),
        ("tuner_ratio", {"value": 1.03, "n": 4, "workloads": 4}, "aim met"),
        ("tuner_ratio", {"value": 0.96, "n": 4, "workloads": 4}, "not met"),
        ("kendall_tau", {"value": 0.89, "n": 1}, "not met"),
        ("overhead_always_on", {"value": -0.0001, "high": 0.0005, "n": 1}, "aim met"),
        ("overhead_with_bursts", {"value": 0.00346, "high": 0.00759, "n": 1},
         "not met: its upper end, 0.759%, is above 0.5%"),
    ],
)  # fmt: skip
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
    found = compute(_write(tmp_path, _topics()))
    rows = dict(zip(MARKS, table(found), strict=True))
    assert {len(row) for row in rows.values()} == {len(HEAD)}
    assert rows["forecast_coverage"][1:] == [
        "66.7% (20.8% to 93.9%)", "80% to 90%", "3/40", "", "not met",
    ]  # fmt: skip
    assert rows["false_fits"][1:] == ["1", "0", "7/200", "all", "not met"]
    assert rows["tuner_ratio"][2:] == [">= 97% (102%)", "2/4", "", "too few"]
    assert rows["overhead_always_on"][2] == "<= 0.3% (0.1%)"
    assert rows["doctor_top1"][4] == "50% of 2"
    assert rows["step_time_error_after_20_steps"][1:] == [
        "-", "<= 1.5% (1.9%)", "0/40", "-", "not measured",
    ]  # fmt: skip
    told = notes(found)
    left_out = "1 abstained; 1 more took under 10% of the step: not counted"
    assert f"planted faults named: {left_out}" in told
    assert "tuned over the best row: 2 of 4 wanted workloads; worst 99%" in told
    assert not any(line.startswith("step time after 20 steps") for line in told)
