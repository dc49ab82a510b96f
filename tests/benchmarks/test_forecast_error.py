"""The interval of a forecast is as wide as forecasts that were said before ask for."""

import math
import sys
from importlib import import_module
from pathlib import Path

from headrace.doctor.forecast import ERROR

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
forecast_error = import_module("forecast_error")


def test_the_fit_holds_what_it_promises_of_workloads_that_it_has_not_seen() -> None:
    sizes = [0.02 * (i % 12 + 1) * (-1) ** (i // 2) for i in range(48)]
    pairs = [
        forecast_error.Pair(f"w{i % 8}", "", p, p + (0.002 + 0.1 * abs(p)) * math.sin(2.4 * i))
        for i, p in enumerate(sizes)
    ]
    found = forecast_error.residuals(pairs, pairs[:9])
    assert found["coverage"] >= 0.8 and found["coverage_left_out"] >= 0.75
    assert found["median_width_of_gain"] < 0.3, "and no wider than it need be"
    assert found["n"] == 48 and found["receipts"]["n"] == 9
    wrong = [forecast_error.Pair(p.workload, "", -p.predicted, p.measured) for p in pairs]
    found = forecast_error.residuals(wrong, wrong)
    assert found["median_error_of_gain"] > 1 and found["receipts"]["median_error_of_gain"] > 1


def test_the_interval_in_use_is_the_one_that_what_was_said_before_asks_for() -> None:
    """When rows come, ERROR follows: `forecast_error.py`. Receipts may lie closer, not further."""
    said = forecast_error.said_before()
    assert (ERROR.least, ERROR.share) == forecast_error.fit(said) and len(said) == ERROR.n >= 40
    found = forecast_error.of_receipts()
    assert len(found) >= 150
    assert forecast_error.held_by(found, ERROR.least, ERROR.share) >= forecast_error.LEVEL
