"""Check the numbers of report.json beside the loss by computing each from the run's files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import metrics, report

from headrace.observe.waits import STALL_SHARE
from headrace.train import session
from headrace.train.summary import summarize

Train = Callable[..., Path]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a run hands to its report; entries of "instead" replace the run's own."""
    seen: dict[str, Any] = {"instead": {}}

    def look(*parts: Any, **named: Any) -> dict[str, Any]:
        named |= seen["instead"]
        seen.update(named)
        return summarize(*parts, **named)

    monkeypatch.setattr(session, "summarize", look)
    return seen


def test_tokens_without_a_target_are_counted_of_all(train: Train) -> None:
    """A prefix is read and not learned."""
    run = train("techniques.prefix_lm.tokens=8", "goal.steps=4")
    rows, found = metrics(run), report(run)
    wasted = sum(row["wasted_tokens"] for row in rows)
    assert found["tokens"] == rows[-1]["tokens"] > wasted > 0
    assert found["wasted_token_fraction"] == wasted / found["tokens"]


def test_waits_are_told_by_their_median_their_tail_and_their_stalls(
    train: Train, given: dict[str, Any]
) -> None:
    step_s = 0.5
    at, beyond = STALL_SHARE * step_s, 1.01 * STALL_SHARE * step_s
    waits = [*np.linspace(0, 0.01, 150).tolist(), *[at] * 30, *[beyond] * 20]
    given["instead"] = {"waits_s": waits, "rate": 128 / step_s}  # tokens of a step
    found = report(train("goal.steps=2"))["input_wait"]
    assert found["p50_s"] == pytest.approx(np.percentile(waits, 50))
    assert found["p99_s"] == pytest.approx(np.percentile(waits, 99))
    assert found["stalled_steps"] == 20, "one that is at the limit is none"
    given["instead"] = {"waits_s": np.linspace(0, 1, 11).tolist(), "rate": None}
    found = report(train("goal.steps=2"))["input_wait"]
    assert found == {"p50_s": 0.5, "p99_s": pytest.approx(0.99), "stalled_steps": None}
    given["instead"] = {"waits_s": [0.5]}
    found = report(train("goal.steps=2"))["input_wait"]
    assert found == {"p50_s": None, "p99_s": None, "stalled_steps": None}
