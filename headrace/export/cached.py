"""Make of a decoder what a runtime runs: ids and a cache of keys and values in, logits out.

The decoder stays as it is. Its attention becomes plain matmuls over a cache, in which a key has its
place: a query sees the keys whose place is not beyond its own, and within the window where its
layer has one. So one graph serves a prompt and every token after it.

Shapes: B rows, T tokens, S keys, G key-value heads, Q queries of such a head, K features of a head,
V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.core.errors import UnsupportedError
from headrace.model.attention import SelfAttention
from headrace.model.decoder import Decoder
from headrace.model.mask import MaskSpec, Rows

Output = Callable[[Tensor], Tensor]
"""(hidden states [B, T, D]) -> the matmul with the output matrix [B, T, V], before any cap."""


class CachedAttend:
    """Compute attention over a cache by plain matmuls, which every runtime has."""

    knows = frozenset({"soft_cap"})

    def __init__(self) -> None:
        self.keys: Any = 0
        """How many keys there are; their places are counted from 0. A symbol in a graph."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> tuple[float, Tensor]:
        """Return the cap of scores, and what is added to them, fp32 [T, S]."""
        query_T1 = rows.positions_BT[0, :, None]
        key_1S = torch.arange(self.keys, device=query_T1.device)[None, :]
        seen_TS = key_1S <= query_T1
        if spec.window is not None:
            seen_TS = seen_TS & (query_T1 - key_1S < spec.window)
        # The least finite number: kernels that subtract two infinities give no number.
        hidden = torch.finfo(torch.float32).min
        return spec.soft_cap, (~seen_TS).to(torch.float32) * hidden

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Any) -> Tensor:
        """Return the mixed values [B, T, H, K]; the cache gives keys and values as [B, G, S, K]."""
        (cap, added_TS), k_BGSK, v_BGSK = mask, k_BTGK, v_BTGK
        B, T, H, K = q_BTHK.shape
        G = k_BGSK.size(1)
        Q = H // G
        q_BGNK = q_BTHK.view(B, T, G, Q, K).permute(0, 2, 3, 1, 4).reshape(B, G, Q * T, K)
        scores_BGNS = (q_BGNK * K**-0.5) @ k_BGSK.transpose(2, 3)
        if cap:
            scores_BGNS = cap * torch.tanh(scores_BGNS / cap)
        # One mask for the queries of a group, which stand behind one another.
        mixed_BGNK = (scores_BGNS + added_TS.repeat(Q, 1)).softmax(-1) @ v_BGSK
        return mixed_BGNK.view(B, G, Q, T, K).permute(0, 3, 1, 2, 4).reshape(B, T, H, K)


