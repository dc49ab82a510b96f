"""Weights that were trained with layer norm are converted to RMSNorm."""

from typing import Any

import pytest
import torch
from tiny_gguf import model

from headrace.compress.sensitivity import logits_on
from headrace.core.model_config import ModelConfig
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import mask_of
from headrace.model.rms_conversion import as_asked, as_rms_norm, is_converted

GPT2: dict[str, Any] = {
    "norm": "layer_norm",
    "activation": "gelu_tanh",
    "position": "learned",
    "bias": True,
    "context": 32,
}


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_only_what_nothing_can_hold_is_lost(tied: bool) -> None:
    """Without a bias of the last norm and with a head of its own the logits are the same."""
    ours = model({**GPT2, "tied_embeddings": tied})
    bias = ours.norm.bias
    bias.zero_()
    if tied:
        ours.embed.weight.sub_(ours.embed.weight.mean(-1, keepdim=True))
    ids_BT = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = logits_on(ours, ids_BT)
    config = ours.config.model_copy(update={"norm": "rms_norm"})
    made = Decoder(config, baseline_parts(config), mask_of(config))
    source = as_rms_norm(ours.config, lambda name, shape: ours.get_parameter(name).detach())
    for name, parameter in made.named_parameters():
        parameter.copy_(source(name, parameter.shape))
    assert not any("norm.bias" in name for name, _ in made.named_parameters())
    assert float((logits_on(made, ids_BT) - expected).abs().max()) < 2e-5 * expected.abs().max()
    plain = {name: ours.get_parameter(name) for name, _ in made.named_parameters()}
    made.load_state_dict(plain)
    assert float((logits_on(made, ids_BT) - expected).abs().max()) > 0.01, "the conversion shows"


def test_a_plan_asks_for_it_by_a_key_that_it_gives() -> None:
    stored = ModelConfig(**GPT2)
    asks, silent = ModelConfig(norm="rms_norm"), ModelConfig()
    assert is_converted(asks, stored) and not is_converted(silent, stored)
    assert as_asked(asks, stored).norm == "rms_norm" and as_asked(silent, stored) is stored
    assert not is_converted(asks, stored.model_copy(update={"bias": False}))
