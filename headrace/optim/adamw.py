"""The trunk's optimizer: torch's fused AdamW (arXiv 1711.05101) over all that is not routed away.

Weight decay falls on tensors of two or more dimensions, as GPT-2 and its successors do. The fused
update takes `found_inf`, a device flag that leaves weights, moments and step count as they are: a
step whose gradient is not finite needs no host synchronisation to be skipped.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headrace.core.plan import OptimizerConfig
from headrace.parallel.world import World


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


def gradient_norm(
    gradients: Sequence[Tensor], copies: Sequence[int] | None = None, world: World | None = None
) -> Tensor:
    """The global L2 norm of all gradients, fp32, on the device; one over all meshes.

    Args:
        gradients: this rank's local parts.
        copies: how many ranks hold the same numbers of each; each counts as one.
        world: over which ranks to sum; without one, only this rank's count.
    """
    if world is None or world.ranks == 1:
        return torch.nn.utils.get_total_norm(gradients, foreach=True)
    assert copies is not None
    if gradients:
        norms = torch._foreach_norm(list(gradients))  # type: ignore[attr-defined]
        squares = torch.stack(norms).float().square()
        total = (squares / torch.tensor(copies, device=squares.device)).sum()
    else:  # a stage whose blocks are all frozen
        total = torch.zeros((), device="cpu" if world.mesh is None else world.mesh.device_type)
    return world.sum_(total).sqrt()


def scale_gradients(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their global norm is at most `max_norm` (arXiv 1211.5063)."""
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(gradients), factor)  # type: ignore[attr-defined]
