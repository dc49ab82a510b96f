"""Measure the norm of all gradients over all ranks, and scale the gradients by a factor.

These are the parts of the `clip` socket: the baseline's filler, and those of techniques that clip
by another rule. Nothing here waits for the device.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.optim.adamw import clip_factor, gradient_norm, scale_gradients
from headrace.parallel.layout import local_of


def clip(build: Build, max_norm: float) -> Tensor:
    """Clip the gradients by their norm over all ranks and return the norm before clipping.

    This is the baseline's filler of `clip`. A `max_norm` of 0 only measures.
    """
    norm = norm_over_ranks(build)
    scale(build, clip_factor(norm, max_norm) if max_norm > 0 else None)
    return norm


def norm_over_ranks(build: Build) -> Tensor:
    """Return the norm of all gradients over all ranks, fp32; each number counts once."""
    gradients = dict(_gradients(build))
    copies: list[int] = []
    if build.world.ranks > 1:
        copies = [
            build.layouts[name].copies(build.world, build.model.get_parameter(name))
            for name in gradients
        ]
    return gradient_norm([*gradients.values()], copies, build.world)


def scale(build: Build, factor: Tensor | None) -> None:
    """Multiply all gradients by `factor`, a scalar on the device; None leaves them as they are.

    An optimizer with a `gradient_factor` multiplies its gradients as it reads them; the other
    gradients are multiplied here.
    """
    later: set[str] = set()
    for route, optimizer in build.optimizers.items():
        if hasattr(optimizer, "gradient_factor"):
            optimizer.gradient_factor = factor  # type: ignore[attr-defined]
            later |= build.routed[route].keys()
    if factor is not None:
        here = [gradient for name, gradient in _gradients(build) if name not in later]
        scale_gradients(here, factor)


def norm_in_the_update(build: Build) -> Tensor:
    """Return the norm of the gradients that are there after a step, as its update saw them.

    It is over all ranks, and counts the factors that optimizers multiply their gradients by.
    """
    factors = {
        name: factor
        for route, optimizer in build.optimizers.items()
        if (factor := getattr(optimizer, "gradient_factor", None)) is not None
        for name in build.routed[route]
    }
    total = torch.zeros((), device=build.device)
    for name, gradient in _gradients(build):
        copies = build.layouts[name].copies(build.world, build.model.get_parameter(name))
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32) * factors.get(name, 1.0)
        total += norm.square() / copies
    return build.world.sum_(total).sqrt()


def _gradients(build: Build) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in build.model.named_parameters():
        if parameter.grad is not None:
            yield name, local_of(parameter.grad)
