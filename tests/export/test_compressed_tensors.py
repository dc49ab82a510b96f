"""A folder in compressed-tensors format holds the codes, and its own package reads them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_gguf import MODELS
from tiny_gguf import model

from headrace.compress.codes import Codes, quantize_nearest
from headrace.compress.quantized_model import faking, quantize_model
from headrace.compress.sensitivity import logits_on
from headrace.compress.spec import GROUP_INT4, ROW_INT8
from headrace.core.errors import UnsupportedError
from headrace.data.tokenizer import train_tokenizer
from headrace.export.compressed_tensors import PackedExport, matrices_only, pack_int32
from headrace.export.hf import export_hf
from headrace.model.adapter import links

TRAIN = ("model.dim=32", "goal.steps=4", "name=a")


@pytest.mark.parametrize(("kind", "bits"), [(ROW_INT8, 8), (GROUP_INT4, 4)])
def test_codes_are_packed_as_the_format_packs_them(kind: Any, bits: int) -> None:
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(bits))
    codes = quantize_nearest(weight, kind).codes_RC
    words = pack_int32(codes, bits)
    assert words.dtype is torch.int32 and words.shape == (6, 96 * bits // 32)
    shifted = int(words[0, 0]) & ((1 << bits) - 1)
    assert shifted - (1 << (bits - 1)) == codes[0, 0]
    packages = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert torch.equal(words, packages.pack_to_int32(codes, bits))
    assert torch.equal(packages.unpack_from_int32(words, bits, codes.shape), codes)


def test_a_run_becomes_a_folder_of_codes(tmp_path: Path, plan_file: Path, zygote: Any) -> None:
    """Every matrix of blocks is in codes; embedding, head and norms are whole."""
    assert zygote.run(tmp_path, "train", str(plan_file), *TRAIN).code == 0
    for to, more, kind, bound in (
        ("vllm", (), "pack-quantized", 1e-4),
        ("hf", ("--quantize", "int8-dynamic"), "int-quantized", 0.1),
    ):
        told = zygote.run(tmp_path, "export", "a", "--to", to, *more, "--json")
        assert told.code == 0, told.err
        said = json.loads(told.out)
        folder = tmp_path / said["folder"]
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == "compressed-tensors" and config["format"] == kind
        tensors = load_file(folder / "model.safetensors")
        packed = {name for name in tensors if name.endswith("weight_scale")}
        assert len(packed) == 7 and "model.embed_tokens.weight" in tensors
        assert said["drift"] is None or said["drift"] < bound
    wrong = zygote.run(tmp_path, "export", "a", "--to", "vllm", "--quantize", "8da4w", "--json")
    assert wrong.code == 2 and "int8, int8-dynamic, int4" in json.loads(wrong.out)["error"]


def test_gpt2_s_matrices_are_no_linears_there() -> None:
    ours, spec = model(MODELS["gpt2"][0]), matrices_only("int8")
    build: Any = SimpleNamespace(model=ours, config=ours.config)
    with pytest.raises(UnsupportedError, match="Conv1D") as refused:
        PackedExport(build, spec, quantize_model(ours, spec)).check(Path("runs/a"))
    assert refused.value.remedy.text == "headrace export runs/a --to onnx"


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("preset", ["int8", "int8-dynamic", "int4"])
def test_transformers_computes_the_codes(name: str, preset: str, tmp_path: Path) -> None:
    """Three families are opened by compressed-tensors' own package.

    Of activations in 8 bits it rounds the largest of a token in another way.
    """
    pytest.importorskip("compressed_tensors", reason="pip install 'headrace[vllm]'")
    transformers = pytest.importorskip("transformers")
    ours, spec = model(MODELS[name][0]), matrices_only(preset)
    stored = quantize_model(ours, spec)
    ids_BT = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(3))
    with faking(ours, spec, stored):
        expected = logits_on(ours, ids_BT)
    build: Any = SimpleNamespace(model=ours, config=ours.config)
    export = PackedExport(build, spec, stored)
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(["w1 w2 w3 river mill"] * 9, vocab=300).save(tokenizer)
    export_hf(
        export.state(),
        ours.config,
        tokenizer,
        tmp_path / "out",
        sequence_length=32,
        position=ours.position.config_fields(),
        packed=export,
    )
    opened = transformers.AutoModelForCausalLM
    theirs = opened.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert any(name.endswith("weight_scale") for name, _ in theirs.named_parameters())
    bound = 0.5 if preset == "int8-dynamic" else 2e-4
    torch.testing.assert_close(theirs(ids_BT).logits, expected, rtol=0, atol=bound)
    compared = 0
    for link in links(ours.config):
        if export.tensors(link) is None:
            continue
        one = stored[link.ours]
        assert isinstance(one, Codes)
        for name, value in link.to_theirs(one.dequantize()).items():
            same = theirs.get_submodule(name.removesuffix(".weight")).weight
            assert torch.equal(same, value), name
            compared += 1
    assert compared >= 14, compared
