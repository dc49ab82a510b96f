"""Compute the norm of a step's gradients where they lie: no device is waited for."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
"""Classes of gradients that are whole: a distributed one needs an answer of all ranks."""
HALF = (torch.bfloat16, torch.float16)


@torch.no_grad()
def gradient_norm(optimizer: Any, device: torch.device) -> Tensor | None:
    """Return one norm over all gradients as the optimizer gets them, without a loss scale.

    Args:
        optimizer: one of torch's; parameters without a gradient count for nothing.
        device: where numbers of a step are kept.

    Returns:
        A number on `device`, or on the host where all gradients lie there. None where there is no
        gradient, or one that cannot be read without waiting: a sparse one of a GPU, a distributed
        one, one of a device that is neither the host nor a GPU.
    """
    parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradient = _dense(parameter.grad)
            if gradient is None or gradient.device.type not in ("cpu", device.type):
                return None
            parts[gradient.device, gradient.dtype].append(gradient)
    norm = _together(parts, device) if parts else None
    scale = getattr(optimizer, "grad_scale", None)  # where the optimizer divides by it itself
    if norm is not None and isinstance(scale, Tensor) and scale.device == norm.device:
        norm = norm / scale
    return norm


def _together(
    parts: dict[tuple[torch.device, torch.dtype], list[Tensor]], device: torch.device
) -> Tensor:
    """Return the norm of gradients by device and dtype; the host's part is known at once."""
    there, host = [], 0.0
    for (where, dtype), gradients in parts.items():
        wide = torch.float32 if dtype in HALF else None
        norms = torch._foreach_norm(gradients, 2, wide)  # type: ignore[attr-defined]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if where.type == "cpu":
            host = math.hypot(host, float(norm))
        else:
            there.append(norm.float().to(device, non_blocking=True))
    if not there:
        return torch.tensor(host)
    total = there[0] if len(there) == 1 else torch.linalg.vector_norm(torch.stack(there))
    return (total.square() + host * host).sqrt() if host else total


def _dense(gradient: Tensor) -> Tensor | None:
    """Return its numbers as a plain tensor; None where they cannot be had without waiting."""
    if type(gradient) not in PLAIN or gradient.device.type not in ("cpu", "cuda"):
        return None
    if gradient.layout is torch.sparse_coo and gradient.device.type == "cpu":
        gradient = gradient.coalesce().values()
    if gradient.layout is not torch.strided:
        return None
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
