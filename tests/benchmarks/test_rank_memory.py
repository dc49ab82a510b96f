"""One rank of a layout of many trains without the others, and its largest tensors are named."""

import sys
from pathlib import Path
from typing import Any

import pytest
import rank_memory
import receipts
import scaling
from programs import rows
from scaling_sides import SIDES

KNOWN = {side.name: side for side in SIDES}
MEASURED = [
    row
    for row in rows(receipts.ROOT / "results", "scaling")
    if row["kind"] == "rank_memory" and row["n"]
]


def _asked(code: str, line: int) -> dict[str, object]:
    return {"filename": code, "line": line, "name": "f"}


def test_the_largest_groups_at_the_peak_come_first() -> None:
    early = {"frames": [_asked("torch/x.py", 1), _asked("headrace/a.py", 2)]}
    late = {"frames": [_asked("torch/y.py", 3)]}
    trace = [
        {"action": "alloc", "addr": 1, "size": 10, **early},
        {"action": "alloc", "addr": 2, "size": 10, **early},
        {"action": "alloc", "addr": 3, "size": 90, **late},
        {"action": "free_requested", "addr": 3, "size": 90},
        {"action": "free_completed", "addr": 3, "size": 90},
        {"action": "alloc", "addr": 4, "size": 60, **late},
    ]
    assert rank_memory.groups_at_peak(trace) == [(90.0, 1, "y.py:3 f"), (20.0, 2, "a.py:2 f")]


def test_both_ends_of_a_pipeline_are_measured() -> None:
    for name, places in {"fsdp": [0], "tensor": [0], "pipeline": [0, 1]}.items():
        assert rank_memory.places_of(KNOWN[name].plan(2, [], tiny=True)) == places


@pytest.mark.slow
@pytest.mark.parametrize("side", ["fsdp", "pipeline", "tensor", "context_8k", "experts"])
def test_a_rank_trains_alone(side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["rank_memory", "--tiny", "--sides", side, "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    rank_memory.main()
    (row,) = rows(tmp_path, "scaling")
    assert (row["side"], row["ranks"], row["kind"], row["n"]) == (side, 2, "rank_memory", 0)
    assert (
        "refused" not in row
        and row["evidence"]
        and len(row["peak_bytes_by_rank"]) == 1 + (side == "pipeline")
    )


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['side']}-{row['ranks']}")
def test_a_measured_peak_is_predicted_within_two_percent(row: dict[str, Any]) -> None:
    words = ["predict", "--ranks", str(row["ranks"]), "--device-name", row["hardware"]]
    args = scaling.parsed(words)
    predicted = scaling.entry_of(KNOWN[row["side"]], args, scaling.machine_of(args)).facts
    measured = row["metrics"]["peak_memory"]["value"]
    assert predicted["predicted"]["peak_bytes"] == pytest.approx(measured, rel=0.02)
