"""A teacher of images: a frozen network that says how likely it finds each class.

It sees each micro-batch before the step, and its logits lie beside the images for the term that
`distillation` adds. It computes with its running statistics, in the run's arithmetic.

Shapes: B images, V classes.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from headrace.assemble.sockets import Build, MicroBatch
from headrace.assemble.teacher import Teaching
from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.model.vision import IMAGE, ImageClassifier, load_images_state
from headrace.model.vision_folder import read_images_folder


class ImagesTeaching(Teaching):
    """The teacher of a run of images, and what was learned from it in the newest step.

    Its logits are made before the step: the matrix that would make them is the identity.
    """

    def __init__(self, build: Build, network: ImageClassifier) -> None:
        super().__init__(build.device)
        self.network = network
        self.head_VD = torch.eye(network.vision.classes, device=build.device)

    @torch.no_grad()
    def enrich(self, build: Build, works: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the teacher's logits."""
        works = super().enrich(build, works)
        build.phases.mark("forward")
        return [
            work._replace(extras={**(work.extras or {}), "teacher": self._logits(build, work)})
            for work in works
        ]

    def _logits(self, build: Build, work: MicroBatch) -> Tensor:
        """Return the teacher's logits [B, V], fp32."""
        assert work.extras is not None
        with build.autocast():
            return self.network.logits_of(work.extras[IMAGE])


def make_images_teaching(build: Build, folder: Path, key: str) -> ImagesTeaching:
    """Return the frozen teacher on the run's device.

    Args:
        build: the run.
        folder: of the teacher.
        key: the plan's key that names it.

    Raises:
        ConfigError: the folder is none, or the teacher tells other classes, or images of another
            size, apart.
    """
    vision = build.plan.vision
    assert vision is not None
    config, state = read_images_folder(folder, key)
    for name in ("classes", "size"):
        there, here = getattr(config, name), getattr(vision, name)
        if there != here:
            raise ConfigError(
                f"the teacher {folder} has {name} = {there}, and vision.{name} = {here}",
                mend(f"vision.{name}={there}"),
            )
    network = ImageClassifier(config)
    load_images_state(network, state)
    frozen: nn.Module = network.requires_grad_(False).eval().to(build.device)
    assert isinstance(frozen, ImageClassifier)
    return ImagesTeaching(build, frozen)
