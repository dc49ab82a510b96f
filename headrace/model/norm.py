"""Normalize features. Both norms compute in fp32 and return the input's dtype.

A weight that was gathered in bf16 is widened first: of two dtypes torch makes no fused kernel.

A norm is any module of [..., D] to [..., D]. One that also takes in the addition which stands
before it has a method `add(x, delta)`; `add_then` asks for it, so that a block has no branch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divide features by their root mean square (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)


class UnitRMSNorm(nn.Module):
    """Divide features by their root mean square, and learn nothing."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.float(), (self.dim,), None, self.eps).type_as(x)


class LayerNorm(nn.Module):
    """Apply layer norm with bias (arXiv 1607.06450)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).type_as(x)


def add_then(norm: nn.Module, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return x + delta and that sum normalised, by the norm's own `add` where it has one."""
    add = getattr(norm, "add", None)
    if add is not None:
        return add(x, delta)
    total = x + delta
    return total, norm(total)


NORMS = {"rms_norm": RMSNorm, "unit_rms_norm": UnitRMSNorm, "layer_norm": LayerNorm}
