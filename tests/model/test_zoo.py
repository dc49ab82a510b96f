"""Families are data: their shapes give the published numbers of parameters."""

import pytest
import torch

from headrace.core.model_config import ModelConfig
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.hf_config import architecture
from headrace.model.mask import MaskSpec
from headrace.model.zoo import families

PUBLISHED = {
    "gpt2": ("GPT2LMHeadModel", 124_439_808),
    "gpt2-medium": ("GPT2LMHeadModel", 354_823_168),
    "gpt2-large": ("GPT2LMHeadModel", 774_030_080),
    "gpt2-xl": ("GPT2LMHeadModel", 1_557_611_200),
    "llama3-1b": ("LlamaForCausalLM", 1_235_814_400),
    "llama3-3b": ("LlamaForCausalLM", 3_212_749_824),
    "llama3-8b": ("LlamaForCausalLM", 8_030_261_248),
    "qwen3-0.6b": ("Qwen3ForCausalLM", 596_049_920),
    "qwen3-1.7b": ("Qwen3ForCausalLM", 1_720_574_976),
    "qwen3-4b": ("Qwen3ForCausalLM", 4_022_468_096),
    "qwen3-8b": ("Qwen3ForCausalLM", 8_190_735_360),
}
"""Architecture and parameters (tied ones once), from the model cards' safetensors."""


def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(
            p.numel() for p in Decoder(config, baseline_parts(config), MaskSpec()).parameters()
        )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_families(name: str) -> None:
    config = ModelConfig.model_validate({"family": name, **families()[name]})
    kind, count = PUBLISHED[name]
    assert parameters(config) == count
    assert architecture(config).name == kind


def test_every_family_builds() -> None:
    assert {"headrace", "headrace-mini", "headrace-small", *PUBLISHED} <= set(families())
    for name, values in families().items():
        assert parameters(ModelConfig.model_validate({"vocab": 64, **values})) > 0, name
