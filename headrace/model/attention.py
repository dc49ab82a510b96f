"""Mix tokens by attention: the mixer, the baseline's backend, and the cache that sampling uses.

Queries, keys and values come from one matrix, `qkv`, whose rows are grouped by key-value head:
[q heads of group 0, k 0, v 0, q heads of group 1, ...]. One large product is faster than three, and
a column split over groups needs no reshuffle. A backend is an object with two methods: `prepare`
once per forward, `__call__` once per layer; all share one signature, so the mixer has no branch.

Shapes: B rows, T tokens, S keys, D features, H query heads, G key-value heads, K features of a
head.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.model.from_embedding import MixedValues, PassedOn
from headrace.model.mask import MaskSpec, Rows, dense
from headrace.model.norm import RMSNorm, UnitRMSNorm
from headrace.model.position import Rotation, rotate
from headrace.plan.technique import Evidence

COMMON = frozenset({"causal", "document", "window"})
"""What of the mask a backend knows, or refuses itself, if it does not say more in `knows`."""


class Attend(Protocol):
    """A backend computes scaled dot-product attention.

    One that computes more of `MaskSpec` than `COMMON` lists those fields in a class attribute
    `knows`. It counts for the very class that says it: a kernel that a subclass chooses may know
    less.
    """

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> object:
        """Return what this backend's kernel needs to know of the mask; called once per forward."""
        ...

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Return the mixed values [B, T, H, K]."""
        ...


def check_mask(config: ModelConfig, attend: Any, spec: MaskSpec) -> None:
    """Refuse a mask that the backend would not compute, before a model is made of both.

    Raises:
        ConfigError: the backend does not know a part of it, or its slopes are not this model's.
    """
    known = COMMON | {"between", "alibi_share"} | vars(type(attend)).get("knows", frozenset())
    plain = MaskSpec()
    asked = {f.name for f in fields(spec) if getattr(spec, f.name) != getattr(plain, f.name)}
    if more := sorted(asked - known):
        owner = type(attend).__module__.rpartition(".")[2]
        raise ConfigError(
            f"{owner} computes attention and does not know {' and '.join(more)} of the mask",
            mend(f"-{owner}", text=f"--without {owner} (on a GPU flex_attention in its place)"),
        )
    if spec.alibi and (spec.alibi != config.heads or config.position != "none"):
        raise ConfigError(
            f"the mask has slopes for {spec.alibi} heads without other positions, and the model "
            f"has {config.heads} heads and model.position = {config.position!r}",
            mend("-alibi"),
        )


def attending(config: ModelConfig, mixer: Callable[..., nn.Module], attend: Any) -> list[int]:
    """Return the layers for which the factory `mixer` makes attention; the others mix otherwise."""
    with torch.device("meta"):
        made = [mixer(config, layer, attend) for layer in range(config.layers)]
    return [layer for layer, module in enumerate(made) if isinstance(module, SelfAttention)]


class Capped(NamedTuple):
    """A mask for scores that are soft-capped."""

    cap: float
    dense: Tensor


class Sdpa:
    """The baseline's filler calls torch's scaled_dot_product_attention with its default backend.

    A mask that a causal flag cannot say becomes one dense tensor, shared by all layers. It has no
    soft cap: capped scores are computed by plain products, and kept.
    """

    knows = frozenset({"prefix", "blocks", "alibi", "soft_cap"})

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> Tensor | Capped | None:
        """Return None for plain causal, bool [B or 1, 1, T, T], or additive [B or 1, H, T, T]."""
        spec = spec.within(length)
        if spec.is_plain_causal:
            return None
        device = rows.positions_BT.device.type
        half = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if half else torch.float32
        mask = dense(spec, rows, length, dtype)
        return Capped(spec.soft_cap, mask) if spec.soft_cap else mask

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Return attention over `k_BTGK`; one query over a longer key sequence sees all of it."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
        if isinstance(mask, Capped):
            return capped_attention(q, k, v, mask).transpose(1, 2)
        given = mask if isinstance(mask, Tensor) else None
        if given is not None and given.dtype != torch.bool:
            given = given.to(q.dtype)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=given,
            is_causal=given is None and q.size(2) > 1,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.transpose(1, 2)


class OneKernelSdpa(Sdpa):
    """This is the baseline's backend with one of torch's kernels as the only one allowed."""

    kernel: ClassVar[SDPBackend]

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Return attention, or raise torch's error where that kernel cannot: take no other one."""
        with sdpa_kernel(self.kernel):
            return super().__call__(q_BTHK, k_BTGK, v_BTGK, mask)


