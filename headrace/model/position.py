"""Give tokens their place by a rotation of queries and keys, a learned table, or nothing.

Every filler has the same two methods, so the decoder has no branch: `embed` may add to the
embedding once, `prepare` makes what `rotate` needs, once per forward and shared by all layers.
Nothing is kept in buffers: tables follow the batch's own positions, in fp32.

Shapes: B rows, T tokens, H heads, K features of a head, D features of the model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.core.model_config import ModelConfig

Normalise = Callable[[Tensor], Tensor]
"""What is done to each head before it is turned: the mixer's norm of queries or of keys."""


def as_is(x_BTHK: Tensor) -> Tensor:
    """Return the input: no norm."""
    return x_BTHK


class Rotation(NamedTuple):
    """A rotation holds cosine and sine of every position's angles, fp32 [B, T, 1, K/2]."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x_BTHK: Tensor, norm: Normalise = as_is) -> Tensor:
        """Rotate `norm(x_BTHK)` by its positions' angles in fp32; return it in its own dtype."""
        x_BTHK = norm(x_BTHK)
        a, b, cos, sin = *x_BTHK.float().chunk(2, dim=-1), self.cos, self.sin
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BTHK)


class NoPosition(nn.Module):
    """Order comes from the causal mask alone (arXiv 2305.19466)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """Return `x_BTD` unchanged."""
        return x_BTD

    def prepare(self, positions_BT: Tensor) -> Rotation | None:
        """Return None: there is nothing to prepare."""
        return None

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of transformers' config.json that `ModelConfig` does not give."""
        return {}


class LearnedPosition(NoPosition):
    """Add GPT-2's learned table of positions to the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.context, config.dim))

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """Return `x_BTD` plus each position's row."""
        return x_BTD + nn.functional.embedding(positions_BT, self.weight)


class RotaryPosition(NoPosition):
    """Rotary embedding (arXiv 2104.09864), halves convention as Llama and Qwen have it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.theta, self.head_dim = config.rope_theta, config.resolved_head_dim

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle per position of each feature pair, fp32 [K/2]; scalings override it."""
        pair = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        return self.theta ** (-pair / self.head_dim)

    def prepare(self, positions_BT: Tensor) -> Rotation:
        """Return the angles of `positions_BT`."""
        angle = positions_BT[..., None, None].float() * self.frequencies(positions_BT.device)
        return Rotation(angle.cos(), angle.sin())


def rotate(x_BTHK: Tensor, rotation: Rotation | None, norm: Normalise = as_is) -> Tensor:
    """Rotate `norm(x_BTHK)` by `rotation`, in its own dtype; None rotates nothing.

    The norm is handed over and not applied before, so that one kernel may do both.
    """
    return norm(x_BTHK) if rotation is None else rotation.rotate(x_BTHK, norm)


POSITIONS = {"rope": RotaryPosition, "learned": LearnedPosition, "none": NoPosition}
