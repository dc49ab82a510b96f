"""Count what windows and soft caps of attention cost, of techniques and of `model.*` alike."""

from dataclasses import replace

from headrace.core.model_config import ModelConfig
from headrace.costs.count import FP32, instants_of
from headrace.costs.decoder_work import capped, masked
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import TILE

EACH_HEAD = "mask_of_each_head"
"""The size of a ledger that is 1 where the dense mask has other numbers for each head."""


def mask_of_heads(ledger: Ledger, ranks: float) -> Ledger:
    """Return the ledger of one of `ranks` that share the heads: it makes their mask alone."""
    if not ledger.sizes.get(EACH_HEAD):
        return ledger
    ledger = ledger.scaled(lambda name: name == "mask", 1 / ranks)
    return replace(ledger, sizes={**ledger.sizes, "mask": ledger.sizes["mask"] / ranks})


def share_of_causal(window: int, length: int) -> float:
    """Return the share of a causal mask's blocks that a window leaves in a row of `length`."""
    count = -(-length // TILE)
    seen = sum(q - max(0, q * TILE - window + 1) // TILE + 1 for q in range(count))
    return 2 * seen / (count * (count + 1))


def with_own_mask(ledger: Ledger, model: ModelConfig) -> Ledger:
    """Return the ledger with the window and the cap that `model.*` describes."""
    if 0 < model.window < ledger.sizes["length"]:
        ledger = windowed(ledger, model.window, model.window_between)
    return soft_capped(ledger) if model.attention_cap else ledger


def windowed(ledger: Ledger, window: int, between: int) -> Ledger:
    """Return the ledger with a window: a dense mask and, in each layer with it, SDPA's copy of it.

    With documents masked the masks are theirs, and the window lies in one of two.

    Args:
        ledger: before.
        window: tokens that a token sees.
        between: layers with the window between two without it; 0 is none without it.
    """
    sizes, count = ledger.sizes, int(ledger.sizes["layers"])
    has = [layer for layer in range(count) if not between or (layer + 1) % (between + 1)]
    if "mask" not in ledger.memory:
        line = Line(sizes["mask"] / sizes["rows"], ("loss", "turn", "backward"))
        ledger = ledger.with_line("mask", line)
        for layer in has:
            copied = Line(sizes["mask_copy"] / sizes["rows"], instants_of(layer), layer)
            ledger = ledger.with_line(f"{layer}/mask_copy", copied)
    masks, share = 2 if between else 1, len(has) / max(1, count)
    ledger = masked(ledger, share, share_of_causal(window, int(sizes["length"])))
    return replace(ledger, sizes={**sizes, "mask": masks * sizes["mask"]})


def soft_capped(ledger: Ledger) -> Ledger:
    """Return the ledger with capped scores: a dense mask, and what plain matmuls keep of each."""
    ledger = capped(ledger)
    sizes = ledger.sizes
    if "mask" not in ledger.memory:
        line = Line(sizes["mask"] / sizes["rows"], ("loss", "turn", "backward"))
        ledger = ledger.with_line("mask", line)
    ledger = ledger.without([n for n in ledger.memory if n.endswith("/mask_copy")])
    ledger = replace(ledger, sizes={**sizes, "mask_copy": 0.0})
    for layer in range(int(sizes["layers"])) if sizes.get("scores", 1) else ():
        kept = _kept(ledger, layer)
        ledger = ledger.with_line(f"{layer}/scores", Line(kept, instants_of(layer), layer))
    return ledger


def _kept(ledger: Ledger, layer: int) -> float:
    """Return bytes that a layer's plain matmuls keep beyond a fused kernel.

    They keep every score after the tanh and after the softmax in fp32, in half precision also
    as a factor of the values; queries, keys and values in an order of their own, a key for each
    query head. What a fused kernel keeps instead is subtracted: its statistics, its inputs, and
    the fused matmul's result unless norms of queries and keys keep it.
    """
    sizes, lines = ledger.sizes, ledger.memory
    heads, groups, width = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    tokens, size = sizes["tokens"], sizes["activation_bytes"]
    scores = heads * tokens * sizes["length"] * (2 * FP32 + (size if size != FP32 else 0))
    inputs = 3 * size * tokens * heads * width
    gone = FP32 * tokens * heads + lines[f"{layer}/attention_input"].bytes
    if f"{layer}/qk_norm" not in lines:
        gone += size * tokens * (heads + 2 * groups) * width
    return max(0.0, scores + inputs - gone)
