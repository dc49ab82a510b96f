"""AdamW over one matrix is one kernel here: it reads and writes gradient, moments and weight once.

torch's fused update wants weight and gradient in one dtype, and the gradient already clipped. A
bf16 weight with its fp32 master therefore costs four passes beside the one that clips: join weight
and rest, widen the gradient, update, and part weight and rest. That moves 54 bytes a number where
26 are needed. This kernel does all of it in registers. The clip factor is a number on the device,
and so is the flag that leaves everything as it is. The arithmetic is fp32, in torch's order.

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
    """Noise has keys and places, which make it the same on any cut of a matrix."""

    keys_2: Tensor
    """Keys of the matrix at this step, int32 (`bf16_weight.keys_at`)."""
    rows_R: Tensor
    """Place of each row's first number in the whole matrix, int32."""
    columns_C: Tensor
    """What each column adds to its row's place, int32."""


class Update(NamedTuple):
    """An update has these numbers."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    factor: Tensor | None = None
    """Gradients are multiplied by it, a scalar on the device."""
    found_inf: Tensor | None = None
    """1 where nothing may change, a scalar on the device; torch's name."""


def adamw_(
    weight: Tensor,
    rest: Tensor | None,
    noise: Noise | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    corrections_2: Tensor,
    how: Update,
) -> None:
    """Update a bf16 `weight`, its `rest` and moments in place; `step` counts the updates before.

    Args:
        weight: bf16.
        rest: int16, the bits of the master that the weight leaves out, or None.
        noise: what stochastic rounding uses where there is no rest.
        grad: bf16 or fp32.
        exp_avg: fp32, the first moment.
        exp_avg_sq: fp32, the second moment.
        step: fp32 scalar; the caller counts.
        corrections_2: what this update's moments are divided by, from `biases`.
        how: the numbers of the update.
    """
    from headrace.kernels import adamw_triton

    COUNTS[KERNEL] += 1
    adamw_triton.update(weight, rest, noise, grad, exp_avg, exp_avg_sq, step, corrections_2, how)


def biases(steps: Sequence[Tensor], betas: tuple[float, float]) -> Tensor:
    """Return what each update's moments are divided by, fp32 [steps, 2].

    For n updates these are 1 - beta1^n and the root of 1 - beta2^n. They are computed in fp64: in
    the first steps fp32 would lose the digits of the difference.

    Args:
        steps: counts of updates before.
        betas: shares of the old moments that an update keeps.
    """
    count_N = torch.stack(list(steps)).double() + 1
    first, second = (1 - beta**count_N for beta in betas)
    return torch.stack([first, second.sqrt()], dim=-1).float()
