"""Mix tokens through a decaying state instead of attention: work in proportion to the row.

Softmax attention compares every pair of tokens. Here each head keeps a matrix that forgets at its
own rate and is read by the queries (kernels/linear_attention): the work per token does not grow
with the row, and sampling keeps one state per layer instead of all keys. The rate is a gate of the
token: log decay = logsigmoid(w x) / 16, per head of keys and values (arXiv 2312.06635). What the
queries read is normalised per head, since nothing divides it as softmax would. Rotation, norms of
queries and keys, and the fused `qkv` stay as attention has them.

A state cannot see a window or a prefix, so it fills the backend too and takes documents alone from
the mask: the index of each token's document, which resets the state exactly. It costs recall: a
state holds less than a row of keys. Compiled code fuses the decays; a fused kernel for all of it is
left out. Sources: arXiv 2312.06635, 2405.21060, 2006.16236.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headrace.core.errors import ConfigError
from headrace.core.ledger import Ledger, Line
from headrace.core.model_config import ModelConfig
from headrace.core.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.kernels.linear_attention import chunked
from headrace.model.attention import Attend, Attention, Shared
from headrace.model.count import FP32, held_in
from headrace.model.mask import MaskSpec, Rows
from headrace.model.position import rotate
from headrace.sockets import Build

TEMPERATURE = 16.0
"""A gate of 0.5 keeps 0.958 per token (arXiv 2312.06635, section 4.4)."""


class Documents:
    """The backend's place: of the mask, a state needs each token's document and nothing else."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> Tensor | None:
        """The documents' indices [B, T], or None when they are not masked.

        Raises:
            ConfigError: the mask is more than causal and by document.
        """
        if replace(spec, document=False) != MaskSpec():
            raise ConfigError(
                f"a state cannot see the mask {spec}: it knows causal and document",
                "--without linear_attention",
            )
        return rows.segments_BT if spec.document else None

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Nobody asks: the mixer reads its state."""
        raise NotImplementedError("linear attention has no scores to mask")


class LinearMixer(Attention):
    """Attention's projections around a decaying state."""

    columns = ("qkv", "decay")
    rows = ("out",)

    def __init__(self, config: ModelConfig, layer: int, attend: Attend, chunk_tokens: int) -> None:
        super().__init__(config, layer, attend)
        self.units, self.chunk_tokens = self.groups, chunk_tokens
        self.decay = nn.Linear(config.dim, self.groups, bias=False)
        self.longest_chunk = 0

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Mix tokens of each row; returns [B, T, D]."""
        B, T, _ = x_BTD.shape
        K = self.head_dim
        grouped = self.qkv(x_BTD).view(B, T, -1, self.queries + 2, K)
        q, k, v = grouped.split([self.queries, 1, 1], dim=3)
        q_BTHK = rotate(self.q_norm(q.reshape(B, T, -1, K)), shared.rotation)
        k_BTGK = rotate(self.k_norm(k.squeeze(3)), shared.rotation)
        log_decay_BTG = F.logsigmoid(self.decay(x_BTD).float()) / TEMPERATURE
        cache = shared.cache
        segments = shared.mask if isinstance(shared.mask, Tensor) else None
        self.longest_chunk = min(self.chunk_tokens, T)
        mixed, state = chunked(
            q_BTHK.unflatten(2, (-1, self.queries)), k_BTGK, v.squeeze(3), log_decay_BTG, segments,
            chunk=self.chunk_tokens,
            state_BGKV=None if cache is None else cache.states.get(self.layer),
        )  # fmt: skip
        if cache is not None:
            cache.states[self.layer] = state
        even = F.rms_norm(mixed.float() * K**-0.5, (K,)).to(mixed.dtype)
        return self.out(even.reshape(B, T, -1))


class LinearAttention(Technique[Build]):
    """Mix tokens through a decaying state instead of attention: work in proportion to the row."""

    chunk_tokens: int = Field(default=64, ge=1, le=4096)
    """Tokens whose pairs are computed at once; tuner range 32 to 256."""

    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.mixer", "parts.attend")
    excludes: ClassVar[Mapping[str, str]] = {
        "sliding_window": "a state forgets by decay and has no window (arXiv 2312.06635)"
    }
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("compute:attention",)
    card: ClassVar[Card] = Card(
        buys="work per token that does not grow with the row, and a sampling state that does not "
        "either (derived)",
        costs="recall from far back: a state of K x K numbers per head holds less than all keys "
        "(arXiv 2402.18668); more memory than fused attention where it runs uncompiled",
        helps="long rows, and generating long texts",
        hurts="short rows, where attention is one fused kernel",
        source="arXiv 2312.06635; arXiv 2405.21060",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Random weights and whole rows."""
        plan = context.plan
        if plan.model.pretrained:
            return Unsupported("the weights of model.pretrained are attention's", "leave it out")
        if plan.mesh.context > 1:
            return Unsupported(
                f"its state runs along whole rows, and mesh.context = {plan.mesh.context} cuts "
                "them", "mesh.context=1",
            )  # fmt: skip
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """The state's products for attention's, no dense mask, and what the chunks keep."""
        sizes = ledger.sizes
        layers, dim, groups = int(sizes["layers"]), sizes["dim"], sizes["kv_heads"]
        more = layers * dim * groups
        for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            line = ledger.memory[name]
            ledger = ledger.with_line(name, replace(line, bytes=line.bytes + FP32 * copies * more))
        for layer in range(layers):
            normed = f"{layer}/qk_norm" in ledger.memory
            for name, count in self._kept(sizes, normed).items():
                ledger = ledger.with_line(f"{layer}/{name}", Line(count, held_in(layer), layer))
        work = layers * self._work(sizes)
        forward = work + 2 * more - sizes["attention_flops"]
        ledger = ledger.with_flops("forward", forward).with_flops("backward", 2 * forward)
        dense = [n for n in ledger.memory if n == "mask" or n.endswith("/mask_copy")]
        facts = {
            "block_matrices": sizes["block_matrices"] + more,
            "block_flops": sizes["block_flops"] + 2 * more,
            "attention_flops": work, "mask": 0.0, "mask_copy": 0.0,
        }  # fmt: skip
        return replace(ledger.without(dense), sizes={**sizes, **facts})

    def _chunks(self, sizes: Mapping[str, float]) -> tuple[int, int]:
        """Tokens of a chunk, and chunks of a row."""
        chunk = min(self.chunk_tokens, int(sizes["length"]))
        return chunk, -(-int(sizes["length"]) // chunk)

    def _work(self, sizes: Mapping[str, float]) -> float:
        """Forward FLOPs per token of one layer's chunks and states."""
        G, K, H, T = (sizes[n] for n in ("kv_heads", "head_dim", "heads", "length"))
        C, Z = self._chunks(sizes)
        inside = 4 * C * H * K + 2 * (G + H) * K * K
        return inside * Z * C / T + 2 * (Z + 1) ** 2 * G * K * K / T

    def _kept(self, sizes: Mapping[str, float], normed: bool) -> dict[str, float]:
        """Bytes that one layer's mixer keeps for its backward pass, by what they are.

        Queries, keys and values are copied into chunks; the fused product is kept beside them
        only by the norms of queries and keys.
        """
        G, K, H, N = (sizes[n] for n in ("kv_heads", "head_dim", "heads", "tokens"))
        C, Z = self._chunks(sizes)
        B, size = sizes["rows"], sizes["activation_bytes"]
        padded = B * Z * C
        scores = padded * C * (FP32 * G + 2 * size * H)
        states = B * G * (FP32 * (Z + 1) ** 2 + size * (2 * Z + 1) * K * K)
        gates = FP32 * G * (2 * N + padded)
        read = size * padded * (G + H) * K + FP32 * N * H * K
        fused = size * N * (H + 2 * G) * K if normed else 0.0
        return {
            "qkv": fused + size * padded * G * K,
            "attention_input": size * padded * (H + G) * K,
            "states": scores + states + gates + read,
        }

    def apply(self, build: Build) -> None:
        """Fill the mixer and the backend that it does without."""
        build.parts.mixer = lambda config, layer, attend: LinearMixer(
            config, layer, attend, self.chunk_tokens
        )
        build.parts.attend = Documents()

    def active(self, build: Build) -> Evidence:
        """Whether a block's work is that of chunks: the longest that its mixers computed."""
        mixers = [block.mixer for block in build.model.blocks.values()]
        if not mixers:
            return Evidence(None, "this rank holds no block")
        chunks = {getattr(mixer, "longest_chunk", 0) for mixer in mixers}
        return Evidence(
            active=min(chunks) > 0 and max(chunks) <= self.chunk_tokens,
            detail=f"{len(mixers)} layers mixed tokens in chunks of at most {max(chunks)}",
            numbers={"longest_chunk": max(chunks), "layers": len(mixers)},
        )
