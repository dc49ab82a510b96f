"""`compress` writes quantized copies of a run, measures each on its file, and chooses one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.export.point import open_point, read_point
from headrace.plan.technique import installed

pytest.importorskip("torchao")
Call = Callable[..., Any]
KEYS = ("--group", "16", "--tokens", "512")


@pytest.fixture(scope="module")
def made(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`compress demo` with every preset, under a limit of the loss that 4 bits do not reach."""
    from typer.testing import CliRunner

    from headrace.cli.app import app

    out = tmp_path_factory.mktemp("points") / "all"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workshop)
        words = ["compress", "demo", *KEYS, "--max-loss", "0.2%", "--output", str(out), "--json"]
        ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


def test_every_preset_becomes_a_point_that_is_measured(made: dict[str, Any]) -> None:
    points = {point["name"]: point for point in made["points"]}
    assert {*points} >= {"int8", "int8-dynamic", "8da4w", "int4", "int4-gptq", "nf4"}
    for point in points.values():
        file = Path(made["folder"], point["folder"], "model.safetensors")
        assert point["bytes"] == file.stat().st_size < made["whole"]["bytes"]
        assert point["logits_from_reference"] < 1e-4 < point["logits_from_whole"]
        assert point["tokens_per_s"] > 0
        rise = point["bits_per_byte"] / made["whole"]["bits_per_byte"] - 1
        assert point["rise"] == pytest.approx(rise)
    assert points["int4"]["bytes"] < points["int8"]["bytes"]
    chosen = points[made["chosen"]]
    fits = [point for point in points.values() if point["rise"] <= 0.002]
    assert chosen["bytes"] == min(point["bytes"] for point in fits)
    page = Path(made["folder"], "compression.html").read_text()
    assert "Bits per byte by size" in page and "Sensitivity" in page
    assert json.loads(Path(made["folder"], "report.json").read_text())["chosen"] == made["chosen"]


def questions(folder: Path) -> Path:
    """Write a set of questions."""
    file = folder / "q.jsonl"
    file.write_text(json.dumps({"query": "the", "choices": ["mill", "river"], "gold": 0}) + "\n")
    return file


def test_a_point_is_evaluated_and_sampled_as_it_was_measured(
    call: Call, made: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("int8-dynamic", "int4-gptq", "nf4"):
        folder = str(Path(made["folder"], name))
        loss = call("eval", folder, "--tokens", "512")["bits_per_byte"]
        point = next(point for point in made["points"] if point["name"] == name)
        assert loss == pytest.approx(point["bits_per_byte"], rel=1e-6)
    text = call("sample", folder, "--tokens", "4", "--temperature", "0", "--prompt", "river")
    assert text["prompt"] == "river" and text["text"]
    build = open_point(Path(folder), installed())
    spec, stored, _ = read_point(Path(folder))
    assert spec.name == "nf4" and "blocks.0.mlp.down.weight" in stored
    assert type(build.model.get_parameter("blocks.0.mlp.down.weight").data) is not torch.Tensor
    call("eval", folder, "--tasks", str(questions(tmp_path)))
    for words in (("export", folder, "--to", "hf"), ("chat", folder, "--prompt", "x")):
        assert "is a quantized model and no run" in call(*words, code=2)["error"]
    assert "is a quantized model" in call("finetune", folder, "x.jsonl", code=2)["error"]


def test_a_folder_of_weights_takes_text(call: Call, corpus: Path, tmp_path: Path) -> None:
    weights = tmp_path / "hf"
    call("export", "demo", "--to", "hf", "--output", str(weights))
    out = str(tmp_path / "small")
    words = ("--to", "int8", "--output", out, "--budget-mb", "1")
    made = call("compress", str(weights), f"data.sources={corpus}", *words)
    assert made["chosen"] == "int8" and [p["name"] for p in made["points"]] == ["int8"]
    assert call("sample", f"{out}/int8", "--tokens", "2")["text"] is not None


def test_a_run_with_adapters_is_quantized_with_them(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    rows = [{"prompt": f"river {n} mill", "response": f"stone {n} level"} for n in range(400)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    call("finetune", "demo", str(file), "goal.steps=2", "name=tuned", "--with", "lora")
    made = call("compress", "tuned", "--to", "int8", "--output", str(tmp_path / "small"))
    loss = call("eval", "tuned")["bits_per_byte"]
    assert made["whole"]["bits_per_byte"] == pytest.approx(loss, rel=1e-5)
    small = call("eval", str(tmp_path / "small" / "int8"))["bits_per_byte"]
    assert small == pytest.approx(made["points"][0]["bits_per_byte"], rel=1e-6)
