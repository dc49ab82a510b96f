"""Passes over a text that a budget buys are near the best that were measured."""

import random
import sys
from pathlib import Path

import pytest
import receipts
import repeated_text
from programs import rows
from tiny import WORDS

from headrace.costs.passes import most_passes

PLAIN = [
    row
    for row in rows(receipts.ROOT / "results", "learning")
    if row["kind"] == "repeated_text"
    and not row["overrides"]
    and "bigram_embeddings" not in row["techniques"]
]


def test_a_model_is_stopped_near_its_lowest_held_out_loss() -> None:
    """Rows whose loss had risen again tell where it was lowest, to a look or two."""
    measured = 0
    for row in PLAIN:
        best, whole = (row["metrics"][key]["value"] for key in ("best_epoch", "epochs"))
        if best < 0.9 * whole:
            measured += 1
            passes = most_passes(row["parameters"], row["fresh_tokens"])
            assert 1 / 1.3 < passes / best < 1.3, row["shape"]
    assert measured >= 4


@pytest.mark.slow
def test_a_cell_is_trained_once_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    for part, count in (("train", 2500), ("val", 900)):
        (text / part).mkdir(parents=True)
        (text / part / "one.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=count)))
    monkeypatch.setattr(repeated_text, "STEPS_A_PASS", 12)
    monkeypatch.setattr(repeated_text, "BATCH", 512)
    monkeypatch.setattr(repeated_text, "LENGTH", 128)
    monkeypatch.setattr(repeated_text, "VOCAB", 300)
    monkeypatch.setattr(repeated_text, "EVALUATED", 1024)
    given = ["repeated_text", "--data", str(text), "--work", str(tmp_path / "work")]
    given += ["--results", str(tmp_path), "--cells", "16x1:1"]
    monkeypatch.setattr(sys, "argv", given)
    repeated_text.main()
    monkeypatch.setattr(repeated_text.subprocess, "run", lambda *_: pytest.fail("trained twice"))
    repeated_text.main()
    one, two = rows(tmp_path, "learning")
    assert one["metrics"] == two["metrics"] and one["parameters"] == two["parameters"]
    asked = list[list[str]]()
    monkeypatch.setattr(repeated_text.subprocess, "run", lambda words, **_: asked.append(words))
    other = [["--set", "optimizer.weight_decay=0.3"], ["--bytes", "9000"], ["--pairs"]]
    for change in [["--cells", "16x2:1"], *other]:  # another run each
        monkeypatch.setattr(sys, "argv", [*given, *change])
        with pytest.raises(FileNotFoundError):
            repeated_text.main()
    assert len({words[-3] for words in asked}) == len(asked) == 4
    assert one["metrics"]["epochs"]["value"] > 0 and one["curve"]
