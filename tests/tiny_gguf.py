"""Make a small decoder of random weights, and its GGUF file."""

from pathlib import Path
from typing import Any

import torch

from headrace.core.model_config import ModelConfig
from headrace.data.tokenizer import Tokenizer
from headrace.export.gguf import Origin, Quantized, Written, write_gguf
from headrace.export.gguf_graph import graph_of
from headrace.export.gguf_tokenizer import vocabulary
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.init import random_source
from headrace.model.mask import mask_of


def model(keys: dict[str, Any]) -> Decoder:
    """Return a decoder with random weights; norms and biases have some too."""
    if "rope_scaling" in keys:
        scaling = {"factor": 4.0, "original_length": 32, **keys["rope_scaling"]}
        keys = {**keys, "rope_scaling": scaling}
    sizes = {"vocab": 320, "dim": 64, "layers": 2, "heads": 4, "init_std": 0.2}
    config = ModelConfig(**{**sizes, "output_init": "plain", **keys})
    made, source = (
        Decoder(config, baseline_parts(config), mask_of(config)),
        random_source(config, 3),
    )
    spread = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=spread)
            parameter.copy_(source(name, parameter.shape) + noise * (parameter.dim() == 1))
    return made


def write(ours: Decoder, tokenizer: Tokenizer, file: Path, quantize: Quantized = "f32") -> Written:
    return write_gguf(
        dict(ours.named_parameters()),
        ours.config,
        ours.position,
        graph_of(ours.config, ours.position),
        vocabulary(tokenizer),
        file,
        document_token=tokenizer.document_token,
        context=48,
        quantize=quantize,
        name="toy",
        origin=Origin("toy", 3, "seal", {"data": "digest"}),
    )
