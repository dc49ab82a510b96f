"""Rows of every topic that `truth` reads, made by hand."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Topics = dict[str, list[Row]]


def fault(fault: str, verdict: str | None, **other: Any) -> Row:
    return {
        "measurement": "fault",
        "fault": fault,
        "severity": 0.2,
        "workload": "dense",
        "held_out": False,
        "expected": "input",
        "verdict": verdict,
        "abstained": False,
        "thresholds": "abc1234",
        "metrics": {},
        **other,
    }


def healthy(verdict: str | None, abstained: bool = False) -> Row:
    return {
        "measurement": "healthy",
        "fault": None,
        "severity": 0,
        "workload": "dense",
        "verdict": verdict,
        "abstained": abstained,
    }


def forecast(low: float, value: float, high: float, measured: float) -> Row:
    told = {"low": low, "value": value, "high": high}
    return {
        "remedy": "torch_compile",
        "workload": "dense",
        "forecast": told,
        "measured": measured,
        "baseline_sha256": "1330a4f",
        "said": "abc1234",
        "date": "2026-11-23",
    }


def said(row: Row) -> Row:
    """What stands in forecasts_said.jsonl of a forecast with its outcome."""
    told = {key: value for key, value in row.items() if key not in ("measured", "said", "metrics")}
    return {**told, "commit": row["said"]}


def metric(name: str, low: float, value: float, high: float, **facts: Any) -> Row:
    return {**facts, "metrics": {name: {"low": low, "value": value, "high": high, "unit": "x"}}}


def prediction(
    name: str, tier: str, step_s: float | None, bytes_: int | None, fits: bool | None
) -> Row:
    return {
        "kind": "prediction",
        "id": name,
        "tier": tier,
        "step_s": step_s,
        "allocated_bytes": bytes_,
        "reserved_bytes": bytes_,
        "fits": fits,
    }


def outcome(
    name: str, step_s: float | None, allocated: int | None, fits: bool | None, risky: bool = False
) -> Row:
    reserved = allocated and 2 * allocated
    return {
        "kind": "outcome",
        "id": name,
        "step_s": step_s,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "fits": fits,
        "risky": risky,
    }


def pick(*times: tuple[float, float]) -> Row:
    told = [{"id": i, "predicted_s": p, "measured_s": m} for i, (p, m) in enumerate(times)]
    return {"workload": "dense", "candidates": told}


COMPILE, GRAPHS, ROWS = ["+torch_compile"], ["+cuda_graphs"], ["batch.micro_sequences=8"]
"""Changes of natural runs."""


def natural_said(
    name: str,
    first: list[str] | None,
    said: float | None = None,
    *,
    healthy: bool = False,
    **other: Any,
) -> Row:
    """What the doctor said of a run; `said` is the forecast of its first remedy, 20% wide."""
    gain = None if said is None else {"low": said - 0.1, "value": said, "high": said + 0.1}
    return {
        "id": name,
        "device": "cuda",
        "hardware": "NVIDIA H100",
        "date": "2026-11-25",
        "workload": "60m",
        "precision": "fp32",
        "compiled": False,
        "parameters": 60_000_000,
        "plan_sha256": "1330a4f",
        "words": [],
        "verdict": None if healthy else "launch",
        "share": 0.5,
        "said": "a sentence",
        "healthy": healthy,
        "first": first and {"change": first, "gain": gain, "forecast_from": "measured"},
        "remedies": [],
        "commit": "abc1234",
        **other,
    }


def natural(
    name: str, first: list[str] | None, *measured: tuple[list[str], float | str], **other: Any
) -> Row:
    """What each change of a run gained, or why it was refused."""
    told: list[Row] = [
        {"change": change, "refused": gain}
        if isinstance(gain, str)
        else {
            "change": change,
            "gain": {"low": gain - 0.01, "value": gain, "high": gain + 0.01, "n": 6},
        }
        for change, gain in measured
    ]
    return {
        "id": name,
        "device": "cuda",
        "hardware": "NVIDIA H100",
        "date": "2026-11-25",
        "before_s": 0.1,
        "steps": 54,
        "measured": told,
        "first_change": first,
        "said": "abc1234",
        **other,
    }


def trial(equality: str, verdict: str, *, for_loss: bool = False, **other: Any) -> Row:
    return {
        "workload": "small",
        "hardware": "NVIDIA H100",
        "change": COMPILE,
        "equality": equality,
        "verdict": verdict,
        "for_loss": for_loss,
        "ratio": {"low": 1.0, "value": 1.1, "high": 1.2, "n": 6},
        "nats": None,
        "steps": 0,
        **other,
    }


def all_topics() -> Topics:
    gains = [
        forecast(0.1, 0.2, 0.3, 0.2),  # off by 0, as wide as the gain
        forecast(0.1, 0.2, 0.3, 0.4),  # off by a half, half as wide, outside
        forecast(-0.15, -0.1, -0.05, -0.08),  # off by a quarter, 1.25 times as wide
    ]
    return {
        "doctor": [
            fault("slow_loader", "input"),
            fault("slow_loader", "input", workload="long", held_out=True),
            fault("tiny_kernels", "launch"),  # wrong
            fault("item", "input", abstained=True, held_out=True),  # right, and not stood by
            fault("slow_loader", "launch", severity=0.05),  # below the line
            healthy("computation"),
            healthy(None, abstained=True),
            healthy("input", abstained=True),
            healthy("launch"),  # a false alarm
        ],
        "forecasts": gains,
        "forecasts_said": [said(row) for row in gains],
        "overhead": [
            metric("overhead", 0.0005, 0.001, 0.0015, measurement="always_on", shape="a"),
            metric("overhead", 0.001, 0.003, 0.005, measurement="always_on", shape="b"),
            metric("overhead", 0.003, 0.004, 0.005, measurement="with_bursts"),
        ],
        "plans": [
            prediction("a", "no_gpu", 1.1, 110, True),
            prediction("b", "no_gpu", 1.4, 150, True),
            prediction("c", "no_gpu", 1.0, 300, True),
            prediction("d", "no_gpu", 1.0, None, False),
            prediction("e", "no_gpu", 1.0, 100, True),
            prediction("f", "no_gpu", None, None, False),
            outcome("a", 1.0, 100, True),
            prediction("a", "after_probes", 1.0, 100, True),  # too late
            prediction("b", "after_probes", 2.1, 202, True),
            outcome("b", 2.0, 200, True, risky=True),
            outcome("c", None, None, False, risky=True),  # said to fit, and did not
            outcome("d", None, None, True),  # said not to fit, and did
            outcome("f", None, None, False, risky=True),  # said not to fit, and did not
            {**prediction("g", "after_probes", 0.11, 104, None), "device": "cpu"},
            {**outcome("g", 0.1, 100, None), "hardware": "Xeon, 2 cores"},
        ],
        "picks": [
            pick((1.0, 1.1), (2.0, 1.0), (3.0, 1.2)),  # 10% lost; one of three pairs is wrong
            pick((1.0, 1.0), (2.0, 2.0)),
            pick((1.0, 1.0), (1.0, 1.4)),  # no order at all
        ],
        "tuner": [
            metric("ratio_to_best", 0.98, 0.99, 1.0, workload="160m"),
            metric("ratio_to_best", 1.0, 1.03, 1.05, workload="1b", minutes=8.0),
        ],
        "natural_said": [
            natural_said("near", COMPILE, 0.4),
            natural_said("far", ROWS, 0.5, hardware="Xeon, 2 cores", workload="1m"),
            natural_said("well", None, healthy=True),
        ],
        "natural": [
            natural("near", COMPILE, (COMPILE, 0.41), (GRAPHS, 0.5), (ROWS, 0.1)),
            natural(
                "far",
                ROWS,
                (COMPILE, 1.0),
                (ROWS, 0.2),
                (GRAPHS, "no GPU"),
                hardware="Xeon, 2 cores",
            ),
            natural("well", None, (COMPILE, 0.02), (ROWS, -0.3)),
        ],
        "tuner_trials": [
            trial("exact", "kept"),
            trial("exact", "rejected", for_loss=True),
            trial("approximate", "kept", change=ROWS),
            trial("approximate", "kept", change=ROWS, nats=0.02, steps=1000),
        ],
    }


def write(folder: Path, topics: Topics) -> Path:
    for topic, rows in topics.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{topic}.jsonl").write_text(text)
    return folder
