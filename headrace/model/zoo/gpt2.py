"""GPT-2 (Radford et al. 2019) has learned positions, LayerNorm, tanh GELU, biases and tied weights.

Numbers are those of config.json in openai-community/gpt2, -medium, -large and -xl.
"""

from typing import Any


def _gpt2(dim: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "vocab": 50257,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "context": 1024,
        "norm": "layer_norm",
        "norm_eps": 1e-5,
        "activation": "gelu_tanh",
        "position": "learned",
        "bias": True,
        "tied_embeddings": True,
    }


FAMILIES = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
}
