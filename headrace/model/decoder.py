"""One decoder, a readable for-loop. Every family is this file with other parts and other numbers.

It returns the *scaled sum* of losses: the denominator, the number of targets in the whole batch, is
known before the backward pass, so nothing averages and accumulation is exact by construction.

Shapes: B rows, T tokens, D features, N = B x T.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.kernels.autocast import compute_dtype
from headrace.model.attention import (
    Attend,
    ConstantFactor,
    KVCache,
    Sdpa,
    SelfAttention,
    Shared,
    check_mask,
)
from headrace.model.from_embedding import MixedValues, PassedOn, ResidualFromEmbedding, joined
from headrace.model.head import Head, Objective
from headrace.model.mask import MaskSpec, Rows
from headrace.model.mlp import MLPS, PlainMLP
from headrace.model.norm import NORMS, UnitRMSNorm, add_then
from headrace.model.position import POSITIONS, LocalRotaryPosition
from headrace.model.token_before import PairEmbedding, Smear, with_leads, without_leads


@dataclass
class Parts:
    """Constructors of a decoder's parts; each is a socket with one owner."""

    norm: Callable[[ModelConfig], nn.Module]
    mlp: Callable[[ModelConfig, int], nn.Module]
    mixer: Callable[[ModelConfig, int, Attend], nn.Module]
    head: Callable[[ModelConfig], nn.Module]
    position: Callable[[ModelConfig], nn.Module]
    attend: Attend


def baseline_parts(config: ModelConfig) -> Parts:
    """Return the parts that `model.*` names."""
    return Parts(
        norm=lambda c: NORMS[c.norm](c.dim, c.norm_eps),
        mlp=MLPS.get(config.activation, PlainMLP),
        mixer=SelfAttention,
        head=Head,
        position=POSITIONS[config.position],
        attend=Sdpa(),
    )


class Part(NamedTuple):
    """What of a decoder one call runs: a stage of a pipeline, or all of it."""

    blocks: tuple[str, ...] | None = None
    """names of the blocks; None is every block that is here"""
    first: bool = True
    """whether it begins with token ids and the embedding"""
    last: bool = True
    """whether it ends with the final norm and the loss"""


WHOLE = Part()


class Block(nn.Module):
    """A pre-norm residual block mixes tokens, then transforms each."""

    def __init__(self, config: ModelConfig, layer: int, parts: Parts) -> None:
        super().__init__()
        self.stream = ResidualFromEmbedding() if config.embedding_residual else PassedOn()
        self.mixer_norm = parts.norm(config)
        self.mixer = parts.mixer(config, layer, parts.attend)
        self.mlp_norm = parts.norm(config)
        self.mlp = parts.mlp(config, layer)
        self.mixer_post_norm = parts.norm(config) if config.post_norms else nn.Identity()
        self.mlp_post_norm = parts.norm(config) if config.post_norms else nn.Identity()

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        x_BTD = self.stream(x_BTD, shared)
        mixed_BTD = self.mixer_post_norm(self.mixer(self.mixer_norm(x_BTD), shared))
        x_BTD, normed_BTD = add_then(self.mlp_norm, x_BTD, mixed_BTD)
        return x_BTD + self.mlp_post_norm(self.mlp(normed_BTD))


def _check_values(config: ModelConfig, blocks: nn.ModuleDict) -> None:
    """Refuse value embeddings that a mixer would not mix in.

    Raises:
        ConfigError: a layer that should has another mixer than attention.
    """
    for layer in sorted(config.table_of_layer):
        mixer: Any = blocks[str(layer)].get_submodule("mixer")
        if not isinstance(getattr(mixer, "value", None), MixedValues):
            raise ConfigError(
                f"model.value_embeddings = {config.value_embeddings}, and layer {layer} is a "
                f"{type(mixer).__name__}, which mixes no value embedding in",
                mend("model.value_embeddings=0"),
            )


