"""Update by AdEMAMix: AdamW with a second, slow momentum of gradients long past.

    m <- b1 m + (1 - b1) g      s <- b3(t) s + (1 - b3(t)) g      v <- b2 v + (1 - b2) g g
    w <- w - lr ((m / (1 - b1^t) + a(t) s) / (sqrt(v / (1 - b2^t)) + eps) + decay w)

The slow one is not corrected for its beginning at zero. Over the first T steps its weight a(t)
rises linearly from zero, and b3(t) from b1 so that its half-life grows linearly. Three states for
each weight. Source: arXiv 2409.03137, algorithm 1 and its schedulers; apple/ml-ademamix.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.optim.elementwise import ElementwiseOptimizer, lists

SMALLEST = 1e-6
"""Least b1 that b3 begins with: a decay of zero has no logarithm."""


def slow_share(steps_N: Tensor, start: float, end: float, warmup: float) -> Tensor:
    """Return 1 - b3(t), the share of a gradient in the slow momentum, fp32 [N].

    Args:
        steps_N: t, from 1.
        start: b1, where b3 begins.
        end: where it ends.
        warmup: T, in steps.
    """
    done_N = (steps_N / warmup).clamp(max=1.0)
    first, last = math.log(max(start, SMALLEST)), math.log(end)
    # Near 1 the difference from 1 has more digits than b3 itself.
    return -torch.expm1(first * last / ((1 - done_N) * last + done_N * first))


class AdemamixOptimizer(ElementwiseOptimizer):
    """Run AdEMAMix over named parameters; groups have `betas`, `eps`, `alpha` and `warmup`."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "slow", "exp_avg_sq")
    counts: ClassVar[tuple[str, ...]] = ("step",)

    def update(
        self,
        group: Mapping[str, Any],
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        keep: Tensor,
        state: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Do one step of AdEMAMix; see `ElementwiseOptimizer.update`."""
        fast, slow, squares, steps = (state[k] for k in ("exp_avg", "slow", "exp_avg_sq", "step"))
        rate, (b1, b2, b3), warmup = group["lr"], group["betas"], group["warmup"]
        lists._foreach_add_(steps, [keep] * len(steps))  # a number would be read by the host
        t = torch.stack(list(steps)).clamp(min=1)
        share, bias = slow_share(t, b1, b3, warmup), 1 - b1**t
        alpha = group["alpha"] * (t / warmup).clamp(max=1.0)
        lists._foreach_mul_(fast, 1 - (1 - b1) * keep)
        lists._foreach_add_(fast, gradients, alpha=1 - b1)
        lists._foreach_mul_(squares, 1 - (1 - b2) * keep)
        lists._foreach_addcmul_(squares, gradients, gradients, value=1 - b2)
        lists._foreach_mul_(slow, (1 - share * keep).unbind())
        directions = list(gradients)
        lists._foreach_mul_(directions, share.unbind())
        lists._foreach_add_(slow, directions)
        lists._foreach_copy_(directions, slow)
        lists._foreach_mul_(directions, (alpha * bias).unbind())
        lists._foreach_add_(directions, fast)
        lists._foreach_mul_(directions, (rate * keep / bias).unbind())
        roots = lists._foreach_sqrt(squares)
        lists._foreach_div_(roots, (1 - b2**t).sqrt().unbind())
        lists._foreach_add_(roots, group["eps"])
        lists._foreach_div_(directions, roots)
        lists._foreach_mul_(weights, 1 - rate * group["weight_decay"] * keep)
        lists._foreach_sub_(weights, directions)
