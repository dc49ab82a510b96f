"""Check the words in which the report tells its verdict and its numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.report import words
from headrace.report.run_files import read_run

MakeRun = Callable[..., Path]


def goal(reached: bool | None, ended_by: str, **asked: float) -> dict[str, Any]:
    """Return the goal table of report.json."""
    return {"asked": asked, "reached": reached, "ended_by": ended_by}


@pytest.mark.parametrize(
    ("changes", "badge", "sentence"),
    [
        (
            {"goal": goal(False, "minutes", bits_per_byte=1.54, minutes=4)},
            "Goal not reached",
            "Did not reach 1.54 bits per byte: the best was 1.974 when its limit of 4 minutes "
            "ended the run after 3 min 40 s and 3.28M tokens, for $0.031.",
        ),
        (
            {"goal": goal(None, "steps", steps=1000), "dollars": None},
            "Finished",
            "Ended by its limit of 1,000 steps after 3 min 40 s and 3.28M tokens; "
            "validation ended at 1.974 bits per byte.",
        ),
        (
            {"goal": goal(None, "dollars", dollars=3.0), "val": []},
            "Finished",
            "Ended by its limit of $3.00 after 3 min 40 s and 3.28M tokens, for $0.031; "
            "validation was not measured.",
        ),
        (
            {"goal": goal(None, "minutes", minutes=1), "dollars": None},
            "Finished",
            "Ended by its limit of 1 minute after 3 min 40 s and 3.28M tokens; "
            "validation ended at 1.974 bits per byte.",
        ),
        (
            {"status": "failed", "message": "the loss is NaN.", "dollars": None},
            "Failed",
            "Failed at step 400 after 3 min 40 s and 3.28M tokens: the loss is NaN.",
        ),
        (
            {"status": "interrupted", "message": None, "dollars": None},
            "Interrupted",
            "Interrupted at step 400 after 3 min 40 s and 3.28M tokens.",
        ),
    ],
)
def test_verdict(make_run: MakeRun, changes: dict[str, Any], badge: str, sentence: str) -> None:
    ruling = words.verdict(read_run(make_run(**changes)).report)
    assert (ruling.badge, ruling.sentence) == (badge, sentence)


def test_numbers() -> None:
    assert words.percent(0.0001) == "<0.1 %" and words.percent(0.0) == "0.0 %"
    assert words.seconds(133) == "2 min 13 s" and words.seconds(0.02) == "20 ms"
    assert words.flops(9.89e14) == "989 TFLOP" and words.flops(2.5e15) == "2.5 PFLOP"
    assert words.dollars(1234.5) == "$1,234.50" and words.dollars(0.00312) == "$0.0031"
    assert {f(None) for f in (words.bits, words.whole, words.size, words.flops)} == {"not measured"}
