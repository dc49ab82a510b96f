"""Let blocks read the embedding again: the residual from it, and embeddings of values.

A block without either has `PassedOn` in its place, so that no block has a branch. What blocks read
is made once, after the embedding, and handed on in `Shared`. Between two stages of a pipeline it
travels with the stream, as one tensor without rows, and so does its gradient.

`ResidualFromEmbedding` begins a block with a x + b x0, where x0 is what the first block reads.
`MixedValues` makes attention's values v into a v + b e, where e is a token's row of a table of its
own. The factors are learned, of one dimension each, so that no weight decay falls on them. Source:
modded-nanogpt (github.com/KellerJordan/modded-nanogpt), whose first values these are too; value
residuals are from arXiv 2410.17897.

Shapes: B rows, T tokens, D features, G key-value heads, K features of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn

RESIDUAL_FACTORS = (1.0, 0.0)
"""Factors of the stream and of the embedding that a block starts with."""
VALUE_FACTORS = (0.5, 0.5)
"""Factors of attention's own values and of the table's that a block starts with."""


class PassedOn(nn.Module):
    """A module in the place of one that reads more: it returns its first argument."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        """Return `x`."""
        return x


class ResidualFromEmbedding(nn.Module):
    """A block begins with a x + b x0, of the residual stream and of what the first block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))

    def forward(self, x_BTD: Tensor, shared: Any) -> Tensor:
        """Return the sum, in the stream's dtype."""
        assert shared.embedded_BTD is not None
        return self.weight[0] * x_BTD + self.weight[1] * shared.embedded_BTD


def joined(x_BTD: Tensor, shared: Any) -> Tensor:
    """Return the stream with all that later blocks read of the embedding; it alone if they do not.

    Parts stand one after the other, [W], since they need not have equally many tokens.
    """
    read = () if shared.embedded_BTD is None else (shared.embedded_BTD,)
    parts = (*read, *shared.values)
    if not parts:
        return x_BTD
    return torch.cat([part.to(x_BTD.dtype).flatten() for part in (x_BTD, *parts)])


class MixedValues(nn.Module):
    """Attention mixes a v + b e, of its own values and of a row of a table for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))

    def forward(self, v_BTGK: Tensor, shared: Any) -> Tensor:
        """Return the sum, in the dtype of the values."""
        assert shared.value is not None
        return self.weight[0] * v_BTGK + self.weight[1] * shared.value.view_as(v_BTGK)