def capped_attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Capped) -> Tensor:
    """Return attention [B, H, T, K] with soft-capped scores by plain matmuls, softmax in fp32."""
    shared, scale = q_BHTK.size(1) // k_BGSK.size(1), q_BHTK.size(-1) ** -0.5 / mask.cap
    k_BHSK, v_BHSK = (
        x if shared == 1 else x.repeat_interleave(shared, dim=1) for x in (k_BGSK, v_BGSK)
    )
    scores_BHTS = mask.cap * ((q_BHTK * scale) @ k_BHSK.transpose(2, 3)).float().tanh()
    if mask.dense.dtype == torch.bool:
        scores_BHTS = scores_BHTS.where(mask.dense, float("-inf"))
    else:
        scores_BHTS = scores_BHTS + mask.dense
    return scores_BHTS.softmax(-1).to(v_BHSK.dtype) @ v_BHSK


def weights(
    attend: Attend, mask: object, q_BTHK: Tensor, k_BSGK: Tensor, group_S: Tensor
) -> Tensor:
    """Return the weight that each query gives to each group of keys, read off the backend itself.

    Args:
        attend: the backend.
        mask: what it prepared.
        q_BTHK: queries.
        k_BSGK: keys.
        group_S: index of each key's group, N of them.

    Returns:
        fp32 [B, T, H, N].
    """
    K = q_BTHK.size(-1)
    mine_SN, read = F.one_hot(group_S), []
    for part_SN in mine_SN.split(K, dim=1):  # as many groups at once as values have features
        v_SK = F.pad(part_SN, (0, K - part_SN.size(1))).to(q_BTHK.dtype)
        v_BSGK = v_SK[None, :, None].expand(*k_BSGK.shape[:3], K).contiguous()
        read.append(attend(q_BTHK, k_BSGK, v_BSGK, mask)[..., : part_SN.size(1)].float())
    return torch.cat(read, dim=-1)


def in_ring(attend: Attend, kernel: str) -> Evidence | None:
    """Return whether a ring computes its blocks by that kernel alone; None where there is none."""
    launched: Collection[str] | None = getattr(attend, "launched", None)
    if launched is None:
        return None
    ran = ", ".join(sorted(launched)) or "no kernel"
    return Evidence({*launched} == {kernel}, f"{ran} computed the blocks of the ring")


def equal_scores(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int = 1,
    length: int = 128,
) -> tuple[Tensor, Tensor]:
    """Return zeros to try a backend on: queries [B, T, H, K] and keys [B, T, G, K]."""
    like = torch.zeros(rows, length, 1, config.resolved_head_dim, device=device, dtype=dtype)
    q_BTHK = like.expand(-1, -1, config.heads, -1).contiguous()
    return q_BTHK, like.expand(-1, -1, config.resolved_kv_heads, -1).contiguous()


def kernels_of(
    attend: Attend,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    mask: object = None,
    *,
    only: str = "",
) -> list[str]:
    """Return the names of what one call of a backend launches, as torch's profiler sees them.

    A GPU's copies and fills ("Memcpy DtoD", "Memset (Device)") are no kernels.

    Args:
        attend: the backend; called once before, since it may compile.
        q_BTHK: queries; gradients are on where these want one.
        k_BSGK: keys.
        v_BSGK: values.
        mask: what it prepared.
        only: the device to list, "CPU" (torch's operations) or "CUDA" (kernels); all without it.
    """
    with torch.set_grad_enabled(q_BTHK.requires_grad):
        attend(q_BTHK, k_BSGK, v_BSGK, mask)
        with torch.profiler.profile(acc_events=True) as profile:
            attend(q_BTHK, k_BSGK, v_BSGK, mask)
            if q_BTHK.is_cuda:
                torch.cuda.synchronize()
    ran = [e.key for e in profile.key_averages() if str(e.device_type).endswith(only)]
    return [name for name in ran if not name.startswith(("Memcpy", "Memset"))]


def operations_of(out_BTHK: Tensor) -> list[str]:
    """Return the names of the operations that made mixed values, read off their gradient's graph.

    What torch chooses has a name of its own where it is one kernel, as in
    scaled_dot_product_flash_attention_for_cpu; else these are plain products and a softmax.
    """
    nodes, names = [out_BTHK.grad_fn], {}
    for node in nodes:
        if node is not None and node not in names:
            words = re.sub(r"Backward\d*$", "", node.name())
            names[node] = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", words).lower()
            nodes += [before for before, _ in node.next_functions]
    distinct = dict.fromkeys(names.values())
    fused = [name for name in distinct if name.startswith("scaled_dot_product")]
    return fused or [name for name in distinct if name.endswith(("mm", "softmax"))]


