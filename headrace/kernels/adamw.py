"""AdamW over one matrix as one kernel: gradient, moments and weight are read and written once.

torch's fused update wants weight and gradient in one dtype, and the gradient already clipped. A
bf16 weight with its fp32 master therefore costs a pass to join both, one to widen the gradient, the
update, and one to part weight and rest, beside the pass that clips: 54 bytes a number where 26 are
needed. Here one kernel does all of it in registers: the clip factor is a number on the device, and
so is the flag that leaves everything as it is. The arithmetic is fp32, in torch's order.

Source: arXiv 1711.05101; bf16_weight.py says how a weight of 16 bits learns in 32.

Shapes: any for the matrix; all of it contiguous.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.launches import COUNTS

KERNEL = "adamw"
"""The kernel's name among the counted launches."""


class Noise(NamedTuple):
    """What makes stochastic rounding the same on any cut of a matrix."""

    keys_2: Tensor
    """of the matrix, int32"""
    rows_R: Tensor
    """place of each row's first number, int32"""
    columns_C: Tensor
    """of each column beside it, int32"""


class Update(NamedTuple):
    """The numbers of one update."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    factor: Tensor | None = None
    """what gradients are multiplied by, a scalar on the device"""
    found_inf: Tensor | None = None
    """1 where nothing may change, a scalar on the device"""


def adamw_(
    weight: Tensor, rest: Tensor | None, noise: Noise | None, grad: Tensor, exp_avg: Tensor,
    exp_avg_sq: Tensor, step: Tensor, corrections_2: Tensor, how: Update,
) -> None:  # fmt: skip
    """Update a bf16 `weight`, its `rest` and moments in place; `step` counts the updates before.

    Args:
        weight: bf16.
        rest: int16, the bits of the master that the weight leaves out, or None.
        noise: of stochastic rounding, where there is no rest.
        grad: bf16 or fp32.
        exp_avg: fp32.
        exp_avg_sq: fp32.
        step: fp32 scalar; the caller counts.
        corrections_2: what this update's moments are divided by, see `biases`.
        how: the numbers.
    """
    from headrace.kernels import adamw_triton

    COUNTS[KERNEL] += 1
    adamw_triton.update(weight, rest, noise, grad, exp_avg, exp_avg_sq, step, corrections_2, how)


def biases(steps: Sequence[Tensor], betas: tuple[float, float]) -> Tensor:
    """For each count of updates before: 1 - beta1^n and the root of 1 - beta2^n; fp32 [steps, 2].

    In fp64: in the first steps fp32 would lose what the difference is made of.
    """
    count_N = torch.stack(list(steps)).double() + 1
    first, second = (1 - beta**count_N for beta in betas)
    return torch.stack([first, second.sqrt()], dim=-1).float()
