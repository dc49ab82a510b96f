"""The trunk's optimizer: torch's fused AdamW (arXiv 1711.05101) over all that is not routed away.

Weight decay falls on tensors of two or more dimensions, as GPT-2 and its successors do. The fused
update takes `found_inf`, a device flag that leaves weights, moments and step count as they are: a
step whose gradient is not finite needs no host synchronisation to be skipped.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace.core.plan import OptimizerConfig


def make_adamw(config: OptimizerConfig, named: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """Fused AdamW over `named`, in two groups: with and without weight decay."""
    matrices = [p for p in named.values() if p.ndim >= 2]
    vectors = [p for p in named.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The global L2 norm of all gradients, fp32, on the device; one over all meshes."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[attr-defined]


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm` (arXiv 1211.5063).

    Returns the norm before clipping; 0 only measures it.
    """
    norm = gradient_norm(parameters)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
