"""Update by Lion: the sign of an interpolation between momentum and gradient.

    c = b1 m + (1 - b1) g        w <- w - lr (sign(c) + decay w)        m <- b2 m + (1 - b2) g

Every number moves by `lr`, or not at all where c is zero. One state for each weight, where AdamW
has two. Source: arXiv 2302.06675, algorithm 2 of its section 3.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from headrace.optim.elementwise import ElementwiseOptimizer, lists


class LionOptimizer(ElementwiseOptimizer):
    """Run Lion over named parameters; groups have `betas`."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def update(
        self,
        group: Mapping[str, Any],
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        keep: Tensor,
        state: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Do one step of Lion; see `ElementwiseOptimizer.update`."""
        momenta = state["exp_avg"]
        rate, (near, far) = group["lr"], group["betas"]
        directions = lists._foreach_lerp(momenta, gradients, 1 - near)
        lists._foreach_sign_(directions)
        lists._foreach_mul_(directions, rate * keep)
        lists._foreach_mul_(weights, 1 - rate * group["weight_decay"] * keep)
        lists._foreach_sub_(weights, directions)
        lists._foreach_mul_(momenta, 1 - (1 - far) * keep)
        lists._foreach_add_(momenta, gradients, alpha=1 - far)
