"""Read the folder of a network of images: `config.json` and `model.safetensors`.

The tensors have torchvision's names and shapes, so that `torchvision.models.mobilenet_v3_small`
(or `efficientnet_b0`) with as many classes loads them by `load_state_dict(..., strict=False)`, in
which only counters of batches are missing. A pruned network has fewer channels, and no such model
there.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.core.files import parse_object
from headrace.core.folders import refuse_absent
from headrace.core.remedy import mend
from headrace.core.vision_config import VisionConfig
from headrace.model.vision import ImageClassifier, norm_statistics

KIND = "headrace_vision"
"""The `model_type` of config.json."""
SHAPES = ("architecture", "classes", "size", "stem_stride", "channels")
"""Keys of the table `vision` that say what network it is."""
WEIGHTS = "model.safetensors"


def images_state(model: ImageClassifier) -> dict[str, Tensor]:
    """Return the weights and running statistics of a network, on the host, fp32."""
    own = {**dict(model.named_parameters()), **norm_statistics(model)}
    return {name: one.detach().float().cpu().contiguous() for name, one in own.items()}


def read_images_folder(
    folder: Path, key: str, like: VisionConfig | None = None
) -> tuple[VisionConfig, dict[str, Tensor]]:
    """Return the network that a folder holds: its config, and its tensors by name.

    Args:
        folder: of the network.
        key: the plan's key that names it.
        like: the table `vision` that it must fit; None where any network will do.

    Raises:
        ConfigError: there is no such folder, it is damaged, or it holds another network.
    """
    refuse_absent(folder, key)
    try:
        facts: dict[str, Any] = parse_object((folder / "config.json").read_bytes())
        if facts.get("model_type") != KIND:
            raise ValueError(f"its model_type is {facts.get('model_type')!r}, not {KIND!r}")
        config = VisionConfig(**{name: facts[name] for name in SHAPES})
        state = load_file(folder / WEIGHTS)
        _check_shapes(config, state)
    except (OSError, ValueError, KeyError, ValidationError, SafetensorError) as error:
        raise ConfigError(
            f"{key} = {str(folder)!r} holds no network of images: {str(error).splitlines()[0]}",
            f"{key}=FOLDER that `headrace export RUN --to torchvision` wrote",
        ) from None
    if like is not None:
        _check_same(folder, key, config, like)
    return config, state


def _check_shapes(config: VisionConfig, state: dict[str, Tensor]) -> None:
    """Raise ValueError where tensors are missing, or have other shapes than the config says."""
    import torch

    with torch.device("meta"):
        model = ImageClassifier(config)
    wanted = {n: tuple(p.shape) for n, p in model.named_parameters()}
    wanted |= {n: tuple(b.shape) for n, b in norm_statistics(model).items()}
    for name, shape in wanted.items():
        stored = tuple(state[name].shape) if name in state else None
        if stored != shape:
            raise ValueError(f"{name} is {stored}, and by its config.json {shape}")


def _check_same(folder: Path, key: str, config: VisionConfig, like: VisionConfig) -> None:
    """Refuse weights of another network than the plan's.

    Raises:
        ConfigError: names the first key that differs, with the changes that make it fit.
    """
    pairs = {name: (getattr(config, name), getattr(like, name)) for name in SHAPES}
    if pairs["channels"][0] == like.resolved_channels or config.resolved_channels == like.channels:
        del pairs["channels"]
    other = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if other:
        name, (there, here) = next(iter(other.items()))
        words = [
            f"vision.{one}={json.dumps(list(v) if isinstance(v, tuple) else v)}".replace(" ", "")
            for one, (v, _) in other.items()
        ]
        raise ConfigError(
            f"{key} = {str(folder)!r} has {name} = {there!r}, and the plan says {here!r}",
            mend(*words),
        )
