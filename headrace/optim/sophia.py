"""Update by Sophia: momentum over an estimate of the curvature, each number clipped on its own.

    m <- b1 m + (1 - b1) g          h <- b2 h + (1 - b2) n g' g'   (every few steps)
    w <- w - lr (decay w + clip(m / (rho h + eps), -1, 1))

Where the loss is flat or curved downwards the step is `lr` in the direction of the momentum; where
it is steep and curved, the step is short. `g'` are gradients against labels that the model drew
itself, and n their number. The official code keeps the mean of g' g' and multiplies rho by n; the
product is the same, and a state that holds n stays right when the number of targets changes.

A step whose gradient is not finite is masked on the device. Everything is by element, so a sharded
parameter updates its local part alone. Source: arXiv 2305.14342 (algorithm 3).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.parallel.layout import local_of

TINY = 1e-15
"""Added to rho h, as in the official code: the first steps, without a curvature, are sign steps."""


class SophiaOptimizer(torch.optim.Optimizer):
    """Run Sophia over named parameters, masked by `found_inf` on the device."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        rho: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "rho": rho, "weight_decay": weight_decay}
        super().__init__(list(named.values()), defaults)
        self.found_inf: Tensor | None = None
        self.updates = 0
        self.labels: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter; where `found_inf` is 1, all stays as it is."""
        self.updates += 1
        for group in self.param_groups:
            lr, beta = group["lr"], group["betas"][0]
            for p in group["params"]:
                if p.grad is None:
                    continue
                skip, keep = self._masks(p)
                weight, m, h = local_of(p), self._state(p, "exp_avg"), self._state(p, "hessian")
                grad = local_of(p.grad).masked_fill_(skip, 0)  # nothing times nan is nan
                m.lerp_(grad.to(m.dtype), (1 - beta) * keep)
                ratio = (h * group["rho"]).add_(TINY)
                ratio = torch.div(m, ratio, out=ratio).clamp_(-1, 1)
                weight.mul_(1 - lr * group["weight_decay"] * keep)
                weight.addcmul_(ratio, keep, value=-lr)

    @torch.no_grad()
    def estimate(self, targets: Tensor) -> None:
        """Take the gradients against drawn labels into the curvature, masked as `step` is.

        Args:
            targets: how many labels the gradients are the mean over.
        """
        taken = targets if self.found_inf is None else targets * (1.0 - self.found_inf)
        self.labels = taken if self.labels is None else self.labels + taken
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                skip, keep = self._masks(p)
                h = self._state(p, "hessian")
                grad = local_of(p.grad).masked_fill_(skip, 0).to(h.dtype)
                share = (1 - group["betas"][1]) * keep
                h.mul_(1 - share).addcmul_(grad * (share * targets), grad)

    def _masks(self, p: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Return whether to skip, and 1 where not: both scalars on the parameter's device."""
        is_bad = torch.zeros((), device=p.device) if self.found_inf is None else self.found_inf
        return is_bad > 0, 1.0 - is_bad

    def _state(self, p: nn.Parameter, key: str) -> Tensor:
        """Return the local part of a state that lies as its parameter."""
        state = self.state[p]
        if key not in state:
            state[key] = torch.zeros_like(p)
        return local_of(state[key])
