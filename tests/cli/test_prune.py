"""`prune` writes a smaller model, which is evaluated as it is told and trained on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.model.adapter import read_config


def test_a_run_is_cut_and_trained_on_from_its_own_words(
    call: Callable[..., Any], tiny_demo: list[str], tmp_path: Path
) -> None:
    out, few = str(tmp_path / "cut"), ("--tokens", "512")
    made = call("prune", "demo", "--by", "10%", "--output", out, *few)
    assert made["left"] <= 0.9 * made["parameters"]
    before = call("eval", "demo", *few)["bits_per_byte"]
    assert made["bits_per_byte"] == pytest.approx(before, rel=1e-6)
    losses = [one["loss_nats"] for one in made["tried"]]
    assert losses == sorted(losses)
    config = read_config(Path(out))
    shape = made["tried"][0]["shape"]
    assert (config.layers, config.resolved_kv_heads, config.ffn) == tuple(shape.values())
    assert len(made["kept"]["layers"]) == shape["layers"]
    assert json.loads(Path(out, "pruning.json").read_text())["left"] == made["left"]
    text = next(word for word in tiny_demo if word.startswith("data.sources="))
    words = ("distill", "demo", out, text.partition("=")[2], "goal.steps=1", "name=recovered")
    report = call(*words)
    assert report["costs"]["student_parameters"] == made["left"]
    assert report["before"]["bits_per_byte"] < 1.5 * made["left_bits_per_byte"]


def test_a_run_is_cut_along_one_axis(say: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    out = tmp_path / "narrow"
    words = ("prune", "demo", "--by", "5%", "--only", "channels", "--tokens", "128")
    told = "".join(say(*words, "--output", str(out)))
    assert "weights are left" in told and f"distill demo {out} DATA" in told
    kept = json.loads((out / "pruning.json").read_text())["tried"][0]["shape"]
    config = read_config(out)
    assert kept["layers"] == config.layers and config.ffn == kept["channels"]
