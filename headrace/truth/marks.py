"""What each number must be and should be, once; and the table that says how far it is.

A number meets its mark only when as many observations as the mark asks for stand behind it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Bounds = tuple[float, float]
"""From, to; both ends belong to it."""
ANY = math.inf


@dataclass(frozen=True)
class Mark:
    """What a number must be and should be.

    Args:
        says: what is counted, in a few words.
        must: from, to.
        aim: likewise; None where no aim is set.
        fewest: observations that it takes.
        needs: from, to of what stands beside the value.
        share: it is shown in percent.
    """

    says: str
    must: Bounds
    aim: Bounds | None = None
    fewest: int = 1
    needs: Mapping[str, Bounds] = field(default_factory=dict)
    share: bool = True


PUBLISHED = (0.0, 0.019)
"""The lowest average error of step time that was published: SimAI's 1.9% (NSDI 2025). A must
that is lower holds it too."""
FAULTS = {
    "faults": (12.0, ANY),
    "severities": (3.0, ANY),
    "workloads": (5.0, ANY),
    "held_out_faults": (3.0, ANY),
    "held_out_workloads": (2.0, ANY),
}
CONFIGURATIONS = {"configurations": (40.0, ANY)}
RISKY = {"risky_run": (1.0, ANY), "risky_not_run": (0.0, 0.0)}
MARKS = {
    "doctor_top1": Mark("faults named right", (0.95, 1), (0.99, 1), 180, FAULTS),
    "doctor_false_alarms": Mark("healthy runs blamed", (0, 0.02), (0, 0.005), 100),
    "forecast_coverage": Mark(
        "gains inside their 80% interval", (0.8, 0.9), None, 40, {"width": (0, 0.6)}
    ),
    "forecast_median_error": Mark("of the gain", (0, 0.25), (0, 0.15), 40),
    "overhead_always_on": Mark(
        "of a step", (-ANY, 0.003), (-ANY, 0.001), needs={"high": (-ANY, 0.003)}
    ),
    "overhead_with_bursts": Mark("of a step", (-ANY, 0.005), needs={"high": (-ANY, 0.005)}),
    "step_time_error_no_gpu": Mark("mean", (0, 0.05), PUBLISHED, 40),
    "step_time_error_after_probes": Mark("mean", (0, 0.025), PUBLISHED, 40),
    "step_time_error_after_20_steps": Mark("mean", (0, 0.015), PUBLISHED, 40),
    "memory_allocated_error": Mark("median", (0, 0.01), needs=CONFIGURATIONS),
    "memory_reserved_error": Mark("median", (0, 0.03), needs=CONFIGURATIONS),
    "false_fits": Mark("said to fit, and did not", (0, 0), None, 200, RISKY, share=False),
    "pick_regret": Mark("slower than the best", (0, 0.02), needs={"candidates": (40, ANY)}),
    "kendall_tau": Mark("of the predicted order", (0.9, 1), share=False),
    "tuner_ratio": Mark(
        "speed over the best row's", (0.97, ANY), (1.02, ANY), 4, {"workloads": (4, ANY)}
    ),
}
"""name -> mark; the order is that of the table."""

HEAD = ("number", "of what", "value", "beside it", "n", "must", "aim", "so far")


def judge(name: str, found: Mapping[str, Any]) -> str:
    """How far a number is from its mark.

    Args:
        name: one of MARKS.
        found: what `compute` gives for it.

    Returns:
        "not measured", "not met", "not met: ..." or "too few: ..." with what is missing, "met" or
        "aim met".
    """
    mark, value = MARKS[name], found["value"]
    if value is None:
        return "not measured"
    if not _within(value, mark.must):
        return "not met"
    for need, (low, high) in mark.needs.items():
        if found[need] > high:
            return f"not met: {need} {found[need]:.4g}, {high:.4g} at most"
        if found[need] < low:
            return f"too few: {need} {found[need]:.4g} of {low:.4g}"
    if found["n"] < mark.fewest:
        return f"too few: n {found['n']} of {mark.fewest}"
    return "aim met" if mark.aim and _within(value, mark.aim) else "met"


def table(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row of text for each number, under HEAD."""
    rows = []
    for name, mark in MARKS.items():
        number = found[name]
        rows.append([
            name, mark.says,
            "-" if number["value"] is None else _shown(number["value"], mark.share),
            _beside(number, mark.share),
            str(number["n"]),
            _bounds(mark.must, mark.share), _bounds(mark.aim, mark.share) if mark.aim else "",
            judge(name, number),
        ])  # fmt: skip
    return rows


def _beside(number: Mapping[str, Any], share: bool) -> str:
    """Its interval, and the few of its other numbers that a reader asks for."""
    told = [f"{key} {_shown(number[key], share)}" for key in ("worst", "width") if key in number]
    if "low" in number:
        told.insert(0, f"{_shown(number['low'], share)} to {_shown(number['high'], share)}")
    if "risky_run" in number:
        told.append(f"{number['risky_run']} risky ones run")
    return ", ".join(told)


def _within(value: float, bounds: Sequence[float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _shown(value: float, share: bool) -> str:
    return f"{100 * value:.3g}%" if share else f"{value:.3g}"


def _bounds(bounds: Bounds, share: bool) -> str:
    low, high = bounds
    if low == high:
        return _shown(low, share)
    if low <= 0:
        return f"<= {_shown(high, share)}"
    if high == ANY or high == 1:
        return f">= {_shown(low, share)}"
    return f"{_shown(low, share)} to {_shown(high, share)}"
