"""List the shapes of models, from small to large, of which a budget buys one."""

import math
from collections.abc import Iterator
from typing import Any

from headrace.plan.plan import Plan

DIMS = (
    *(64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792),
    *(2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384, 20480, 24576),
)
"""Widths of the ladder: parameters grow by a factor of about 1.3 to 2 from one to the next."""
GPT2_DIM, GPT2_ASPECT = 768, 64
FLATTEST, DEEPEST = 128, 32
"""Features a layer, at most and at least. GPT-2 small has 64 and Llama 3 8B 128; between them it
grows with the root of the width."""
WIDE_HEADS = 2048
"""Width from which heads have 128 features, as in the Llama families; narrower ones have 64."""
WORDS = (4096, 65_536)
"""Smallest and largest vocabulary where the plan leaves it open."""
TABLE_SHARE = 0.25
"""Most parameters in both tables, as a share of those in blocks, where the vocabulary is open:
larger models deserve larger ones (arXiv 2407.13623)."""


def ladder(base: Plan, open_vocab: bool) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the tables of models, from small to large, each with its tokenizer's size.

    A plan that starts from given weights has their shape alone. Widths whose heads its groups of
    queries do not divide are left out.
    """
    own = base.model.model_dump(exclude_unset=True)
    if base.model.pretrained:
        yield own, base.data.vocab
        return
    own = {k: v for k, v in own.items() if not (open_vocab and k == "vocab")}
    group = base.model.heads // base.model.resolved_kv_heads
    for dim in DIMS:
        aspect = min(FLATTEST, max(DEEPEST, GPT2_ASPECT * math.sqrt(dim / GPT2_DIM)))
        width = 128 if dim >= WIDE_HEADS else 64
        heads, layers = dim // width, max(1, round(dim / aspect))
        if heads % group:
            continue
        wide = (8 / 3 if base.model.gated else 4) * dim
        multiple = 256 if dim >= 1024 else 64
        sizes = {
            "dim": dim,
            "layers": layers,
            "heads": heads,
            "kv_heads": heads // group if group > 1 else 0,
            "head_dim": width,
            "ffn": multiple * max(1, round(wide / multiple)),
        }
        vocab = base.data.vocab
        if open_vocab and base.data.tokenizer == "bpe":
            most = TABLE_SHARE * 12 * layers * dim / 2
            vocab = 2 ** int(math.log2(min(WORDS[1], max(WORDS[0], most))))
        yield {**own, **sizes}, vocab
