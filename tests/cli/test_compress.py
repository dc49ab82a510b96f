"""`compress` writes quantized copies of a run, measures each on its file, and chooses one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.assemble.sockets import FAKE, Build
from headrace.compress.codes import Codes
from headrace.compress.fake import fake_weight
from headrace.compress.sensitivity import logits_on
from headrace.export.point import open_point, read_point
from headrace.inference.load import open_model
from headrace.model.lora import merged_state
from headrace.plan.technique import installed

pytest.importorskip("torchao")
Call = Callable[..., Any]
QAT = "quantization_aware_training"
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
    for words in (("export", folder, "--to", "peft"), ("chat", folder, "--prompt", "x")):
        assert "is a quantized model and no run" in call(*words, code=2)["error"]
    assert "stores no nf4" in call("export", folder, "--to", "hf", code=3)["error"]
    packed = call("export", str(Path(made["folder"], "int8")), "--to", "vllm")
    assert packed["preset"] == "int8" and Path(packed["folder"], "config.json").is_file()
    assert "is a quantized model" in call("finetune", folder, "x.jsonl", code=2)["error"]


def test_a_folder_of_weights_takes_text(call: Call, corpus: Path, tmp_path: Path) -> None:
    weights = tmp_path / "hf"
    call("export", "demo", "--to", "hf", "--output", str(weights))
    out = str(tmp_path / "small")
    words = ("--to", "int8", "--output", out, "--budget-mb", "1")
    made = call("compress", str(weights), f"data.sources={corpus}", *words)
    assert made["chosen"] == "int8" and [p["name"] for p in made["points"]] == ["int8"]
    assert call("sample", f"{out}/int8", "--tokens", "2")["text"] is not None


def logits_of(build: Build) -> Tensor:
    """Return the logits of some rows of tokens."""
    ids_BT = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(2))
    return logits_on(build.model, ids_BT.to(build.device))


def assert_stored_as_trained(run: Path, folder: Path) -> None:
    """The file's codes are those of the last step, and compute what the run computes."""
    trained = open_model(run, installed())
    _, stored, _ = read_point(folder)
    assert {*stored} == {*trained.fake_quantized}
    state = merged_state(trained.model)
    for name, one in stored.items():
        kind = trained.fake_quantized[name].kind
        assert isinstance(one, Codes)
        assert torch.equal(one.dequantize(), fake_weight(state[name], kind)), name
    rounded = logits_of(trained)
    assert float((logits_of(open_point(folder, installed())) - rounded).abs().max()) < 1e-4
    trained.now = {FAKE: 0.0}
    assert float((logits_of(trained) - rounded).abs().max()) > 1e-3, "rounding shows"


def test_a_run_that_was_trained_for_few_bits_is_stored_as_it_was_trained(
    call: Call, workshop: Path, tmp_path: Path, tiny_demo: list[str]
) -> None:
    call("train", *tiny_demo, "name=rounded", "--with", QAT, f"techniques.{QAT}.group=16")
    few = ("--tokens", "512")
    made = call("compress", "rounded", "--to", "8da4w", "--output", str(tmp_path / "small"), *few)
    assert "in groups of 16, and is stored so" in " ".join(made["told"])
    assert_stored_as_trained(workshop / "runs" / "rounded", tmp_path / "small" / "8da4w")
    loss = call("eval", "rounded", *few)["bits_per_byte"]
    assert loss == pytest.approx(made["points"][0]["bits_per_byte"], rel=1e-5)
    assert loss != made["whole"]["bits_per_byte"]
    words = ("--to", "8da4w", "--group", "8", "--output", str(tmp_path / "other"))
    assert "--group 8 stores it in others" in " ".join(call("compress", "rounded", *words)["told"])


def test_a_run_with_adapters_is_quantized_with_them(
    call: Call, workshop: Path, tmp_path: Path
) -> None:
    file = tmp_path / "talk.jsonl"
    rows = [{"prompt": f"river {n} mill", "response": f"stone {n} level"} for n in range(400)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("--with", "lora", "--with", QAT, f"techniques.{QAT}.group=8")
    call("finetune", "demo", str(file), "goal.steps=2", "name=tuned", *words)
    made = call("compress", "tuned", "--to", "8da4w", "--output", str(tmp_path / "small"))
    loss = call("eval", "tuned")["bits_per_byte"]
    assert made["points"][0]["bits_per_byte"] == pytest.approx(loss, rel=1e-5)
    small = call("eval", str(tmp_path / "small" / "8da4w"))["bits_per_byte"]
    assert small == pytest.approx(loss, rel=1e-5)
    assert_stored_as_trained(workshop / "runs" / "tuned", tmp_path / "small" / "8da4w")
