"""`compress --recipe` goes a whole path from a run to a file, and measures every hop."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.chain import student_of
from headrace.core.model_config import ModelConfig
from headrace.export import executorch_file, onnx_file
from headrace.model.adapter import read_config

pytest.importorskip("torchao")
Call = Callable[..., Any]
STUDENT = ("model.dim=32", "model.heads=2", "model.kv_heads=2", "model.head_dim=16", "model.ffn=64")
FEW = ("goal.steps=2", "--tokens", "256")
GPT2 = ("model.family=gpt2", "model.tied_embeddings=false")


def test_edge_distils_prunes_rounds_and_quantizes(call: Call, tmp_path: Path) -> None:
    """The codes compute what the rounded training computes, to 1e-4."""
    out = tmp_path / "edge"
    words = ("name=e", *STUDENT, *FEW, "--by", "8%", "--until", "quantize", "--output", str(out))
    made = call("compress", "demo", "--recipe", "edge", *words)
    hops = {hop["name"]: hop for hop in made["hops"]}
    assert [*hops] == ["run", "distil", "prune", "recover", "quantize"]
    assert hops["quantize"]["logits_from_before"] < 1e-4 < hops["recover"]["logits_from_before"]
    assert hops["quantize"]["bytes"] < hops["prune"]["bytes"] < hops["distil"]["bytes"]
    loss = hops["recover"]["bits_per_byte"]
    assert hops["quantize"]["bits_per_byte"] == pytest.approx(loss, rel=1e-5)
    assert all(hop["tokens_per_s"] > 0 and hop["bits_per_byte"] > 0 for hop in hops.values())
    assert hops["prune"]["command"].startswith("headrace prune runs/e-distil --by 8%")
    assert "schedule.final_fraction=0" in hops["recover"]["command"].split()
    assert read_config(out / "pruned").ffn == 32
    assert json.loads((out / "hops.json").read_text()) == made["hops"]
    again = call("compress", "demo", "--recipe", "edge", *words, code=2)
    assert "is there already" in again["error"]


def test_inference_speed_converts_layer_norm(
    call: Call, tiny_demo: list[str], tmp_path: Path
) -> None:
    small = [word for word in tiny_demo if not word.startswith("eval.every")]
    call("train", *small, *GPT2, "name=gpt")
    words = ("--recipe", "inference-speed", *FEW, "--until", "quantize")
    made = call("compress", "gpt", *words, "--output", str(tmp_path / "fast"))
    hops = {hop["name"]: hop for hop in made["hops"]}
    assert [*hops] == ["run", "distil", "convert", "quantize"]
    report = json.loads(Path("runs/gpt-convert/report.json").read_text())
    assert report["techniques"]["rms_norm"]["numbers"]["norms"] == 3
    distilled = call("eval", "gpt-distil", "--tokens", "512")["bits_per_byte"]
    assert report["before"]["bits_per_byte"] == pytest.approx(distilled, rel=1e-3)
    assert hops["convert"]["logits_from_before"] < 1
    further = call("train", "runs/gpt-convert/plan.toml", "--resume", "goal.steps=3")
    assert further["steps"] == 3
    folder = next(Path("runs/gpt/exported").iterdir())
    tuned = ("--with", "rms_norm", "--with", "lora")
    tuned = (*tuned, f"model.pretrained={folder}", f"data.tokenizer={folder}")
    refused = call("train", *small[:1], *small[2:5], *tuned, "name=x", code=3)
    assert "layer norm" in refused["error"] and "lora" in refused["error"]


def test_a_missing_runtime_is_told_before_anything_is_trained(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for recipe, module in (("edge", executorch_file), ("inference-speed", onnx_file)):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        error = call("compress", "demo", "--recipe", recipe, "name=n", *STUDENT, code=3)
        assert error["remedy"].startswith("pip install")
        assert not Path("runs/n-distil").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--recipe", "egde"), 2, "edge, inference-speed"),
        (("--recipe", "edge", "--until", "convert"), 2, "distil, prune, recover"),
        (("--recipe", "edge", "--until", "convrt"), 2, "is no hop of a recipe"),
        (("--recipe", "edge", "--to", "int8"), 2, "--to is of single points"),
        (("--until", "prune"), 2, "--recipe names none"),
        (("--recipe", "edge", "--until", "prune"), 2, "has 8 features"),
        (("--recipe", "edge", "--until", "prune", *STUDENT, "--by", "60%"), 3, "leaves out 60"),
    ],
)
def test_what_a_recipe_cannot_do_is_refused(
    call: Call, words: tuple[str, ...], code: int, said: str
) -> None:
    error = call("compress", "demo", *words, code=code)
    assert said in error["error"] and error["remedy"], error


def test_a_student_is_as_deep_and_half_as_wide() -> None:
    whole = ModelConfig(dim=256, heads=8, kv_heads=4, layers=6, ffn=768, vocab=512)
    small = student_of(whole, {"model.layers": "5"})
    assert (small.dim, small.heads, small.kv_heads, small.ffn) == (128, 4, 2, 384)
    assert small.layers == 5 and small.resolved_head_dim == whole.resolved_head_dim


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "package"), [("edge", "executorch"), ("inference-speed", "onnx")]
)
def test_a_recipe_goes_as_far_as_its_file(
    call: Call, tmp_path: Path, recipe: str, package: str
) -> None:
    pytest.importorskip(package, reason=f"pip install 'headrace[{package}]'")
    words = ("--recipe", recipe, f"name={recipe}", *STUDENT, *FEW, "--output", str(tmp_path / "o"))
    made = call("compress", "demo", *words, *(("--by", "8%") if recipe == "edge" else ()))
    last, before = made["hops"][-1], made["hops"][-2]
    assert last["name"] == "export" and Path(last["made"]).is_file()
    assert last["bytes"] == Path(last["made"]).stat().st_size and last["tokens_per_s"] > 0
    # A file has no entries that pad the vocabulary: 20 of 320, which have learned nothing here.
    assert last["bits_per_byte"] == pytest.approx(before["bits_per_byte"], rel=0.02)
    assert last["logits_from_before"] < (0.05 if recipe == "edge" else 1e-4)
    assert last["peak_bytes"] is None or last["peak_bytes"] > 0
