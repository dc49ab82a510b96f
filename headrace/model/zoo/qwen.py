"""Qwen 3 (arXiv 2505.09388) is Llama with normalised queries and keys and heads of 128 features.

Qwen 2.5 (arXiv 2412.15115) has biases of queries, keys and values instead. Numbers are those of
config.json in Qwen/Qwen3-0.6B, -1.7B, -4B and -8B, and in Qwen/Qwen2.5-0.5B, -1.5B and -7B.
"""

from typing import Any


def _qwen3(dim: int, layers: int, heads: int, ffn: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab": 151936,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn": ffn,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "qk_norm": True,
        "tied_embeddings": tied,
    }


def _qwen2(
    dim: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int = 151936
) -> dict[str, Any]:
    return {
        "vocab": vocab,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "qkv_bias": True,
        "tied_embeddings": vocab == 151936,
    }


FAMILIES = {
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944, vocab=152064),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
}
