"""Mistral 7B (arXiv 2310.06825) and Phi-3 (arXiv 2404.14219) are Llama with a window of attention.

Numbers are those of config.json in mistralai/Mistral-7B-v0.1 and
microsoft/Phi-3-mini-4k-instruct.
"""

FAMILIES = {
    "mistral-7b": {
        "vocab": 32000,
        "dim": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "norm_eps": 1e-5,
        "window": 4096,
    },
    "phi3-mini": {
        "vocab": 32064,
        "dim": 3072,
        "layers": 32,
        "heads": 32,
        "ffn": 8192,
        "norm_eps": 1e-5,
        "window": 2047,
    },
}
