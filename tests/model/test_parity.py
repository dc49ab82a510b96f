"""Import random models of transformers: logits, loss, gradients and greedy text are equal."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from state_dicts import to_theirs

from headrace.data.tokenizer import train_tokenizer
from headrace.export.hf import export_hf
from headrace.inference.sample import generate
from headrace.model.adapter import load_pretrained
from headrace.model.companions import Companions
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.head import IGNORED, cross_entropy
from headrace.model.mask import Rows, mask_of

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 67,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2_SMALL = {
    "vocab_size": 67,
    "n_layer": 2,
    "n_positions": 29,
    "n_embd": 40,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "llama, grouped queries": lambda: transformers.LlamaConfig(
        **SMALL,
        hidden_size=48,
        intermediate_size=52,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
    ),
    "llama, biases, wide heads, tied": lambda: transformers.LlamaConfig(
        **SMALL,
        hidden_size=24,
        intermediate_size=37,
        num_attention_heads=3,
        head_dim=14,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3, grouped queries, tied": lambda: transformers.Qwen3Config(
        **SMALL,
        hidden_size=36,
        intermediate_size=50,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        tie_word_embeddings=True,
        rope_theta=1e6,
    ),
    "qwen3, one key head": lambda: transformers.Qwen3Config(
        **SMALL,
        hidden_size=35,
        intermediate_size=27,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-4,
    ),
    "llama 3.1, scaled": lambda: transformers.LlamaConfig(
        **SMALL,
        hidden_size=48,
        intermediate_size=52,
        num_attention_heads=3,
        num_key_value_heads=3,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama, dynamic": lambda: transformers.LlamaConfig(
        **SMALL | {"max_position_embeddings": 16},
        hidden_size=40,
        intermediate_size=52,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    ),
    "qwen2, yarn": lambda: transformers.Qwen2Config(
        **SMALL,
        hidden_size=36,
        intermediate_size=50,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral, window": lambda: transformers.MistralConfig(
        **SMALL,
        hidden_size=36,
        intermediate_size=50,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        sliding_window=7,
    ),
    "phi3, fused": lambda: transformers.Phi3Config(
        **SMALL,
        hidden_size=40,
        intermediate_size=36,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=9,
    ),
    "gemma 2": lambda: transformers.Gemma2Config(
        **SMALL | {"num_hidden_layers": 3},
        hidden_size=32,
        intermediate_size=44,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        query_pre_attn_scalar=24,
        sliding_window=6,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
        attn_implementation="eager",
    ),
    "gemma 3": lambda: transformers.Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": 4},
        hidden_size=32,
        intermediate_size=44,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=12,
        query_pre_attn_scalar=24,
        sliding_window=6,
        sliding_window_pattern=3,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
        },
    ),
    "gpt2, tied": lambda: transformers.GPT2Config(**GPT2_SMALL, n_head=5),
    "gpt2, exact gelu": lambda: transformers.GPT2Config(
        **GPT2_SMALL,
        n_head=4,
        n_inner=37,
        activation_function="gelu",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-4,
    ),
    "gpt2, squared relu": lambda: transformers.GPT2Config(
        **GPT2_SMALL,
        n_head=1,
        activation_function="relu2",
    ),
}
Pair = tuple[torch.nn.Module, Decoder]


@pytest.fixture(params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """Return their model, saved, and ours, read from that folder."""
    theirs = transformers.AutoModelForCausalLM.from_config(MODELS[request.param]()).eval()
    for name, parameter in theirs.named_parameters():
        middle = 1.0 if "norm" in name or ".ln_" in name else 0.0
        torch.nn.init.normal_(parameter, middle, 0.2)
    theirs.save_pretrained(tmp_path)
    config, source = load_pretrained(tmp_path)
    ours = Decoder(config, baseline_parts(config), mask_of(config))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(source(name, parameter.shape))
    return theirs, ours


def batch() -> tuple[torch.Tensor, torch.Tensor, Rows]:
    ids = torch.randint(67, (3, 24))
    targets = ids[:, 1:].clone()
    targets[0, :15] = IGNORED
    return ids[:, :-1], targets, Rows(torch.arange(23).expand(3, -1))


def test_logits(pair: Pair) -> None:
    theirs, ours = pair
    ids, _, rows = batch()
    with torch.no_grad():
        expected = theirs(ids).logits
        found = ours.logits(ids, rows)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_loss_and_every_gradient(pair: Pair) -> None:
    theirs, ours = pair
    ids, targets, rows = batch()
    count = int((targets != IGNORED).sum())
    expected = F.cross_entropy(theirs(ids).logits.flatten(0, 1), targets.flatten())
    found = ours(ids, targets, rows, objective=cross_entropy, scale=torch.tensor(1 / count))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    expected.backward()
    found.backward()
    gradients = {n: p.grad for n, p in ours.named_parameters()}
    mapped = to_theirs(ours.config, gradients, type(theirs).__name__)
    named = dict(theirs.named_parameters())
    assert mapped.keys() == named.keys()
    for name, parameter in named.items():
        error = (mapped[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, (name, error)


def test_what_is_exported_is_the_same_model(pair: Pair, tmp_path: Path) -> None:
    """Bit for bit, but that our norms are 1 + Gemma's weight; and as transformers reads it."""
    theirs, ours = pair
    name = type(theirs).__name__
    mapped = to_theirs(ours.config, dict(ours.named_parameters()), name)
    for key, parameter in theirs.named_parameters():
        one = mapped.pop(key)
        if "gemma" in theirs.config.model_type and key.endswith("norm.weight"):
            assert torch.equal(one, 1 + parameter), key
        else:
            assert torch.equal(one, parameter), key
    assert not mapped
    tokenizer = train_tokenizer(["a"], vocab=257)
    tokenizer.save(tmp_path / "tokenizer.json")
    values = json.loads((tmp_path / "config.json").read_text())
    export_hf(
        dict(ours.named_parameters()),
        ours.config,
        tmp_path / "tokenizer.json",
        tmp_path / "out",
        sequence_length=64,
        position=ours.position.config_fields(),
        companions=Companions({"config.json": values}),
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again).__name__ == name
    ids, _, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)


def test_greedy_text(pair: Pair) -> None:
    theirs, ours = pair
    prompts = torch.randint(67, (2, 7))
    expected = theirs.generate(prompts, max_new_tokens=20, do_sample=False)
    assert torch.equal(generate(ours, prompts, new_tokens=20, temperature=0), expected)
