"""Leave hidden channels of a network that tells images apart out: a smaller config and weights.

What goes first is chosen over batches of the training images (compress/vision). Nothing is trained:
the folder is one that `vision.pretrained` starts from, and a run with `distillation` from the whole
network gets back what was lost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.compress.vision import cut, importance, kept_channels
from headrace.costs.vision import image_flops, image_parameters
from headrace.export.folder import new_folder, write_json
from headrace.export.vision import write_images_folder
from headrace.model.head import cross_entropy
from headrace.model.vision import IMAGE, ImageClassifier, load_images_state
from headrace.model.vision_folder import images_state

BATCHES, IMAGES_EACH = 16, 64
"""Batches of training images over which channels are judged, and the images of each."""
RECORD = "pruning.json"


@dataclass(frozen=True)
class ImagesPruning:
    """Hold what pruning left of a network.

    Args:
        parameters: before it.
        left: after it.
        flops: of one image before it.
        left_flops: of one image after it.
        channels: in the places of `vision.channels`.
        accuracy: share of held-out images told rightly before it.
        left_accuracy: after it, before any training.
    """

    parameters: int
    left: int
    flops: float
    left_flops: float
    channels: tuple[int, ...]
    accuracy: float
    left_accuracy: float

    def to_dict(self) -> dict[str, Any]:
        """Return the pruning as JSON values."""
        return {**vars(self), "channels": [*self.channels]}


def prune_network(
    build: Build,
    share: float,
    output: Path,
    *,
    accuracy: Callable[[Build], float],
    tokens: int | None = None,
) -> ImagesPruning:
    """Write a network without the channels that count least, and return what it is.

    Args:
        build: the run, opened with its data and its trained weights.
        share: of the hidden channels that go.
        output: the new folder.
        accuracy: returns the share of held-out images that a build tells rightly.
        tokens: images over which channels are judged.

    Raises:
        ConfigError: the folder has files already.
    """
    model: Any = build.model
    assert isinstance(model, ImageClassifier)
    before = accuracy(build)
    scores = _judged(build, model, tokens or BATCHES * IMAGES_EACH)
    whole = model.vision
    kept = kept_channels(whole, scores, share)
    config, state = cut(model, images_state(model), kept)
    small = ImageClassifier(config)
    load_images_state(small, state)
    build.model = small.to(build.device).eval()  # type: ignore[assignment]
    pruning = ImagesPruning(
        parameters=image_parameters(whole),
        left=image_parameters(config),
        flops=image_flops(whole),
        left_flops=image_flops(config),
        channels=config.channels,
        accuracy=before,
        left_accuracy=accuracy(build),
    )
    with new_folder(output) as aside:
        write_images_folder(aside, config, state)
        write_json(aside / RECORD, pruning.to_dict())
    return pruning


def _judged(build: Build, model: ImageClassifier, images: int) -> list[Tensor]:
    """Return the sum over batches of how much each channel counts."""
    packer, total = build.loader.packer, list[Tensor]()
    count = min(images, packer.units[0])
    for begin in range(0, count, IMAGES_EACH):
        rows = [packer.row(0, unit) for unit in range(begin, min(begin + IMAGES_EACH, count))]
        for add in build.loader.beside:
            rows = [add(0, begin + place, row) for place, row in enumerate(rows)]
        pixels = torch.stack(
            [torch.from_numpy(row.numbers[IMAGE][0].copy()) for row in rows if row.numbers]
        )
        labels = torch.tensor([int(row.ids[1]) for row in rows], device=build.device)
        model.zero_grad()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            logits_BV = model.logits_of(pixels.to(build.device))
            (cross_entropy(logits_BV, labels, None, model.vocabulary) / len(rows)).backward()
        scores = importance(model)
        total = [a + b for a, b in zip(total, scores, strict=True)] if total else scores
    return total
