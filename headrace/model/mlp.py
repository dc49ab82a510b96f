"""Transform each token by a network that is gated (SwiGLU) or plain (GELU, ReLU^2).

Gate and up come from one matrix, `gate_up`, whose rows alternate in groups of both, as many groups
as key-value heads where that divides: one product instead of two, and a column split needs no
reshuffle.

Shapes: B rows, T tokens, D features, F hidden features.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from headrace.core.model_config import ModelConfig


def gate_groups(config: ModelConfig) -> int:
    """Return how many groups of gate and up rows `gate_up` alternates."""
    return math.gcd(config.resolved_kv_heads, config.resolved_ffn)


class SwiGLU(nn.Module):
    """Compute down(silu(gate x) * up x), arXiv 2002.05202."""

    columns, rows = ("gate_up",), ("down",)

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.units = gate_groups(config)
        self.group = config.resolved_ffn // self.units
        self.gate_up = nn.Linear(config.dim, 2 * config.resolved_ffn, bias=config.bias)
        self.down = nn.Linear(config.resolved_ffn, config.dim, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        gate, up = self.gate_up(x_BTD).unflatten(-1, (-1, 2, self.group)).unbind(-2)
        return self.down((F.silu(gate) * up).flatten(-2))


class GeGLU(SwiGLU):
    """Compute down(gelu(gate x) * up x), arXiv 2002.05202, with GELU's tanh as Gemma has it."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        gate, up = self.gate_up(x_BTD).unflatten(-1, (-1, 2, self.group)).unbind(-2)
        return self.down((_gelu_tanh(gate) * up).flatten(-2))


class PlainMLP(nn.Module):
    """Compute down(act(up x)) with GELU (exact or tanh) or squared ReLU (arXiv 2109.08668)."""

    columns, rows = ("up",), ("down",)

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.units = config.resolved_ffn
        self.activation = ACTIVATIONS[config.activation]
        self.up = nn.Linear(config.dim, config.resolved_ffn, bias=config.bias)
        self.down = nn.Linear(config.resolved_ffn, config.dim, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return self.down(self.activation(self.up(x_BTD)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    y = F.relu(x)
    return y * y  # autocast would square in fp32, and keep that


MLPS = {"swiglu": SwiGLU, "geglu": GeGLU}
"""Gated MLPs; the others are plain."""
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu2": _relu2}
