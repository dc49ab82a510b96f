"""Describe which matrices hold several projections, and how their rows interleave.

The one place that knows the fused layout: the zoo takes it apart for Hugging Face's names, and Muon
orthogonalises each projection by itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.model_config import ModelConfig
from headrace.model.mlp import gate_groups


@dataclass(frozen=True)
class Fusion:
    """A fused matrix has groups x (split[0] + split[1] + ...) rows."""

    groups: int
    split: tuple[int, ...]

    def pieces(self, fused: Tensor) -> tuple[Tensor, ...]:
        """Return the projections [groups x split[i], ...] of a fused weight or bias."""
        grouped = fused.view(self.groups, sum(self.split), *fused.shape[1:])
        return tuple(p.flatten(0, 1) for p in grouped.split(self.split, dim=1))

    def fuse(self, pieces: tuple[Tensor, ...]) -> Tensor:
        """Fuse projections into one matrix: the inverse of `pieces`."""
        grouped = [p.unflatten(0, (self.groups, -1)) for p in pieces]
        return torch.cat(grouped, dim=1).flatten(0, 1)


def fusions(config: ModelConfig) -> dict[str, Fusion]:
    """Return the fused linears of every block, by the end of their name."""
    groups, head_dim = config.resolved_kv_heads, config.resolved_head_dim
    queries = config.heads // groups
    fused = {"mixer.qkv": Fusion(groups, (queries * head_dim, head_dim, head_dim))}
    if config.gated:
        pairs = gate_groups(config)
        part = config.resolved_ffn // pairs
        fused["mlp.gate_up"] = Fusion(pairs, (part, part))
    return fused
