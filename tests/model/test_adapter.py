"""Names and layouts of tensors, and folders of weights, without transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order
from safetensors.torch import save_file
from state_dicts import to_ours, to_theirs
from torch import Tensor

from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.model.adapter import load_pretrained, weights_digest
from headrace.model.decoder import Decoder
from headrace.model.hf_config import config_to_hf

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases, one key head": {"bias": True, "kv_heads": 1, "ffn": 37},
    "qwen3": {"qk_norm": True, "head_dim": 10, "tied_embeddings": True},
    "gpt2": {
        "norm": "layer_norm",
        "activation": "gelu_tanh",
        "position": "learned",
        "bias": True,
        "kv_heads": 4,
        "tied_embeddings": True,
    },
}
MakeDecoder = Callable[..., Decoder]


def state_of(model: Decoder) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture
def gpt2(make_decoder: MakeDecoder) -> tuple[ModelConfig, dict[str, Tensor]]:
    model = make_decoder(**SHAPES["gpt2"])
    return model.config, to_theirs(model.config, state_of(model))


def save(folder: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> Path:
    values = config_to_hf(config, sequence_length=16)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_round_trip_is_exact(make_decoder: MakeDecoder, name: str) -> None:
    model = make_decoder(**SHAPES[name])
    state = state_of(model)
    theirs = to_theirs(model.config, state)
    back = to_ours(model.config, theirs)
    assert list(back) == list(state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    again = to_theirs(model.config, back)
    assert list(again) == list(theirs)
    assert all(torch.equal(again[key], theirs[key]) for key in theirs)


def test_our_layout_is_taken_apart(make_decoder: MakeDecoder) -> None:
    model = make_decoder()  # 4 heads on 2 key heads of 6 features, ffn of 22 in 2 groups
    theirs = to_theirs(model.config, state_of(model))
    qkv = model.blocks["0"].mixer.qkv.weight
    assert torch.equal(theirs["model.layers.0.self_attn.q_proj.weight"][12:], qkv[24:36])
    assert torch.equal(theirs["model.layers.0.self_attn.k_proj.weight"][:6], qkv[12:18])
    assert torch.equal(theirs["model.layers.0.self_attn.v_proj.weight"][6:], qkv[42:48])
    gate_up = model.blocks["0"].mlp.gate_up.weight
    assert torch.equal(theirs["model.layers.0.mlp.up_proj.weight"][:11], gate_up[11:22])


def test_gpt2_s_published_names_and_buffers(gpt2: tuple[ModelConfig, dict[str, Tensor]]) -> None:
    config, tensors = gpt2
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 19, 19)
    bare["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    expected = to_ours(config, tensors)
    assert all(torch.equal(t, expected[name]) for name, t in to_ours(config, bare).items())


def test_a_tied_config_over_untied_weights_is_told(
    gpt2: tuple[ModelConfig, dict[str, Tensor]],
) -> None:
    config, tensors = gpt2
    other = tensors["transformer.wte.weight"] + 1
    with pytest.raises(ConfigError, match="tie"):
        to_ours(config, {**tensors, "lm_head.weight": other})


def test_wrong_tensors_are_named(gpt2: tuple[ModelConfig, dict[str, Tensor]]) -> None:
    config, tensors = gpt2
    lacking = {name: t for name, t in tensors.items() if name != "transformer.h.1.ln_2.bias"}
    with pytest.raises(ConfigError, match=r"1 missing: transformer\.h\.1\.ln_2\.bias"):
        to_ours(config, lacking)
    with pytest.raises(ConfigError, match=r"1 unexpected: transformer\.h\.0\.ln_3"):
        to_ours(config, {**tensors, "transformer.h.0.ln_3.bias": torch.ones(24)})
    with pytest.raises(ConfigError, match=r"wpe\.weight is \[18, 24\], expected \[19, 24\]"):
        to_ours(config, {**tensors, "transformer.wpe.weight": torch.ones(18, 24)})
    with pytest.raises(ConfigError, match=r"missing: embed\.weight"):
        to_theirs(config, {})


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_gives_the_weights_by_our_names(
    make_decoder: MakeDecoder, tmp_path: Path, name: str
) -> None:
    model = make_decoder(**SHAPES[name])
    state = state_of(model)
    theirs = {n: t.bfloat16() for n, t in to_theirs(model.config, state).items()}
    config, source = load_pretrained(save(tmp_path, model.config, theirs))
    assert config.dim == 24
    for key, tensor in state.items():
        found = source(key, tensor.shape)
        assert found.dtype == torch.float32
        assert torch.equal(found, tensor.bfloat16().float())


def test_a_weight_that_the_folder_lacks_is_a_mistake_of_ours(
    gpt2: tuple[ModelConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    _, source = load_pretrained(save(tmp_path, *gpt2))
    with pytest.raises(AssertionError, match=r"embed\.weight is \[61, 24\].* not \[64, 24\]"):
        source("embed.weight", torch.Size([64, 24]))
    with pytest.raises(AssertionError, match=r"head\.weight is not in"):
        source("head.weight", torch.Size([61, 24]))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_given_weights_that_are_no_numbers_are_named(
    wrong: float, gpt2: tuple[ModelConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    config, tensors = gpt2
    name = next(n for n in tensors if n.endswith("wte.weight"))
    changed = {**tensors, name: tensors[name].clone()}
    changed[name].view(-1)[3:6] = wrong
    _, source = load_pretrained(save(tmp_path, config, changed))
    with pytest.raises(ConfigError, match=in_order("embed.weight", 3, "1,464")) as told:
        source("embed.weight", torch.Size([61, 24]))
    assert "lr" not in told.value.remedy.text


def test_shards_are_read_by_their_index(
    gpt2: tuple[ModelConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    config, tensors = gpt2
    save(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    names = list(tensors)
    places = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    _, source = load_pretrained(tmp_path)
    expected = to_ours(config, tensors)
    assert all(torch.equal(source(name, t.shape), t) for name, t in expected.items())

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        load_pretrained(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ConfigError, match=in_order(index, "../model.safetensors", "not a file")):
        load_pretrained(tmp_path)


def test_one_set_of_weights_is_read_and_a_second_is_an_error(
    gpt2: tuple[ModelConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    """As transformers does: model.safetensors, whatever lies beside it; no tensor comes twice."""
    config, tensors = gpt2
    save(tmp_path, config, tensors)
    wrong = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(wrong, tmp_path / "zz.safetensors")
    _, source = load_pretrained(tmp_path)
    expected = to_ours(config, tensors)
    assert all(torch.equal(source(name, t.shape), t) for name, t in expected.items())
    digest = weights_digest(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "aa.safetensors")
    with pytest.raises(ConfigError, match=r"stands twice in .*aa\.safetensors"):
        load_pretrained(tmp_path)
    save(tmp_path, config, wrong)
    assert weights_digest(tmp_path) != digest


def test_pickles_are_never_opened(
    gpt2: tuple[ModelConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    save(tmp_path, *gpt2)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(UnsupportedError, match="pickle") as caught:
        load_pretrained(tmp_path)
    assert "save_pretrained" in caught.value.remedy.text


def test_damaged_and_quantised_folders(
    gpt2: tuple[ModelConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    config, tensors = gpt2
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_pretrained(tmp_path)
    save(tmp_path, config, {**tensors, "transformer.wpe.weight": torch.ones(19, 24).char()})
    with pytest.raises(UnsupportedError, match=r"wpe\.weight .* is I8"):
        load_pretrained(tmp_path)
    weights = save(tmp_path, config, tensors) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="damaged"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_pretrained(tmp_path)
