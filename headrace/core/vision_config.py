"""Define the plan's table `vision`: a small convolutional network that tells images apart.

The two architectures are those of torchvision, with its names of parameters and their shapes, so
that its weights fit: MobileNetV3 small (arXiv 1905.02244) and EfficientNet-B0 (arXiv 1905.11946).
What both are made of is listed here without torch, since the cost model counts from the same list.

A block widens its input to `hidden` channels by a 1x1 convolution, filters each channel by itself,
scales channels by what the whole image shows (squeeze and excitation, arXiv 1709.01507), and
narrows to `outputs`. Pruning makes `hidden` smaller, and `vision.channels` says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.core.folders import Folder
from headrace.core.limits import MOST
from headrace.core.remedy import leave_out, mend
from headrace.core.strict import Strict, Wrong

NetworkName = Literal["mobilenet_v3_small", "efficientnet_b0"]
Activation = Literal["relu", "hard_swish", "swish", "none"]
COLORS = 3
"""Channels of an image: red, green and blue."""
MOST_CLASSES = 10
"""Classes of the generated images: the ten digits."""


@dataclass(frozen=True)
class InvertedBlock:
    """Hold the shape of one inverted residual block.

    Args:
        name: the module's name, as torchvision has it.
        inputs: channels that it reads.
        hidden: channels between its first and its last convolution.
        outputs: channels that it gives.
        kernel: width of the filter of each channel, in pixels.
        stride: pixels from one place of the filter to the next.
        squeezed: channels inside of squeeze and excitation; 0 where there is none.
        activation: what follows the first two convolutions.
        widens: whether a convolution widens the input first.
    """

    name: str
    inputs: int
    hidden: int
    outputs: int
    kernel: int
    stride: int
    squeezed: int
    activation: Activation
    widens: bool

    @property
    def adds_input(self) -> bool:
        """Return whether the input is added to the output."""
        return self.stride == 1 and self.inputs == self.outputs


@dataclass(frozen=True)
class Convolution:
    """Hold the shape of one convolution, or of a linear where `image` is 0.

    Args:
        name: of the module that has the weight.
        inputs: channels that it reads.
        outputs: channels that it gives.
        kernel: width in pixels.
        groups: groups of channels that do not meet: all where each is filtered by itself.
        image: width of its output in pixels; 0 of a linear.
        biased: whether it has a bias, and no normalisation behind it.
        pooled: whether it sees one pixel, the mean of the image.
    """

    name: str
    inputs: int
    outputs: int
    kernel: int
    groups: int
    image: int
    biased: bool = False
    pooled: bool = False

    @property
    def weights(self) -> int:
        """Return the numbers of its weight."""
        return self.outputs * self.inputs // self.groups * self.kernel**2

    @property
    def numbers(self) -> int:
        """Return the trained numbers: its weight, and a bias or the two of a normalisation."""
        return self.weights + self.outputs * (1 if self.biased else 2)

    @property
    def places(self) -> int:
        """Return the pixels of its output."""
        return 1 if self.pooled or not self.image else self.image**2


# kernel, hidden, outputs, squeezed?, activation, stride; arXiv 1905.02244, table 2.
MOBILENET_V3_SMALL: tuple[tuple[int, int, int, bool, Activation, int], ...] = (
    (3, 16, 16, True, "relu", 2),
    (3, 72, 24, False, "relu", 2),
    (3, 88, 24, False, "relu", 1),
    (5, 96, 40, True, "hard_swish", 2),
    (5, 240, 40, True, "hard_swish", 1),
    (5, 240, 40, True, "hard_swish", 1),
    (5, 120, 48, True, "hard_swish", 1),
    (5, 144, 48, True, "hard_swish", 1),
    (5, 288, 96, True, "hard_swish", 2),
    (5, 576, 96, True, "hard_swish", 1),
    (5, 576, 96, True, "hard_swish", 1),
)
# ratio of hidden to inputs, kernel, stride, outputs, blocks; arXiv 1905.11946, table 1.
EFFICIENTNET_B0 = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
STEM = {"mobilenet_v3_small": 16, "efficientnet_b0": 32}
"""Channels that the first convolution gives."""
LAST = {"mobilenet_v3_small": 576, "efficientnet_b0": 1280}
"""Channels that the last convolution gives."""
CLASSIFIER = {"mobilenet_v3_small": 1024, "efficientnet_b0": 0}
"""Features of the classifier's hidden layer; 0 where it has none."""


