"""Make RMSNorm of layer norm in given weights, so that the model computes nearly what it did.

Layer norm is RMSNorm of features whose mean is subtracted. Whatever writes to the residual stream
can have that mean subtracted once, in its weights: then the stream has no mean, and dividing by the
root mean square is the same. The bias of a norm goes into the biases of the linears that read it
(arXiv 2305.14858). Two things are left, which training has to recover: the bias of the last norm,
since the output matrix has none; and with tied embeddings the mean of the embedding's rows, since
subtracting it would change the output matrix.

Shapes: R rows of a matrix, D features of the stream.
"""

import torch
from torch import Tensor

from headrace.core.model_config import ModelConfig
from headrace.model.init import Source

READ_BY = {"mixer_norm": ("mixer.qkv",), "mlp_norm": ("mlp.up",)}
"""Norm of a block -> the linears that read what it gives."""
WRITES = ("mixer.out", "mlp.down")
"""Linears of a block that write to the residual stream."""


def is_converted(model: ModelConfig, stored: ModelConfig) -> bool:
    """Return whether a plan asks for RMSNorm and the weights that it starts from have layer norm.

    Args:
        model: the plan's; a key that the plan does not give is that of the weights.
        stored: the weights' own.
    """
    asked = "norm" in model.model_fields_set and model.norm == "rms_norm"
    return asked and stored.norm == "layer_norm" and stored.bias


def as_asked(model: ModelConfig, stored: ModelConfig) -> ModelConfig:
    """Return the config of given weights as a plan starts from them: converted where it asks so."""
    return stored.model_copy(update={"norm": "rms_norm"}) if is_converted(model, stored) else stored


def as_rms_norm(config: ModelConfig, source: Source) -> Source:
    """Return a source of weights for RMSNorm, made of one for layer norm.

    Args:
        config: the model of `source`, whose linears have biases.
        source: its weights by name and shape.
    """

    def converted(name: str, shape: torch.Size) -> Tensor:
        value = source(name, shape)
        module, _, leaf = name.rpartition(".")
        if module == "position" or (module == "embed" and not config.tied_embeddings):
            return value - value.mean(-1, keepdim=True)
        if module.endswith(WRITES):
            return value - value.mean(0, keepdim=True)
        for norm, readers in READ_BY.items():
            if leaf == "bias" and module.endswith(readers):
                block = ".".join(module.split(".")[:2])
                weight_RD = source(f"{module}.weight", torch.Size([len(value), config.dim]))
                return value + weight_RD @ source(f"{block}.{norm}.bias", torch.Size([config.dim]))
        return value

    return converted