class KVCache:
    """Keep keys and values of the tokens so far, [B, S, G, K] each, per layer with keys."""

    def __init__(self, config: ModelConfig, rows: int, capacity: int, like: Tensor) -> None:
        self.shape = (rows, capacity, config.resolved_kv_heads, config.resolved_head_dim)
        self.like, self.length = like, 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}
        """What a mixer without keys keeps instead, by layer."""
        self.before: dict[str, Tensor] = {}
        """What the next token reads of the last one, by what it is (model/token_before)."""

    def extend(self, layer: int, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new keys and values; returns all of them so far."""
        if layer not in self.keys:
            self.keys[layer] = self.like.new_empty(self.shape)
            self.values[layer] = self.like.new_empty(self.shape)
        end = self.length + k_BTGK.size(1)
        self.keys[layer][:, self.length : end] = k_BTGK
        self.values[layer][:, self.length : end] = v_BTGK
        return self.keys[layer][:, :end], self.values[layer][:, :end]


class Shared(NamedTuple):
    """Hold what all layers of one forward share: positions, masks, rotation, a sampling cache."""

    positions_BT: Tensor
    mask: object
    rotation: Rotation | None
    cache: KVCache | None = None
    open_mask: object = None
    """of the layers without the window, where some are"""
    local_rotation: Rotation | None = None
    """of the layers with the window, where it is another"""
    embedded_BTD: Tensor | None = None
    """what the first block reads, where all blocks do"""
    values: tuple[Tensor, ...] = ()
    """of each value embedding, the rows of the tokens, [B, T, G x K]"""
    value: Tensor | None = None
    """the one of these that a layer mixes in"""
    noise_BT: Tensor | None = None
    """a word of each token that noise on what the first block reads is made of"""
    before_BC2: Tensor | None = None
    """ids of the two tokens before each piece of a row that is here, where one of these reads them
    and rows are not whole"""

    def for_layer(self, is_open: bool, table: int | None = None) -> "Shared":
        """Return what one layer reads, with one mask and at most one value embedding."""
        value = None if table is None else self.values[table]
        mask = self.open_mask if is_open else self.mask
        local = None if is_open else self.local_rotation
        rotation = self.rotation if local is None else local
        return self._replace(
            mask=mask,
            rotation=rotation,
            open_mask=None,
            local_rotation=None,
            values=(),
            value=value,
        )


class ConstantFactor(nn.Module):
    """Multiply by a number that nothing learns."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` times the number."""
        return x * self.factor


class SelfAttention(nn.Module):
    """Compute grouped-query attention (arXiv 2305.13245); q and k may be normalised."""

    columns, rows = ("qkv",), ("out",)
    """linears that ranks share by their outputs, and by their inputs"""

    def __init__(self, config: ModelConfig, layer: int, attend: Attend) -> None:
        super().__init__()
        self.layer, self.attend = layer, attend
        self.groups, self.head_dim = config.resolved_kv_heads, config.resolved_head_dim
        self.units = self.groups  # what a share is made of
        self.queries = config.heads // self.groups
        rows = self.groups * (self.queries + 2) * self.head_dim
        self.qkv = nn.Linear(config.dim, rows, bias=config.bias or config.qkv_bias)
        self.out = nn.Linear(config.heads * self.head_dim, config.dim, bias=config.bias)
        norm = None
        if config.qk_norm:
            norm = RMSNorm if config.has_norm_weights else UnitRMSNorm
        self.scale = (
            ConstantFactor(config.query_scale) if config.query_scale != 1 else nn.Identity()
        )
        self.value = MixedValues() if layer in config.table_of_layer else PassedOn()
        self.q_norm = norm(self.head_dim, config.norm_eps) if norm else nn.Identity()
        self.k_norm = norm(self.head_dim, config.norm_eps) if norm else nn.Identity()

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Mix tokens of each row; returns [B, T, D]."""
        B, T, _ = x_BTD.shape
        grouped = self.qkv(x_BTD).view(B, T, -1, self.queries + 2, self.head_dim)
        q, k, v = grouped.split([self.queries, 1, 1], dim=3)
        turned = rotate(q.reshape(B, T, -1, self.head_dim), shared.rotation, self.q_norm)
        q_BTHK = self.scale(turned)
        k_BTGK = rotate(k.squeeze(3), shared.rotation, self.k_norm)
        v_BTGK = self.value(v.squeeze(3), shared)
        if shared.cache is not None:
            k_BTGK, v_BTGK = shared.cache.extend(self.layer, k_BTGK, v_BTGK)
        mixed = self.attend(q_BTHK, k_BTGK, v_BTGK, shared.mask)
        return self.out(mixed.reshape(B, T, -1))
