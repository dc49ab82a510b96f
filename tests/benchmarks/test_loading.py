"""What readers buy is told by runs whose rows come slowly."""

import json
import sys
from pathlib import Path

import loading
import pytest
from tiny import READ

from headrace.data.rows import Cut


@pytest.mark.slow
def test_readers_take_the_waits_away(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, plain = tmp_path / "tiny.toml", Cut.row
    text = READ.format(corpus=corpus, prepared=prepared_folder)
    plan.write_text(text.replace("workers = 0\n", ""))
    words = ["--slow", "6", "--steps", "24", "--results", str(tmp_path), "--knobs"]
    keys = ["workers=8", "prefetch=16"]
    monkeypatch.setattr(sys, "argv", ["loading.py", str(plan), *words, *keys])
    loading.main()
    assert Cut.row is plain
    found = [json.loads(line) for line in (tmp_path / "loading.jsonl").read_text().splitlines()]
    hand, one, many = found
    assert [row["side"] for row in found] == ["at hand", "one reader", "loader_workers"]
    assert hand["row_s"] == hand["slow"] == 0 and hand["metrics"]["ratio_to_at_hand"]["value"] == 1
    assert hand["metrics"]["whole_ratio_to_at_hand"]["value"] == 1
    assert one["metrics"]["ratio_to_at_hand"]["value"] < 0.5
    rows = 4  # of a step
    slow_s = 6 * hand["metrics"]["step"]["value"]
    assert one["row_s"] == many["row_s"] == pytest.approx(slow_s / rows)
    waits = [row["metrics"]["wait_p50"]["value"] for row in found]
    assert waits[1] > 0.5 * slow_s > waits[2] and one["metrics"]["stalled"]["value"] == 1.0
    assert one["loader"] is None and many["loader"]["workers"] == 8 and one["n"] == 12


def test_a_wait_in_a_few_steps_is_in_the_mean_and_not_in_the_median() -> None:
    took = [(0.1, 0.0)] * 9 + [(1.1, 1.0)] * 3
    steps = [{"step_s": step_s, "input_s": wait_s} for step_s, wait_s in took]
    found = loading.metrics(steps, (0.1, 0.1))
    assert found["ratio_to_at_hand"]["value"] == 1.0 and found["stalled"]["value"] == 0.25
    assert found["whole_ratio_to_at_hand"]["value"] == pytest.approx(0.1 / 0.35)
