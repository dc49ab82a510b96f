"""Headrace's own small decoders have RoPE, RMSNorm, SwiGLU, normalised queries and keys."""

FAMILIES = {
    "headrace": {},
    "headrace-mini": {"dim": 128, "layers": 4, "heads": 4, "qk_norm": True, "output_init": "zero"},
    "headrace-small": {"dim": 512, "layers": 8, "heads": 8, "qk_norm": True, "output_init": "zero"},
}
