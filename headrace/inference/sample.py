"""Generate text with a model: one prefill of the prompt, then one token at a time with a KV cache.

The cache holds every key, so it works for masks that look back without a limit: causal masks and
masks by document (generated text continues one document). Under any other mask, as a window or
slopes, whole sequences are computed for each token. A model with a prefix mask treats the prompt as
the prefix. The caller chooses the precision: run this inside the autocast that training used.

Shapes: B rows, T tokens of the prompt, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, Diverged
from headrace.kernels.autocast import compute_dtype
from headrace.model.attention import KVCache
from headrace.model.decoder import Decoder
from headrace.model.mask import Rows


def generate_text(build: Build, prompt: str, *, new_tokens: int, **how: Any) -> str:
    """Return the text that a trained model continues a prompt with.

    Args:
        build: a run with its model and its tokenizer.
        prompt: the beginning of a document.
        new_tokens: the most tokens to add.
        **how: further arguments of `generate`.
    """
    tokenizer = build.prepared.tokenizer
    ids = [tokenizer.document_token, *tokenizer.encode_batch([prompt])[0].tolist()]
    ids_BT = torch.tensor([ids], device=build.device)
    with build.autocast():
        rows_BT = generate(
            build.model,
            ids_BT,
            new_tokens=new_tokens,
            stop=tokenizer.document_token,
            entries=tokenizer.vocab,
            **how,
        )
    added = [i for i in rows_BT[0, len(ids) :].tolist() if i != tokenizer.document_token]
    return tokenizer.decode(added)


@torch.no_grad()
def generate(
    model: Decoder,
    ids_BT: Tensor,
    *,
    new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
    entries: int | None = None,
    until: Callable[[list[int]], bool] | None = None,
) -> Tensor:
    """Continue prompts of equal length, and return them with the added tokens.

    Args:
        model: the model, on the device of `ids_BT`.
        ids_BT: the prompts, int64, at least one token (the document token starts a text).
        new_tokens: the most tokens to add.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens; 0 is all.
        top_p: draw among the likeliest tokens that together have this probability (arXiv
            1904.09751).
        seed: the same seed on the same device draws the same text.
        stop: the id that ends a sequence; an ended sequence is filled up with it.
        until: given the tokens that were added to the first sequence; ends all where it is true.
        entries: ids below this exist in the tokenizer; the embedding's padding is never drawn.

    Returns:
        int64 [B, T + n], n <= new_tokens, with the prompts included.

    Raises:
        ConfigError: an argument is out of range, or learned positions do not reach that far.
        Diverged: the model's logits are not finite.
    """
    _check(model, ids_BT, new_tokens, temperature, top_k, top_p)
    B, T = ids_BT.shape
    generator = torch.Generator(ids_BT.device).manual_seed(seed)
    cache = _new_cache(model, B, T + new_tokens)
    ended_B = torch.zeros(B, dtype=torch.bool, device=ids_BT.device)
    prefix_B = torch.full_like(ids_BT[:, 0], T) if model.mask.prefix else None
    for _ in range(new_tokens):
        seen = cache.length if cache else 0
        positions = torch.arange(seen, ids_BT.size(1), device=ids_BT.device).expand(B, -1)
        hidden_BTD = model.hidden(ids_BT[:, seen:], Rows(positions, None, prefix_B), cache)
        if cache:
            cache.length = ids_BT.size(1)
        logits_BV = model.head.logits(*model.head_inputs(hidden_BTD[:, -1]))[:, :entries]
        next_B = draw(logits_BV, temperature, top_k, top_p, generator)
        if stop is not None:
            next_B = next_B.where(~ended_B, stop)
            ended_B = ended_B | (next_B == stop)
        ids_BT = torch.cat((ids_BT, next_B[:, None]), dim=1)
        if until is not None and until(ids_BT[0, T:].tolist()):
            break
        if stop is not None and bool(ended_B.all()):
            break
    return ids_BT


def draw(
    logits_BV: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> Tensor:
    """Draw one id for each sequence, and return them as [B]; see `generate` for the arguments.

    Raises:
        Diverged: the largest logit of a sequence is not finite.
    """
    if bool(logits_BV.amax(-1).isfinite().logical_not().any()):  # also for a NaN
        raise Diverged(
            "the model's logits are no numbers",
            "the weights of an earlier checkpoint in the model",
        )
    if temperature == 0:
        return logits_BV.argmax(-1)
    # The largest becomes 0, so that no temperature overflows; the smallest draws greedily.
    logits_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    logits_BV = logits_BV / max(temperature, torch.finfo(logits_BV.dtype).tiny)
    if top_k:
        least_B1 = logits_BV.topk(min(top_k, logits_BV.size(-1))).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    probability_BV = logits_BV.softmax(-1)
    if top_p < 1:
        falling_BV, order_BV = probability_BV.sort(descending=True, stable=True)
        before_BV = falling_BV.cumsum(-1) - falling_BV
        falling_BV = falling_BV.masked_fill(before_BV >= top_p, 0.0)
        probability_BV = torch.zeros_like(falling_BV).scatter(-1, order_BV, falling_BV)
    return torch.multinomial(probability_BV, 1, generator=generator).squeeze(-1)


def _new_cache(model: Decoder, rows: int, capacity: int) -> KVCache | None:
    """Return a cache in the dtype of the keys, or None where a cache would change the result."""
    if not model.mask.sees_all_before:
        return None
    weight = model.embed.weight
    like = torch.empty(0, dtype=compute_dtype(weight), device=weight.device)
    return KVCache(model.config, rows, capacity, like)


def _check(
    model: Decoder, ids_BT: Tensor, new_tokens: int, temperature: float, top_k: int, top_p: float
) -> None:
    length, context = ids_BT.size(1), model.config.context
    ranges = (
        (
            "the prompt's length",
            length,
            length >= 1,
            "1 token, the tokenizer's document token",
            "--prompt TEXT",
        ),
        ("new_tokens", new_tokens, new_tokens >= 1, "1", "--tokens 1"),
        ("temperature", temperature, temperature >= 0, "0", "--temperature 0"),
        ("top_k", top_k, top_k >= 0, "0 (no limit)", "--top-k 0"),
        ("top_p", top_p, 0 < top_p <= 1, "1 (no limit)", "--top-p 1"),
    )
    for name, value, fits, near, remedy in ranges:
        if not fits:
            raise ConfigError(f"{name} cannot be {value}; the nearest that works is {near}", remedy)
    if model.config.position != "learned" or length + new_tokens <= context:
        return
    asked = f"a prompt of {length} tokens and {new_tokens} new ones need {length + new_tokens}"
    room = context - length
    raise ConfigError(
        f"{asked} positions, and this model learned {context}",
        f"--tokens {room}"
        if room > 0
        else f"--prompt TEXT --tokens 1, where TEXT has at most {context - 2} tokens",
    )
