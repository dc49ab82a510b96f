"""Make a run of images out of the sockets that a run of text has.

A row is one token, the label; its image lies beside it as a teacher's words would. The network
stands where the decoder does. Batch normalisation adds two things: its running statistics are kept
in checkpoints like a technique's state, and an evaluation computes with them, as it computes with
averaged weights. The share of images told rightly is measured beside the loss.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.assemble.mesh_sizes import ranks_of
from headrace.assemble.sockets import Build
from headrace.core.vision_config import VisionConfig
from headrace.costs.ledger import Ledger
from headrace.costs.vision import image_ledger
from headrace.data.images import Images, OfRow
from headrace.data.rows import Row
from headrace.model.init import Source
from headrace.model.vision import (
    ImageClassifier,
    norm_statistics,
    random_images_source,
)
from headrace.model.vision_folder import read_images_folder
from headrace.plan.plan import Plan
from headrace.plan.technique import Context

STATISTICS = "batch_norm"
"""Name under which checkpoints keep the running statistics."""
ACCURACY = "accuracy"
"""Name of the share of images told rightly, beside a validation's loss."""


def predict_images(plan: Plan, context: Context) -> Ledger:
    """Return the ledger of a plan for images, before its techniques' edits."""
    assert plan.vision is not None
    ledger = image_ledger(
        plan.vision,
        rows=plan.micro_rows,
        precision=context.precision,
        device=context.device,
        accumulates=plan.micro_rows < plan.rows_per_step,
    )
    sizes = ranks_of(plan.mesh) | {
        "pipeline_rank": 0.0,
        "micro_batches": plan.rows_per_step / plan.micro_rows,
        "other_loss": float(any("terms" in t.composes for t in plan.techniques.values())),
        "other_objective": 0.0,
    }
    return Ledger(ledger.memory, ledger.flops, {**ledger.sizes, **sizes}, matrices=ledger.matrices)


def images_source(build: Build, config: VisionConfig) -> Source:
    """Return the initial values of a network: drawn, or those of `vision.pretrained`.

    Raises:
        ConfigError: the folder is none, or holds another network.
    """
    if not config.pretrained:
        return random_images_source(build.plan.seed)
    _, state = read_images_folder(Path(config.pretrained), "vision.pretrained", like=config)

    def source(name: str, shape: torch.Size) -> Tensor:
        return state[name]

    return source


class NormStatistics:
    """The running means and variances of all normalisations, as a checkpoint keeps them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def tensors(self) -> dict[str, Tensor]:
        """Return the statistics by torchvision's names, which a resume fills in place."""
        return norm_statistics(self._model)

    def values(self) -> dict[str, Any]:
        """Return nothing: there are tensors alone."""
        return {}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Do nothing."""


@contextmanager
def evaluating(build: Build) -> Iterator[None]:
    """Let normalisations compute with their running statistics while it lasts."""
    build.model.eval()
    try:
        yield
    finally:
        build.model.train()


def begin_images(build: Build) -> None:
    """Make the statistics real, and fill the sockets that a network of images needs."""
    model: Any = build.model
    config = build.plan.vision
    assert isinstance(model, ImageClassifier) and config is not None
    given: Mapping[str, Tensor] = {}
    if config.pretrained:
        folder = Path(config.pretrained)
        _, given = read_images_folder(folder, "vision.pretrained", like=config)
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            mean, variance = (f"{name}.{key}" for key in ("running_mean", "running_var"))
            shape = (module.num_features,)
            whole = given.get(mean, torch.zeros(shape)), given.get(variance, torch.ones(shape))
            module.running_mean, module.running_var = (one.to(build.device) for one in whole)
            module.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=build.device)
    build.state[STATISTICS] = NormStatistics(model)
    build.weights_for_eval.append(evaluating)
    build.evaluates.append(_accuracy)


def _accuracy(build: Build, tokens: int | None) -> dict[str, float]:
    """Return the share of the evaluated images that were told rightly."""
    model: Any = build.model
    return {ACCURACY: model.take_accuracy()}


def add_images(build: Build) -> None:
    """Let the loader add its image to each row."""
    (shards,) = build.prepared.train
    build.loader.beside.append(Images(shards).beside)


def images_of_validation(build: Build) -> OfRow:
    """Return what adds its image to each row of an evaluation; of a text it adds nothing."""
    if build.plan.vision is None:
        return _as_it_is
    kept = build.notes.setdefault("validation images", [])
    if not kept:
        kept.append(Images(build.prepared.validation))
    return kept[0].of_row


def _as_it_is(number: int | None, row: Row) -> Row:
    return row
