"""The program that measures techniques runs whole on a tiny plan: beside what, and which rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import techniques
from programs import rows, run

import headrace.train.train
from headrace.core.errors import RefusalKind
from headrace.tuner import readings


def test_a_technique_has_a_row_at_each_base(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["z_loss", "cuda_graphs", "selective_checkpoint", "full_checkpoint:every=2"]
    words = ["--shapes", plan, "--steps", 1, 1, "--loss-steps", 3]
    words += ["--results", tmp_path, "--missing", tmp_path]
    run(monkeypatch, techniques, *asked, *words)
    found = {(r["technique"], r["base"]): r for r in rows(tmp_path, "techniques")}
    assert len(found) == 8
    for base in ("trunk", "recipe"):
        assert "CUDA graphs" in found["cuda_graphs", base]["refused"]
        own = found["z_loss", base]
        assert own["n"] == 2 and own["metrics"]["speed_ratio"]["value"] > 0 and own["evidence"]
    assert "selective_checkpoint" in found["full_checkpoint", "recipe"]["refused"]
    assert found["selective_checkpoint", "recipe"]["left_out"]
    for base in ("trunk", "recipe"):
        told = found["selective_checkpoint", base]["metrics"]
        assert abs(told["loss_difference"]["value"]) < 1e-5 < told["loss_noise"]["value"]
        assert told["loss"]["value"] == pytest.approx(told["base_loss"]["value"])
        assert "scaled_dot_product_flash_attention" in found["z_loss", base]["base_attention"]
    run(monkeypatch, techniques, *asked, "fused_cross_entropy", *words, "--limit-s", 0)
    assert {r["technique"] for r in rows(tmp_path, "techniques")[8:]} == {"fused_cross_entropy"}
    capsys.readouterr()
    run(monkeypatch, techniques, "tf32:mode=x", "dynamic_batch", *words, "--limit-s", 0)
    assert "left: tiny trunk: dynamic_batch\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loss_is_read_alone_by_a_schedule_as_long_as_the_training(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shapes", plan, "--loss-steps", 9, "--only-loss", "--noise-seeds", 2]
    words += ["--results", tmp_path, "--missing", tmp_path]
    rates: list[float] = []
    step = headrace.train.train.step

    def watched(build: Any, micros: Any, index: int, *rest: Any) -> Any:
        rates.append(build.values["lr"](index))
        return step(build, micros, index, *rest)

    monkeypatch.setattr(headrace.train.train, "step", watched)
    run(monkeypatch, techniques, "z_loss", "selective_checkpoint", *words)
    found = {(r["technique"], r["base"]): r for r in rows(tmp_path, "techniques")}
    assert len(found) == 3, "what is put into the recipe computes what it does in the trunk"
    assert found["selective_checkpoint", "recipe"]["left_out"]
    for row in found.values():
        assert (row["measurement"], row["n"], row["loss_schedule"]["steps"]) == ("loss", 1, 9)
        assert row["metrics"].keys() == {"loss", "base_loss", "loss_difference", "loss_noise"}
        low, high = (row["metrics"]["loss_noise"][k] for k in ("low", "high"))
        assert 0 < low < high
    assert "added" in found["z_loss", "trunk"]["evidence"]
    first = rates[:9]  # of the base; the plan's own schedule ends at its third step
    assert first == sorted(first, reverse=True) and first[4] > 2 * first[8] > 0
    run(monkeypatch, techniques, "z_loss", *words)
    assert len(rows(tmp_path, "techniques")) == 3
    run(monkeypatch, techniques, "z_loss", *words[:-1], tmp_path / "none", "--limit-s", 0)
    assert "left: tiny trunk: z_loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(monkeypatch, techniques, "z_loss", "--only-loss")


@pytest.mark.slow
def test_a_whole_run_has_the_seconds_of_all_of_its_steps(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = "techniques.sequence_length_schedule."
    words = ["--shapes", plan, "--bases", "trunk", "--whole-run", 5, "--results", tmp_path]
    words += ["--base-with", "sequence_length_schedule", "torch_compile", "--set"]
    words += [f"{growing}start=2", "techniques.torch_compile.backend=eager"]
    run(monkeypatch, techniques, "shape_buckets:multiple=4", *words, f"{growing}until=4")
    (row,) = rows(tmp_path, "techniques")
    assert (row["measurement"], row["run_steps"]) == ("run", 5)
    assert len(row["graphs"]) == 3 and int(row["graphs"][0]) < int(row["graphs"][1])
    assert row["metrics"].keys() == {"run_ratio", "run", "base_run"} and row["n"] == 2
    assert row["evidence"].startswith("4 shapes came")


def test_a_base_that_is_read_once_counts_once_and_what_was_cut_off_is_missing(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def time(*given: Any, **how: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:  # the base, after the side
            return readings.Reading(refused="not done within 240 s", refusal=RefusalKind.TIME)
        return readings.Reading(seconds=[1.0, 1.1], evidence={})

    monkeypatch.setattr(techniques, "time_steps", time)
    words = ["--shapes", plan, "--bases", "trunk", "--results", tmp_path, "--missing", tmp_path]
    run(monkeypatch, techniques, "z_loss", *words)
    (row,) = rows(tmp_path, "techniques")
    assert row["n"] == 1
    for more in ([], ["--loss-steps", 3], ["--set", "seed=1"]):  # measured; not so; not so
        run(monkeypatch, techniques, "z_loss", *words, *more, "--limit-s", 0)
        assert ("left: tiny trunk: z_loss" in capsys.readouterr().out) == bool(more)
    for why, again in (
        ("not done within 240 s", True),
        ("its base cannot run: x", True),
        ("out of memory: x", False),
    ):
        file = tmp_path / "techniques.jsonl"
        file.write_text(json.dumps({**row, "metrics": {}, "refused": why}) + "\n")
        run(monkeypatch, techniques, "z_loss", *words, "--limit-s", 0)
        assert ("left: tiny trunk: z_loss" in capsys.readouterr().out) == again


def test_what_was_read_before_an_interruption_has_its_row(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def time(*given: Any, **how: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:  # the second side
            raise KeyboardInterrupt
        return readings.Reading(seconds=[len(asked) / 2], evidence={})

    monkeypatch.setattr(techniques, "time_steps", time)
    words = ["--shapes", plan, "--bases", "trunk", "--results", tmp_path]
    with pytest.raises(SystemExit):
        run(monkeypatch, techniques, "z_loss", "label_smoothing", *words)
    (row,) = rows(tmp_path, "techniques")
    assert row["technique"] == "z_loss" and row["n"] == 1
    assert row["metrics"]["speed_ratio"]["value"] == 0.5


def test_a_companion_stands_in_every_plan_and_what_is_in_its_way_in_none(plan: Path) -> None:
    for base in ("trunk", "recipe"):
        changes = (["device=cpu"], ["alibi"], ["selective_checkpoint"])
        first, side, own = techniques.sides(plan, base, ["z_loss", "alibi"], *changes)
        assert not side.refused
        assert "alibi" in first.plan.techniques
        assert "selective_checkpoint" not in first.plan.techniques
        assert set(side.plan.techniques) == {*first.plan.techniques, "z_loss"}
        assert ("alibi" in own.plan.techniques) == (base == "trunk")


def test_an_owner_of_the_same_socket_makes_way(plan: Path) -> None:
    _, side = techniques.sides(plan, "recipe", ["fused_cross_entropy"], ["device=auto"])
    assert side.replaces == ("chunked_cross_entropy",)
