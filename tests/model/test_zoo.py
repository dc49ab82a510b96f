"""Families are data: their shapes give the published numbers of parameters."""

import pytest
import torch

from headrace.core.model_config import ModelConfig
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.hf_config import architecture
from headrace.model.mask import MaskSpec
from headrace.model.zoo import families

PUBLISHED = {
    "gemma2-2b": ("Gemma2ForCausalLM", 2_614_341_888),
    "gemma2-9b": ("Gemma2ForCausalLM", 9_241_705_984),
    "gemma3-1b": ("Gemma3ForCausalLM", 999_885_952),
    "gpt2": ("GPT2LMHeadModel", 124_439_808),
    "gpt2-medium": ("GPT2LMHeadModel", 354_823_168),
    "gpt2-large": ("GPT2LMHeadModel", 774_030_080),
    "gpt2-xl": ("GPT2LMHeadModel", 1_557_611_200),
    "llama3-1b": ("LlamaForCausalLM", 1_235_814_400),
    "llama3-3b": ("LlamaForCausalLM", 3_212_749_824),
    "llama3-8b": ("LlamaForCausalLM", 8_030_261_248),
    "mistral-7b": ("MistralForCausalLM", 7_241_732_096),
    "phi3-mini": ("MistralForCausalLM", 3_821_079_552),  # which computes the same
    "qwen2.5-0.5b": ("Qwen2ForCausalLM", 494_032_768),
    "qwen2.5-1.5b": ("Qwen2ForCausalLM", 1_543_714_304),
    "qwen2.5-7b": ("Qwen2ForCausalLM", 7_615_616_512),
    "smollm2-135m": ("LlamaForCausalLM", 134_515_008),
    "smollm2-360m": ("LlamaForCausalLM", 361_821_120),
    "smollm2-1.7b": ("LlamaForCausalLM", 1_711_376_384),
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
