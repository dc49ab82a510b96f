"""Take whole state dicts through the maps that export and loading use, a tensor at a time."""

from collections.abc import Mapping

from torch import Tensor

from headrace.core.model_config import ModelConfig
from headrace.model.adapter import check_ours, from_hf
from headrace.model.hf_config import architecture


def to_theirs(
    config: ModelConfig, tensors: Mapping[str, Tensor], kind: str = ""
) -> dict[str, Tensor]:
    """Return our state dict, or gradients, as Hugging Face's; tied embeddings stand once."""
    found: dict[str, Tensor] = {}
    for link in check_ours(config, tensors, architecture(config, kind)):
        found |= link.to_theirs(tensors[link.ours])
    return found


def to_ours(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return their state dict as ours."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    makers = from_hf(config, shapes, tensors.__getitem__)
    return {name: make() for name, make in makers.items()}