def by_eights(channels: float) -> int:
    """Return the multiple of 8 that is nearest and no tenth below, as both papers round."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near if near >= 0.9 * channels else near + 8


class VisionConfig(Strict):
    """Say which network tells which images apart. With this table a run reads no text."""

    architecture: NetworkName = "mobilenet_v3_small"
    """The network, with torchvision's names and shapes of parameters."""
    source: Literal["digits"] = "digits"
    """The images: digits that are drawn here, turned, sheared, moved and colored, with noise."""
    classes: int = Field(default=10, ge=2, le=MOST_CLASSES)
    """Classes to tell apart: the digits below it."""
    size: int = Field(default=32, ge=16, le=512)
    """Height and width of an image in pixels."""
    images: int = Field(default=8192, ge=16, le=MOST)
    """Images that are trained on, drawn with the seed 0."""
    validation_images: int = Field(default=2048, ge=16, le=MOST)
    """Images that are held out, drawn with another seed."""
    noise: float = Field(default=0.08, ge=0, le=1)
    """Standard deviation of the noise of each color of a pixel, of the range from black to white.
    """
    stem_stride: Literal[1, 2] = 2
    """Stride of the first convolution: 2 as published; 1 keeps more of small images."""
    channels: tuple[int, ...] = ()
    """Hidden channels of each block, then those of the last convolution, then the classifier's
    hidden features where it has some; left empty they are those of the architecture. `headrace
    prune` makes them fewer."""
    pretrained: Folder = ""
    """A folder that `headrace prune` or `headrace export --to torchvision` wrote, to start from
    instead of random weights."""

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        if not self.channels:
            return self
        whole = self.whole_channels
        if len(self.channels) != len(whole):
            raise Wrong(
                f"channels has {len(self.channels)} numbers, and {self.architecture} has "
                f"{len(whole)} places for them",
                leave_out("vision.channels"),
            )
        fixed = {n for n, one in enumerate(self._whole_blocks()) if not one.widens}
        for place, (given, most) in enumerate(zip(self.channels, whole, strict=True)):
            if not 1 <= given <= most or (place in fixed and given != most):
                allowed = f"{most}" if place in fixed else f"1 to {most}"
                near = most if place in fixed else min(max(1, given), most)
                right = [*self.channels[:place], near, *self.channels[place + 1 :]]
                raise Wrong(
                    f"channels[{place}] = {given}, and {self.architecture} takes {allowed} there",
                    mend(f"vision.channels={right}".replace(" ", "")),
                )
        return self

    @property
    def whole_channels(self) -> tuple[int, ...]:
        """Return the architecture's own numbers in the places of `channels`."""
        ends = [LAST[self.architecture], CLASSIFIER[self.architecture]]
        return (*(one.hidden for one in self._whole_blocks()), *(end for end in ends if end))

    @property
    def resolved_channels(self) -> tuple[int, ...]:
        """Return `channels`, or the architecture's own where it is empty."""
        return self.channels or self.whole_channels

    @property
    def stem(self) -> int:
        """Return the channels that the first convolution gives."""
        return STEM[self.architecture]

    @property
    def last(self) -> int:
        """Return the channels that the last convolution gives."""
        return self.resolved_channels[len(self._whole_blocks())]

    @property
    def classifier(self) -> int:
        """Return the features of the classifier's hidden layer; 0 where it has none."""
        return self.resolved_channels[-1] if CLASSIFIER[self.architecture] else 0

    @property
    def last_name(self) -> str:
        """Return the name of the module of the last convolution."""
        return f"features.{12 if self.architecture == 'mobilenet_v3_small' else 8}"

    def blocks(self) -> list[InvertedBlock]:
        """Return the blocks in their order, with the channels of `channels`."""
        return [
            InvertedBlock(**{**vars(one), "hidden": hidden})
            for one, hidden in zip(self._whole_blocks(), self.resolved_channels, strict=False)
        ]

    def _whole_blocks(self) -> list[InvertedBlock]:
        """Return the blocks as published."""
        if self.architecture == "mobilenet_v3_small":
            return [*_mobilenet_blocks(self.stem)]
        return [*_efficientnet_blocks(self.stem)]

    def convolutions(self) -> Iterator[Convolution]:
        """Yield every convolution and linear in the order of the forward pass."""
        image = -(-self.size // self.stem_stride)
        yield Convolution("features.0.0", COLORS, self.stem, 3, 1, image)
        for block in self.blocks():
            names = iter(f"{block.name}.block.{n}" for n in range(4))
            if block.widens:
                yield Convolution(f"{next(names)}.0", block.inputs, block.hidden, 1, 1, image)
            image = -(-image // block.stride)
            each = f"{next(names)}.0", block.hidden, block.hidden, block.kernel, block.hidden
            yield Convolution(*each, image)
            if block.squeezed:
                name = next(names)
                first = f"{name}.fc1", block.hidden, block.squeezed
                second = f"{name}.fc2", block.squeezed, block.hidden
                yield Convolution(*first, 1, 1, 1, biased=True, pooled=True)
                yield Convolution(*second, 1, 1, 1, biased=True, pooled=True)
            yield Convolution(f"{next(names)}.0", block.hidden, block.outputs, 1, 1, image)
        outputs = self.blocks()[-1].outputs
        yield Convolution(f"{self.last_name}.0", outputs, self.last, 1, 1, image)
        if self.classifier:
            yield Convolution("classifier.0", self.last, self.classifier, 1, 1, 0, biased=True)
            yield Convolution("classifier.3", self.classifier, self.classes, 1, 1, 0, biased=True)
        else:
            yield Convolution("classifier.1", self.last, self.classes, 1, 1, 0, biased=True)


def _mobilenet_blocks(inputs: int) -> Iterator[InvertedBlock]:
    """Yield the blocks of MobileNetV3 small."""
    for place, row in enumerate(MOBILENET_V3_SMALL, start=1):
        kernel, hidden, outputs, squeezes, activation, stride = row
        yield InvertedBlock(
            f"features.{place}",
            inputs,
            hidden,
            outputs,
            kernel,
            stride,
            by_eights(hidden / 4) if squeezes else 0,
            activation,
            widens=hidden != inputs,
        )
        inputs = outputs


def _efficientnet_blocks(inputs: int) -> Iterator[InvertedBlock]:
    """Yield the blocks of EfficientNet-B0."""
    for place, (ratio, kernel, stride, outputs, count) in enumerate(EFFICIENTNET_B0, start=1):
        for number in range(count):
            yield InvertedBlock(
                f"features.{place}.{number}",
                inputs,
                by_eights(inputs * ratio),
                outputs,
                kernel,
                stride if number == 0 else 1,
                max(1, inputs // 4),
                "swish",
                widens=ratio != 1,
            )
            inputs = outputs
