"""The `source` socket: initial values as a pure function of (seed, name, full shape).

Because a value depends on nothing else, every layout (any number of ranks, any split) starts from
the same weights without communication, and a resumed or re-run plan starts where it started.
Scheme: normal(0, 0.02) with the projections that write to the residual divided by sqrt(2 x layers)
(GPT-2), or zero (muP's and modded-nanogpt's practice).
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.core.model_config import ModelConfig

Source = Callable[[str, torch.Size], Tensor]
"""(parameter's name, its full shape) -> fp32 tensor on the host."""

RESIDUAL_WRITERS = (".mixer.out.weight", ".mlp.down.weight", ".mlp.down")


def random_source(config: ModelConfig, seed: int) -> Source:
    """The trunk's source."""

    def source(name: str, shape: torch.Size) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith((".bias", ".lora_b")):
            return torch.zeros(shape)
        std = config.init_std
        if name.endswith(RESIDUAL_WRITERS):
            if config.output_init == "zero":
                return torch.zeros(shape)
            if config.output_init == "depth_scaled":
                std /= (2 * config.layers) ** 0.5
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if name.endswith(".lora_a"):  # kaiming, as the adapters' authors start it
            bound = shape[1] ** -0.5
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    return source


def adding(stored: Source, fresh: Source) -> Source:
    """`stored`, with adapters, which no stored model has, from `fresh`."""

    def source(name: str, shape: torch.Size) -> Tensor:
        return (fresh if name.endswith((".lora_a", ".lora_b")) else stored)(name, shape)

    return source
