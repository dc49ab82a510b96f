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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.compress.fake import Rounding
from headrace.compress.spec import ROW_INT8, NumberFormat
from headrace.core.vision_config import VisionConfig
from headrace.model.vision import ImageClassifier, convolve

MOST_CODE = 127
"""The largest code of 8 bits; the least is its negative, so that zero has the code 0."""
SMALLEST = 1e-12
"""The least of a row's largest magnitude, so that a row of zeros has a scale."""
EIGHT = 8
"""Channels are kept in multiples of so many, which vector units multiply together."""


class ImageCodes(NamedTuple):
    """Hold a weight in codes of 8 bits: whole numbers in its shape, and a scale of each row."""

    codes: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """Return the numbers that the codes stand for."""
        return self.codes * self.scales.view(-1, *(1 for _ in self.codes.shape[1:]))


def image_codes(weight: Tensor) -> ImageCodes:
    """Return the nearest codes of a weight, from -127 to 127 as XNNPACK has them.

    The largest magnitude of each row has the code 127 or -127.
    """
    weight = weight.detach().float()
    scales = weight.flatten(1).abs().amax(1).clamp(min=SMALLEST) / MOST_CODE
    shape = (-1, *(1 for _ in weight.shape[1:]))
    codes = (weight / scales.view(shape)).round().clamp(-MOST_CODE, MOST_CODE)
    return ImageCodes(codes, scales)


class RoundedWeight(torch.autograd.Function):
    """It rounds a weight to its codes, and gives the gradient on as it comes (arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:  # type: ignore[override]
        """Return what the codes stand for, in the weight's type."""
        return image_codes(weight).dequantize().to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient as it is."""
        return grad


def image_formats(model: nn.Module) -> dict[str, NumberFormat]:
    """Return the format of each convolution's and each linear's weight: codes of 8 bits a row."""
    layers = (nn.Conv2d, nn.Linear)
    return {f"{n}.weight": ROW_INT8 for n, m in model.named_modules() if isinstance(m, layers)}


def _rounded_forward(module: Any, input: Tensor) -> Tensor:
    """Multiply with the rounded weight."""
    if not module.fake_is_on():
        return type(module).forward(module, input)
    weight = RoundedWeight.apply(module.weight)
    if isinstance(module, nn.Linear):
        return nn.functional.linear(input, weight, module.bias)
    return convolve(input, weight, module.bias, module)


def install_images(
    model: nn.Module, roundings: Mapping[str, Rounding], is_on: Callable[[], bool]
) -> None:
    """Let every convolution and linear with one of these weights round it.

    Args:
        model: the network.
        roundings: by the full names of the weights.
        is_on: whether the step that runs rounds.
    """
    for name in roundings:
        module: Any = model.get_submodule(name.removesuffix(".weight"))
        module.fake_is_on = is_on
        module.forward = MethodType(_rounded_forward, module)


@torch.no_grad()
def look_at_rounding(module: Any) -> tuple[bool, float]:
    """Return whether a convolution gives what its codes stand for, and how far these move it.

    It multiplies drawn numbers as it is, and by the numbers of its codes. A linear is looked at
    likewise.
    """
    weight = module.weight.detach().float()
    stored, draw = image_codes(weight).dequantize(), torch.Generator().manual_seed(0)
    if isinstance(module, nn.Linear):
        drawn = torch.rand(2, module.in_features, generator=draw).to(weight.device)
        wanted = nn.functional.linear(drawn, stored, module.bias)
    else:
        width = max(module.kernel_size)
        drawn = torch.rand(2, module.in_channels, width, width, generator=draw).to(weight.device)
        wanted = convolve(drawn, stored, module.bias, module)
    near = 1e-5 * float(wanted.abs().max())
    is_rounded = bool(((module.forward(drawn) - wanted).abs() <= near).all())
    return is_rounded, float((stored - weight).abs().max())


# --- fewer channels ---------------------------------------------------------------------------


def importance(model: ImageClassifier) -> list[Tensor]:
    """Return how much each channel counts, in the places of `vision.channels`.

    The model holds the gradients of a loss. The last place of all, where there is a hidden layer of
    the classifier, counts by that layer's own weights.
    """
    config = model.vision
    scores = [
        _of_norm(model, f"{one.name}.block.{1 if one.widens else 0}") for one in config.blocks()
    ]
    scores.append(_of_norm(model, config.last_name))
    if config.classifier:
        linear: Any = model.classifier[0]
        weighed = (linear.weight * linear.weight.grad).sum(1) + linear.bias * linear.bias.grad
        scores.append(weighed.detach().square())
    return scores


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
