"""Round and prune the convolutions of a network that tells images apart.

A weight is a matrix for this: a row for each channel that it gives, with a scale of its own. Batch
normalisation multiplies each such channel by a factor, which goes into the scale and leaves the
codes, so the file that ships has the codes of training.

Pruning leaves out whole hidden channels. A channel between two convolutions counts by the squared
change of the loss that its absence makes, to first order (arXiv 1906.10771): the square of the sum,
over its weights in the filter of each channel and in the normalisation behind it, of weight times
gradient. Every place keeps the same share of its channels, in whole eights where it has several.

Shapes: R channels that a convolution gives, C numbers of each.
"""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headrace.compress.codes import Codes, quantize_nearest
from headrace.compress.fake import Rounding, linear_forward, through
from headrace.compress.spec import ROW_INT8, NumberFormat
from headrace.core.vision_config import VisionConfig
from headrace.model.vision import ImageClassifier, convolve

EIGHT = 8
"""Channels are kept in multiples of so many, which vector units multiply together."""


def image_formats(model: nn.Module) -> dict[str, NumberFormat]:
    """Return the format of each convolution's and each linear's weight: codes of 8 bits a row."""
    kinds = (nn.Conv2d, nn.Linear)
    return {f"{n}.weight": ROW_INT8 for n, m in model.named_modules() if isinstance(m, kinds)}


def image_codes(weight: Tensor, kind: NumberFormat = ROW_INT8) -> Codes:
    """Return the codes of a weight, as a matrix of a row for each channel that it gives."""
    return quantize_nearest(weight.detach().float().flatten(1), kind)


def _convolution_forward(module: Any, input: Tensor) -> Tensor:
    """Convolve with the rounded weight."""
    if not module.fake_is_on():
        return type(module).forward(module, input)
    rounded = through(module.weight.flatten(1), module.fake_rounding).view_as(module.weight)
    return convolve(input, rounded, module.bias, module)


def install_images(
    model: nn.Module, roundings: Mapping[str, Rounding], is_on: Callable[[], bool]
) -> None:
    """Let every convolution and linear with one of these weights round it.

    Args:
        model: the network.
        roundings: by the full names of the weights.
        is_on: whether the step that runs rounds.
    """
    for name, rounding in roundings.items():
        module: Any = model.get_submodule(name.removesuffix(".weight"))
        module.fake_rounding, module.fake_is_on = rounding, is_on
        convolves = isinstance(module, nn.Conv2d)
        module.forward = MethodType(_convolution_forward if convolves else linear_forward, module)


@torch.no_grad()
def look_at_convolution(module: Any) -> tuple[bool, float]:
    """Return whether a convolution gives what its codes stand for, and how far these move it.

    It convolves drawn numbers as it is, and by the numbers of its codes.
    """
    weight = module.weight.detach().float()
    stored = image_codes(weight, module.fake_rounding.kind).dequantize().view_as(weight)
    draw = torch.Generator().manual_seed(0)
    width = max(module.kernel_size)
    drawn = torch.rand(2, module.in_channels, width, width, generator=draw).to(weight.device)
    found, wanted = module.forward(drawn), convolve(drawn, stored, module.bias, module)
    near = 1e-5 * float(wanted.abs().max())
    return bool(((found - wanted).abs() <= near).all()), float((stored - weight).abs().max())


# --- fewer channels ---------------------------------------------------------------------------


def importance(model: ImageClassifier) -> list[Tensor]:
    """Return how much each channel counts, in the places of `vision.channels`.

    The model holds the gradients of a loss. The last place of all, where there is a hidden layer of
    the classifier, counts by that layer's own weights.
    """
    config = model.vision
    found = [
        _of_norm(model, f"{one.name}.block.{1 if one.widens else 0}") for one in config.blocks()
    ]
    found.append(_of_norm(model, config.last_name))
    if config.classifier:
        linear: Any = model.classifier[0]
        weighed = (linear.weight * linear.weight.grad).sum(1) + linear.bias * linear.bias.grad
        found.append(weighed.detach().square())
    return found


def _of_norm(model: nn.Module, name: str) -> Tensor:
    """Return the squared change of the loss for each channel of the normalisation in a module."""
    norm: Any = model.get_submodule(f"{name}.1")
    change = norm.weight * norm.weight.grad + norm.bias * norm.bias.grad
    return change.detach().square()


def kept_channels(config: VisionConfig, scores: list[Tensor], share: float) -> list[Tensor]:
    """Return the channels that are kept in each place, rising.

    Args:
        config: the network.
        scores: from `importance`.
        share: of the channels that go; whole eights stay, one at least.
    """
    fixed = {n for n, one in enumerate(config.blocks()) if not one.widens}
    kept = []
    for place, score in enumerate(scores):
        count = len(score)
        if place not in fixed:
            count = (
                max(EIGHT, round(count * (1 - share) / EIGHT) * EIGHT) if count > EIGHT else count
            )
            count = min(count, len(score))
        kept.append(score.topk(count).indices.sort().values)
    return kept


def cut(
    model: ImageClassifier, state: Mapping[str, Tensor], kept: list[Tensor]
) -> tuple[VisionConfig, dict[str, Tensor]]:
    """Return the config and the tensors of a network that has only the kept channels.

    Args:
        model: the whole network.
        state: its weights and statistics by torchvision's names, on the host.
        kept: channels of each place, from `kept_channels`.
    """
    config, left = model.vision, dict(state)

    def rows(module: str, channels: Tensor) -> None:
        for name in [n for n in left if n.startswith(f"{module}.")]:
            left[name] = left[name][channels].contiguous()

    def columns(module: str, channels: Tensor) -> None:
        left[f"{module}.weight"] = left[f"{module}.weight"][:, channels].contiguous()

    kept = [one.cpu() for one in kept]
    for block, channels in zip(config.blocks(), kept, strict=False):
        place, name = 0, f"{block.name}.block"
        if block.widens:
            rows(f"{name}.0", channels)
            place = 1
        rows(f"{name}.{place}", channels)
        if block.squeezed:
            place += 1
            columns(f"{name}.{place}.fc1", channels)
            rows(f"{name}.{place}.fc2", channels)
        columns(f"{name}.{place + 1}.0", channels)
    last = kept[len(config.blocks())]
    rows(config.last_name, last)
    columns("classifier.0" if config.classifier else "classifier.1", last)
    if config.classifier:
        rows("classifier.0", kept[-1])
        columns("classifier.3", kept[-1])
    sizes = tuple(len(one) for one in kept)
    return config.model_copy(update={"channels": sizes, "pretrained": ""}), left