class GrowingCache:
    """Hold what was given of each layer, and take the longer keys and values that come out."""

    def __init__(self, past: list[Tensor]) -> None:
        self.past, self.present = past, list[Tensor]()

    def extend(self, layer: int, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new keys and values, and return all of them, [B, G, S, K]."""
        k, v = (
            torch.cat((self.past[2 * layer + n], new.transpose(1, 2)), dim=2)
            for n, new in enumerate((k_BTGK, v_BTGK))
        )
        self.present += [k, v]
        return k, v


class CachedDecoder(nn.Module):
    """A decoder takes ids and the cache, and returns logits and the longer cache.

    Args:
        model: the decoder, whose attention is replaced.
        entries: ids of the tokenizer, without the padding of the embedding.
        output: multiplies with the output matrix; torch's matmul without it.
    """

    def __init__(self, model: Decoder, entries: int, output: Output | None = None) -> None:
        super().__init__()
        self.model, self.entries, self.cap = model, entries, model.config.logit_cap
        self.output = output
        self.attend = CachedAttend()
        attending_by(model, self.attend)

    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Return fp32 logits [B, T, V], and keys and values of each layer [B, G, S + T, K]."""
        cache, seen, new = GrowingCache([*past]), past[0].size(2), input_ids.size(1)
        places_T = torch.arange(new, device=input_ids.device) + seen
        hidden = self.hidden(input_ids, places_T, seen + new, cache)
        return self.logits(hidden), *cache.present

    def hidden(self, input_ids: Tensor, places_T: Tensor, keys: Any, cache: Any) -> Tensor:
        """Return the hidden states of tokens at their places, over `keys` places of a cache."""
        self.attend.keys = keys
        return self.model.hidden(input_ids, Rows(places_T[None]), cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokenizer's entries."""
        if self.output is None:
            whole = nn.functional.linear(*self.model.head_inputs(hidden))
        else:
            whole = self.output(hidden)
        whole = self.cap * torch.tanh(whole / self.cap) if self.cap else whole
        return whole[..., : self.entries]

    def empty(self, rows: int = 1) -> tuple[Tensor, ...]:
        """Return a cache that holds nothing."""
        config = self.model.config
        shape = (rows, config.resolved_kv_heads, 0, config.resolved_head_dim)
        return tuple(torch.zeros(shape) for _ in range(2 * config.layers))


def attending_by(model: Decoder, attend: CachedAttend) -> None:
    """Let all layers of a decoder attend by `attend`, and rotate by angles that are constants.

    Raises:
        UnsupportedError: rotations depend on the length of a document, so that no cache is right.
    """
    if model.config.rope_scaling.kind == "dynamic":
        raise UnsupportedError(
            "model.rope_scaling.kind = 'dynamic' turns all keys anew as a text grows, and a cache "
            "keeps them as they were",
            "--to hf, whose readers compute it",
        )
    model.attend = attend
    for block in model.blocks.values():
        mixer: Any = block.mixer
        assert isinstance(mixer, SelfAttention), "refuse_parts lets no other pass"
        mixer.attend = attend
    positions: list[Any] = [model.position, model.local_position]
    for position in positions:
        if hasattr(position, "frequencies"):
            angles = position.frequencies(torch.device("cpu"))
            position.frequencies = lambda device, angles=angles: angles


class StaticDecoder(nn.Module):
    """A decoder keeps its cache itself, in buffers of a fixed size, as a device has them.

    Args:
        step: the decoder.
        places: tokens of the longest text.
    """

    def __init__(self, step: CachedDecoder, places: int) -> None:
        super().__init__()
        self.step, self.places = step, places
        config = step.model.config
        shape = (1, config.resolved_kv_heads, places, config.resolved_head_dim)
        for layer in range(config.layers):
            self.register_buffer(f"keys_{layer}", torch.zeros(shape))
            self.register_buffer(f"values_{layer}", torch.zeros(shape))

    def forward(self, ids_1T: Tensor, seen_1: Tensor) -> Tensor:
        """Return the logits after the last of some tokens behind `seen_1` others, fp32 [1, V]."""
        places_T = torch.arange(ids_1T.size(1)) + seen_1
        hidden = self.step.hidden(ids_1T, places_T, self.places, _Buffers(self, places_T))
        return self.step.logits(hidden[:, -1])


class _Buffers:
    """Write keys and values at their places into the buffers of a decoder."""

    def __init__(self, owner: StaticDecoder, places_T: Tensor) -> None:
        self.owner, self.places_T = owner, places_T

    def extend(self, layer: int, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Return all places of one layer, [1, G, S, K], the new ones filled."""
        keys = getattr(self.owner, f"keys_{layer}")
        values = getattr(self.owner, f"values_{layer}")
        keys.index_copy_(2, self.places_T, k_BTGK.transpose(1, 2))
        values.index_copy_(2, self.places_T, v_BTGK.transpose(1, 2))
        return keys, values


@torch.no_grad()
def decoded(step: CachedDecoder, ids: list[int]) -> Tensor:
    """Return the logits after each of some tokens that are given one at a time, fp32 [T, V]."""
    past, rows = step.empty(), []
    for i in ids:
        logits, *past = step(torch.tensor([[i]]), *past)
        rows.append(logits[0, 0])
    return torch.stack(rows)
