"""Update by Schedule-Free AdamW: an average of all steps replaces the decay of the learning rate.

    y = (1 - b) z + b x                          where gradients g are taken
    v <- b2 v + (1 - b2) g g
    d = g / (sqrt(v / (1 - b2^t)) + eps) + decay y
    z <- z - lr d                                the steps
    x <- (1 - c) x + c z,  c = lr^2 / (sum of lr^2 so far)          the average

The parameter holds y and the state z; an evaluation computes x = y + (1 - 1/b) (z - y). In terms of
these, y <- (1 - c) y + c z - lr (1 - b (1 - c)) d with the z before the step. Two states for each
weight, as AdamW. A rate of zero adds nothing to the average. Source: arXiv 2405.15682, algorithm 1;
facebookresearch/schedule_free.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headrace.optim.elementwise import ElementwiseOptimizer, lists
from headrace.parallel.layout import local_of

TINY = 1e-30
"""Least sum of squared rates by which one is divided."""


class ScheduleFreeOptimizer(ElementwiseOptimizer):
    """Run Schedule-Free AdamW over named parameters; groups have `beta`, `memory` and `eps`."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    counts: ClassVar[tuple[str, ...]] = ("step", "rates")

    def start(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the first state: z begins where the weights do."""
        return {**super().start(parameter), "z": parameter.detach().clone()}

    def update(
        self,
        group: Mapping[str, Any],
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        keep: Tensor,
        state: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Do one step of Schedule-Free AdamW; see `ElementwiseOptimizer.update`."""
        squares, steps, rates, z = (state[k] for k in ("exp_avg_sq", "step", "rates", "z"))
        rate, beta, memory = group["lr"], group["beta"], group["memory"]
        # Shares of the highest rate: sums of ones are exact, and c has no unit.
        weight = (rate / (group["initial_lr"] * group["lr_factor"])) ** 2
        lists._foreach_add_(steps, [keep] * len(steps))  # a number would be read by the host
        lists._foreach_add_(rates, [weight * keep] * len(rates))
        shares = weight * keep / torch.stack(list(rates)).clamp(min=TINY)
        bias = (1 - memory ** torch.stack(list(steps)).clamp(min=1)).sqrt()
        lists._foreach_mul_(squares, 1 - (1 - memory) * keep)
        lists._foreach_addcmul_(squares, gradients, gradients, value=1 - memory)
        roots = lists._foreach_sqrt(squares)
        lists._foreach_div_(roots, bias.unbind())
        lists._foreach_add_(roots, group["eps"])
        directions = list(gradients)
        lists._foreach_div_(directions, roots)
        del roots
        lists._foreach_add_(directions, weights, alpha=group["weight_decay"])
        apart = lists._foreach_sub(z, weights)
        lists._foreach_mul_(apart, shares.unbind())
        lists._foreach_add_(weights, apart)
        del apart
        lists._foreach_mul_(directions, rate * keep)
        lists._foreach_sub_(z, directions)
        lists._foreach_mul_(directions, (1 - beta * (1 - shares)).unbind())
        lists._foreach_sub_(weights, directions)

    evaluations = 0
    """How often the average stood in the model."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the parameters hold x, the average, and afterwards the same bits as before."""
        self.evaluations += 1
        kept: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if "z" in (state := self.state.get(parameter, {})):
                        y, z = local_of(parameter), state["z"]
                        kept.append((y, y.clone()))
                        y.lerp_(local_of(z), 1 - 1 / group["beta"])
        try:
            yield
        finally:
            with torch.no_grad():
                for y, before in kept:
                    y.copy_(before)
