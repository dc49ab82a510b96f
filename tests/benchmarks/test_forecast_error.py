"""The interval of a forecast is as wide as receipts ask for."""

import math
import sys
from importlib import import_module
from pathlib import Path

from headrace.doctor.forecast import ERROR

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
forecast_error = import_module("forecast_error")


def test_the_fit_holds_what_it_promises_of_techniques_that_it_has_not_seen() -> None:
    sizes = [0.02 * (i % 12 + 1) * (-1) ** (i // 2) for i in range(48)]
    pairs = [
        forecast_error.Pair(f"t{i % 8}", "", p, p + (0.002 + 0.1 * abs(p)) * math.sin(2.4 * i))
        for i, p in enumerate(sizes)
    ]
    found = forecast_error.residuals(pairs)
    assert found["coverage"] >= 0.85 and found["coverage_left_out"] >= 0.75
    assert found["median_width_of_gain"] < 0.3, "and no wider than it need be"
    wrong = [forecast_error.Pair(p.technique, "", -p.predicted, p.measured) for p in pairs]
    assert forecast_error.residuals(wrong)["median_error_of_gain"] > 1


def test_the_interval_in_use_is_the_one_that_receipts_ask_for() -> None:
    """When the planner or the receipts change, ERROR follows: `forecast_error.py`."""
    pairs = forecast_error.measured_pairs()
    held = sum(forecast_error.covers(pair, ERROR.least, ERROR.share) for pair in pairs)
    assert len(pairs) >= 150 and 0.78 <= held / len(pairs) <= 0.93
