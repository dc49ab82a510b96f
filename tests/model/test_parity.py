"""Import random models of transformers: logits, loss, gradients and greedy text are equal."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from state_dicts import to_theirs

from headrace.inference.sample import generate
from headrace.model.adapter import load_pretrained
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.head import IGNORED, cross_entropy
from headrace.model.mask import MaskSpec, Rows

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
    ours = Decoder(config, baseline_parts(config), MaskSpec())
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
    mapped = to_theirs(ours.config, {n: p.grad for n, p in ours.named_parameters()})
    named = dict(theirs.named_parameters())
    assert mapped.keys() == named.keys()
    for name, parameter in named.items():
        error = (mapped[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, (name, error)


def test_names_come_back_bit_for_bit(pair: Pair) -> None:
    theirs, ours = pair
    mapped = to_theirs(ours.config, dict(ours.named_parameters()))
    for name, parameter in theirs.named_parameters():
        assert torch.equal(mapped.pop(name), parameter), name
    assert not mapped


def test_greedy_text(pair: Pair) -> None:
    theirs, ours = pair
    prompts = torch.randint(67, (2, 7))
    expected = theirs.generate(prompts, max_new_tokens=20, do_sample=False)
    assert torch.equal(generate(ours, prompts, new_tokens=20, temperature=0), expected)