class Decoder(nn.Module):
    """The decoder is an embedding, blocks, a norm and a head."""

    position: Any
    head: Any

    def __init__(self, config: ModelConfig, parts: Parts, mask: MaskSpec) -> None:
        super().__init__()
        check_mask(config, parts.attend, mask)
        self.config, self.mask, self.attend = config, mask, parts.attend
        self.embed = nn.Embedding(config.vocab, config.dim)
        rows = config.bigram_rows
        self.pairs = PairEmbedding(rows, config.dim, config.vocab) if rows else PassedOn()
        self.smear = Smear(config.dim) if config.embedding_smear else PassedOn()
        scale = config.embedding_scale
        self.embed_scale = ConstantFactor(scale) if scale != 1 else nn.Identity()
        self.embed_norm = (
            UnitRMSNorm(config.dim, config.norm_eps) if config.embedding_norm else nn.Identity()
        )
        values = config.resolved_kv_heads * config.resolved_head_dim
        self.value_embed = nn.ModuleList(
            nn.Embedding(config.vocab, values) for _ in range(config.value_embeddings)
        )
        self.table_of_layer, self.value_features = config.table_of_layer, values
        self.position = parts.position(config)
        self.local_position = LocalRotaryPosition(config) if config.local_rope_theta else None
        # A dictionary keeps each block's name when a pipeline drops its neighbours.
        self.blocks = nn.ModuleDict({str(i): Block(config, i, parts) for i in range(config.layers)})
        _check_values(config, self.blocks)
        self.norm = parts.norm(config)
        self.head = parts.head(config)
        self.residual_dtype = torch.float32

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor,
        rows: Rows,
        *,
        objective: Objective,
        scale: Tensor,
        extras: Any = None,
        part: Part = WHOLE,
    ) -> Tensor:
        """Return the objective's sum over the targets, times `scale`; a scalar.

        Args:
            x: token ids [B, T], or where `part` is not the first what the one before returned.
            targets_BT: ids to predict.
            rows: positions and documents.
            objective: what is computed of the logits.
            scale: one over the targets of the whole batch.
            extras: of the batch, for the objective.
            part: what to run; a part that is not the last returns its states [B, T, D], with what
                blocks read of the embedding where they do (`border_shape`).
        """
        states = self.states(x, self.share(rows, targets_BT.size(1)), part)
        if not part.last:
            return states
        states_ND, targets_N = states.flatten(0, 1), targets_BT.flatten()
        return self.loss(states_ND, targets_N, extras, objective, scale)

    def hidden(self, ids_BT: Tensor, rows: Rows, cache: KVCache | None = None) -> Tensor:
        """Return normalised hidden states [B, T, D]."""
        return self.states(ids_BT, self.share(rows, ids_BT.size(1), cache))

    def share(self, rows: Rows, length: int, cache: KVCache | None = None) -> Shared:
        """Return what all layers need of the rows, made once.

        It stays outside of compiled code: a compiler would compute sines again in every layer.
        """
        spec, open_mask = self.mask, None
        if spec.between:
            open_mask = self.prepare_mask(spec.of_layer(spec.between), rows, length)
        mask = self.prepare_mask(spec.of_layer(0), rows, length)
        rotation = self.position.prepare(rows.positions_BT)
        local = self.local_position.prepare(rows.positions_BT) if self.local_position else None
        shared = Shared(rows.positions_BT, mask, rotation, cache, open_mask, local)
        before = rows.before_BC2 if self.config.reads_before else None
        return shared._replace(noise_BT=rows.noise_BT, before_BC2=before)

    def prepare_mask(self, spec: MaskSpec, rows: Rows, length: int) -> object:
        """Return a layer's mask as the attention backend wants it."""
        return self.attend.prepare(spec, rows, length)

    def states(self, x: Tensor, shared: Shared, part: Part = WHOLE) -> Tensor:
        """Run the body: embedding, blocks, norm."""
        if part.first:
            ids_BT, x = x, self.enter(x, shared)
            shared = self.carry(ids_BT, x, shared)
        else:
            x, shared = self.arrive(x, shared)
        for name, block in self.blocks.items():
            if part.blocks is None or name in part.blocks:
                layer, table = int(name), self.table_of_layer.get(int(name))
                x = block(x, shared.for_layer(self.mask.is_open(layer), table))
        return self.leave(x) if part.last else joined(x, shared)

    def enter(self, ids_BT: Tensor, shared: Shared) -> Tensor:
        """Return what the first block reads, [B, T, D]."""
        if (before := shared.before_BC2) is None:
            x_BTD = self.embedded(ids_BT, shared)
        else:
            x_BTD = self.embedded(*with_leads(ids_BT, before, shared))
            x_BTD = without_leads(x_BTD, before.size(1))
        x_BTD = self.position.embed(x_BTD, shared.positions_BT)
        return self.embed_norm(self.embed_scale(x_BTD)).to(self.residual_dtype)

    def embedded(self, ids_BT: Tensor, shared: Shared) -> Tensor:
        """Return each token's embedding with what it reads of the tokens before, [B, T, D]."""
        return self.smear(self.pairs(self.embed(ids_BT), ids_BT, shared), shared)

    def carry(self, ids_BT: Tensor, x_BTD: Tensor, shared: Shared) -> Shared:
        """Return `shared` with what blocks read of the embedding: `x_BTD`, and rows of values."""
        dtype = compute_dtype(x_BTD)
        return shared._replace(
            embedded_BTD=x_BTD if self.config.embedding_residual else None,
            values=tuple(table(ids_BT).to(dtype) for table in self.value_embed),
        )

    def leave(self, x_BTD: Tensor) -> Tensor:
        """Return what the head reads, [B, T, D]."""
        return self.norm(x_BTD)

    def wire_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Return the shape of states between two blocks, for `rows` rows of `length` tokens."""
        return rows, length, self.config.dim

    def border_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Return the shape of what a stage of a pipeline gets: states, or these and `carry`'s."""
        stream, config = self.wire_shape(rows, length), self.config
        more = prod(stream) * config.embedding_residual
        more += config.value_embeddings * rows * length * self.value_features
        return (prod(stream) + more,) if more else stream

    def arrive(self, x: Tensor, shared: Shared) -> tuple[Tensor, Shared]:
        """Return the states that came from the stage before, and `shared` with what came beside."""
        tables, length = self.config.value_embeddings, shared.positions_BT.size(1)
        if x.dim() > 1:
            return x, shared
        rows = x.numel() // self.border_shape(1, length)[0]
        stream = self.wire_shape(rows, length)
        one, residual = prod(stream), self.config.embedding_residual
        counts = [one, one * residual, x.numel() - one * (1 + residual)]
        states, embedded, values = x.split(counts)
        states = states.view(stream)
        values = values.to(compute_dtype(states))
        return states, shared._replace(
            embedded_BTD=embedded.view(stream) if residual else None,
            values=values.view(tables, rows, length, -1).unbind() if tables else (),
        )

    def loss(
        self,
        hidden_ND: Tensor,
        targets_N: Tensor,
        extras: Any,
        objective: Objective,
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Return the objective's sum over tokens, times `scale`; a scalar."""
        return self.head(*self.head_inputs(hidden_ND), targets_N, extras, objective, scale)

    def logits(self, ids_BT: Tensor, rows: Rows, cache: KVCache | None = None) -> Tensor:
        """Return fp32 logits [B, T, V], for sampling and parity."""
        hidden = self.hidden(ids_BT, rows, cache)
        if cache is not None:
            cache.length += ids_BT.size(1)
        return self.head.logits(*self.head_inputs(hidden))

    def head_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the head multiplies: hidden states [..., D], and the output matrix [V, D]."""
        return hidden, self.unembedding

    @property
    def unembedding(self) -> Tensor:
        """Return the output matrix [V, D]: the head's own, or the embedding when tied."""
        return self.embed.weight if self.head.weight is None else self.head.weight
