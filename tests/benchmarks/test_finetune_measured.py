"""Run the program that measures fine-tuning on a tiny shape, through the code of the large one."""

from pathlib import Path
from typing import Any

import finetune
import finetune_sides
import pytest
from programs import rows, run

from headrace.tuner import readings


class InThisProcess:
    """A side that answers here, by the code of its process."""

    def __init__(self, name: str, size: str, command: list[str], limit_s: float) -> None:
        self.asked = finetune_sides.asked_of(command[-1])
        self.loaded: finetune_sides.Loaded | None = None

    def read(self) -> dict[str, Any]:
        """Return one reading."""
        self.loaded = self.loaded or finetune_sides.load(self.asked)
        return finetune_sides.read(self.loaded, self.asked.plan.batch.tokens)

    def close(self) -> None:
        """Do nothing: there is no process."""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the options of every call."""
    monkeypatch.setattr(finetune, "Peer", InThisProcess)
    return ["--tiny", "--results", tmp_path, "--work", tmp_path / "work"]


def test_sides_are_read_in_turn_and_absent_peers_are_told(
    tmp_path: Path, words: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_sides, "find_spec", lambda name: None)
    sides = ["headrace", "headrace_small", "peft", "unsloth"]
    run(monkeypatch, finetune, "speed", *words, "--rounds", 2, "--sides", *sides)
    kept, small, peft, unsloth = rows(tmp_path, "finetune")
    assert kept["n"] == small["n"] == 2 and kept["first_loss"] == pytest.approx(5.77, abs=0.1)
    assert kept["first_loss"] == pytest.approx(small["first_loss"], rel=1e-5)
    assert kept["techniques"] != small["techniques"] and kept["predicted_bytes"] > 0
    assert kept["metrics"]["tokens_per_s"]["value"] > 0 and kept["trained"] == small["trained"]
    assert peft["n"] == 0 and "transformers, peft, bitsandbytes" in peft["refused"]
    assert unsloth["refused"].startswith("absent: unsloth") and not unsloth["metrics"]


@pytest.mark.slow
def test_a_peer_trains_the_same_weights_on_the_same_batch(
    tmp_path: Path, words: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    sides = ["headrace", "peft"]
    run(
        monkeypatch, finetune, "speed", *words, "--rounds", 1, "--method", "lora", "--sides", *sides
    )
    ours, peer = rows(tmp_path, "finetune")
    assert peer["first_loss"] == pytest.approx(ours["first_loss"], rel=5e-3)
    assert ours["metrics"]["ratio_to_peft"]["value"] > 0


def test_the_longest_row_is_bisected_and_a_later_call_goes_on(
    tmp_path: Path, words: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tried = readings.time_long_row, list[int]()

    def limited(plan: Any, **how: Any) -> readings.Reading:
        length = plan.data.sequence_length
        tried.append(length)
        if length <= 64:
            return real(plan, **how)
        return readings.read(lambda reading: (_ for _ in ()).throw(MemoryError("no room")))

    monkeypatch.setattr(finetune, "time_long_row", limited)
    run(monkeypatch, finetune, "longest", *words, "--lengths", 128)
    assert set(tried) == {128}
    asked = ["longest", *words, "--lengths", 48, 64, 96, 128]
    run(monkeypatch, finetune, *asked)
    assert set(tried) == {128, 64, 96}
    found = rows(tmp_path, "finetune")
    fitted = [row["length"] for row in found if row["n"]]
    assert fitted == [64] and {r["length"] for r in found if r["too_long"]} == {96, 128}
    assert all("no room" in row["refused"] for row in found if row["length"] > 64)
    tried.clear()
    run(monkeypatch, finetune, *asked)
    assert not tried


def test_all_weights_learn_or_the_row_says_why_not(
    tmp_path: Path,
    words: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(monkeypatch, finetune, "full", *words, "--timed", 1)
    offloaded, states, freed = rows(tmp_path, "finetune")
    assert "optimizer_offload" in offloaded["refused"] and offloaded["n"] == 0
    assert all(row["n"] == 1 and row["predicted_bytes"] > 0 for row in (states, freed))
    assert "0 are still held" in freed["evidence"]["optimizer_in_backward"]
    capsys.readouterr()
    there = ["--device-name", "NVIDIA H100 80GB HBM3", "--lengths", 262144]
    run(monkeypatch, finetune, "predict", *words[1:], *there)
    told = capsys.readouterr().out
    assert "longest 262144 offload" in told and "fits: yes" in told
    assert "refused" not in told and len(rows(tmp_path, "finetune")) == 3
