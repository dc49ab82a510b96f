"""Make the baseline's optimizer: torch's fused AdamW (arXiv 1711.05101) for all that is not routed.

The fused update takes `found_inf`, a device flag that leaves weights, moments and step count as
they are: a step whose gradient is not finite needs no host synchronisation to be skipped.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headrace.parallel.world import World
from headrace.plan.plan import OptimizerConfig


def make_adamw(config: OptimizerConfig, named: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """Return fused AdamW over `named`; `group_by_role` gives each role its rate and decay."""
    return torch.optim.AdamW(
        list(named.values()),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def gradient_norm(
    gradients: Sequence[Tensor], copies: Sequence[int] | None = None, world: World | None = None
) -> Tensor:
    """Return the global L2 norm of all gradients, fp32, on the device; one over all meshes.

    Args:
        gradients: this rank's local parts.
        copies: how many ranks hold the same numbers of each; each counts as one.
        world: over which ranks to sum; without one, only this rank's count.
    """
    # Each tensor's own norm in fp32: a bf16 one would have 8 bits.
    norms = torch._foreach_norm(list(gradients), 2, torch.float32) if gradients else []  # type: ignore[attr-defined]
    if world is None or world.ranks == 1:
        return torch.stack(norms).norm() if norms else torch.zeros(())
    assert copies is not None
    total = torch.zeros((), device="cpu" if world.mesh is None else world.mesh.device_type)
    for count in sorted({*copies}):  # a tensor made of the counts would wait for the device
        own = [norm for norm, c in zip(norms, copies, strict=True) if c == count]
        total = total + torch.stack(own).square().sum() / count
    return world.sum_(total).sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients of global norm `norm`, at most 1 (arXiv 1211.5063)."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all gradients in place."""
    if gradients:
        torch._foreach_mul_(list(gradients), factor)  # type: ignore[attr-defined]
