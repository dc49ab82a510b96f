"""The attention mixer, its trunk backend, and the cache that sampling uses.

Queries, keys and values come from one matrix, `qkv`, whose rows are grouped by key-value head:
[q heads of group 0, k 0, v 0, q heads of group 1, ...]. One large product is faster than three, and
a column split over groups needs no reshuffle. A backend is an object with two methods: `prepare`
once per forward, `__call__` once per layer; all share one signature, so the mixer has no branch.

Shapes: B rows, T tokens, D features, H query heads, G key-value heads, K features of a head.
"""

from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from headrace.core.model_config import ModelConfig
from headrace.model.mask import MaskSpec, Rows, allowed
from headrace.model.norm import RMSNorm
from headrace.model.position import Rotation, rotate


class Attend(Protocol):
    """A backend of scaled dot-product attention."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> object:
        """What this backend's kernel needs to know of the mask, made once per forward."""
        ...

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """The mixed values [B, T, H, K]."""
        ...


class Sdpa:
    """torch's scaled_dot_product_attention with its default backend: the trunk's filler.

    A mask that a causal flag cannot say becomes one dense tensor, shared by all layers.
    """

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> Tensor | None:
        """None for plain causal, else bool [B or 1, 1, T, T]."""
        return None if spec.is_plain_causal else allowed(spec, rows, length)

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Attention over `k_BTGK`; one query over a longer key sequence sees all of it."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
        dense = mask if isinstance(mask, Tensor) else None
        out = F.scaled_dot_product_attention(
            q, k, v,
            attn_mask=dense,
            is_causal=dense is None and q.size(2) > 1,
            enable_gqa=q.size(1) != k.size(1),
        )  # fmt: skip
        return out.transpose(1, 2)


class KVCache:
    """Keys and values of the tokens so far, one pair of [B, S, G, K] tensors per layer."""

    def __init__(self, config: ModelConfig, rows: int, capacity: int, like: Tensor) -> None:
        shape = (rows, capacity, config.resolved_kv_heads, config.resolved_head_dim)
        self.keys = [like.new_empty(shape) for _ in range(config.layers)]
        self.values = [like.new_empty(shape) for _ in range(config.layers)]
        self.length = 0
        self.states: dict[int, Tensor] = {}
        """What a mixer without keys keeps instead, by layer."""

    def extend(self, layer: int, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new keys and values; returns all of them so far."""
        end = self.length + k_BTGK.size(1)
        self.keys[layer][:, self.length : end] = k_BTGK
        self.values[layer][:, self.length : end] = v_BTGK
        return self.keys[layer][:, :end], self.values[layer][:, :end]


class Shared(NamedTuple):
    """What all layers of one forward share: positions, mask, rotation, a sampling cache."""

    positions_BT: Tensor
    mask: object
    rotation: Rotation | None
    cache: KVCache | None = None


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245), with optional normalised queries and keys."""

    columns, rows = ("qkv",), ("out",)
    """linears that ranks share by their outputs, and by their inputs"""

    def __init__(self, config: ModelConfig, layer: int, attend: Attend) -> None:
        super().__init__()
        self.layer, self.attend = layer, attend
        self.groups, self.head_dim = config.resolved_kv_heads, config.resolved_head_dim
        self.units = self.groups  # what a share is made of
        self.queries = config.heads // self.groups
        rows = self.groups * (self.queries + 2) * self.head_dim
        self.qkv = nn.Linear(config.dim, rows, bias=config.bias)
        self.out = nn.Linear(config.heads * self.head_dim, config.dim, bias=config.bias)
        norm = RMSNorm if config.qk_norm else None
        self.q_norm = norm(self.head_dim, config.norm_eps) if norm else nn.Identity()
        self.k_norm = norm(self.head_dim, config.norm_eps) if norm else nn.Identity()

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Mix tokens of each row; returns [B, T, D]."""
        B, T, _ = x_BTD.shape
        grouped = self.qkv(x_BTD).view(B, T, -1, self.queries + 2, self.head_dim)
        q, k, v = grouped.split([self.queries, 1, 1], dim=3)
        q_BTHK = rotate(self.q_norm(q.reshape(B, T, -1, self.head_dim)), shared.rotation)
        k_BTGK = rotate(self.k_norm(k.squeeze(3)), shared.rotation)
        v_BTGK = v.squeeze(3)
        if shared.cache is not None:
            k_BTGK, v_BTGK = shared.cache.extend(self.layer, k_BTGK, v_BTGK)
        mixed = self.attend(q_BTHK, k_BTGK, v_BTGK, shared.mask)
        return self.out(mixed.reshape(B, T, -1))
