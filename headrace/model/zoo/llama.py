"""Llama 3 (arXiv 2407.21783) has RMSNorm, RoPE with theta 500,000, grouped queries, SwiGLU.

8b has the numbers of Meta-Llama-3-8B's config.json; 1b and 3b have the shapes of Llama-3.2-1B and
-3B without their scaling of RoPE's frequencies, which only serves contexts past 8,192 tokens: a
folder of these weights is read with it.
"""

from typing import Any


def _llama3(dim: int, layers: int, heads: int, ffn: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab": 128256,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": 8,
        "ffn": ffn,
        "norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tied_embeddings": tied,
    }


FAMILIES = {
    "llama3-1b": _llama3(2048, 16, 32, 8192, tied=True),
    "llama3-3b": _llama3(3072, 28, 24, 8192, tied=True),
    "llama3-8b": _llama3(4096, 32, 32, 14336, tied=False),
}
