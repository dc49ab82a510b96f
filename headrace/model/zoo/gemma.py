"""Gemma (arXiv 2408.00118, 2503.19786) has windows that alternate, and norms on both sides.

The embedding is scaled by the root of its width and tied; MLPs are gated by GELU. Gemma 2 caps
scores and logits; Gemma 3 normalises queries and keys instead, and its layers with a window rotate
by a base of their own. Numbers are those of config.json in google/gemma-2-2b, gemma-2-9b and
gemma-3-1b-pt.
"""

from typing import Any


def _gemma(dim: int, layers: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return {
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 256,
        "ffn": ffn,
        "norm_eps": 1e-6,
        "activation": "geglu",
        "post_norms": True,
        "embedding_scale": dim**0.5,
        "tied_embeddings": True,
    }


_GEMMA2: dict[str, Any] = {
    "vocab": 256000,
    "window": 4096,
    "window_between": 1,
    "attention_cap": 50.0,
    "logit_cap": 30.0,
}

FAMILIES = {
    "gemma2-2b": {**_gemma(2304, 26, 8, 4, 9216), **_GEMMA2},
    "gemma2-9b": {**_gemma(3584, 42, 16, 8, 14336), **_GEMMA2},
    "gemma3-1b": {
        **_gemma(1152, 26, 4, 1, 6912),
        "vocab": 262144,
        "qk_norm": True,
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
        "window": 512,
        "window_between": 5,
    },
}
