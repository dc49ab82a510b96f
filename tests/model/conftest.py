"""Make tiny decoders with weights that make every part matter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.core.model_config import ModelConfig
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec

TINY = {"vocab": 61, "dim": 24, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 22, "context": 19}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Every test draws from the same start."""
    torch.manual_seed(0)


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    """A function of `model.*` keys that gives a decoder with every parameter drawn at random."""

    def make(*, mask: MaskSpec | None = None, seed: int = 0, **keys: Any) -> Decoder:
        config = ModelConfig(**{**TINY, **keys})
        model = Decoder(config, baseline_parts(config), mask or MaskSpec())
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            middle = 1.0 if name.endswith("norm.weight") else 0.0
            torch.nn.init.normal_(parameter, middle, 0.2, generator=generator)
        return model

    return make
