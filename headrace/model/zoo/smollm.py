"""SmolLM2 (arXiv 2502.02737) has Llama's architecture at small widths, with tied embeddings.

Numbers are those of config.json in HuggingFaceTB/SmolLM2-135M, -360M and -1.7B.
"""

from typing import Any


def _smollm2(
    dim: int, layers: int, heads: int, kv_heads: int, ffn: int, theta: float
) -> dict[str, Any]:
    return {
        "vocab": 49152,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "norm_eps": 1e-5,
        "rope_theta": theta,
        "tied_embeddings": True,
    }


FAMILIES = {
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536, 100_000.0),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560, 100_000.0),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, 130_000.0),
}
