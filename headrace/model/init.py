"""Fill the `source` socket: initial values are a pure function of (seed, name, full shape).

Because a value depends on nothing else, every layout (any number of ranks, any split) starts from
the same weights without communication, and a resumed or re-run plan starts where it started.
Scheme: normal(0, 0.02) with the projections that write to the residual divided by sqrt(2 x layers)
(GPT-2), or zero (muP's and modded-nanogpt's practice). The matrices of blocks may be drawn by He's
rule or be orthonormal instead, and the output matrix may be zero. A fused matrix is drawn as the
projections that it holds, one by one: each of them is orthonormal, and not only their stack.

A QR decomposition adds up in an order that a library chooses. So it is computed in fp64 and rounded
once to fp32, and on one thread: two hosts would have to differ by half of fp32's last place.

One thread draws about 10^8 numbers a second, which a model of 10^9 weights would wait for. So a
large tensor is drawn in pieces of one size by as many threads as there are cores, each piece from a
generator of its own: the number of threads changes no value.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from headrace.core.model_config import ModelConfig
from headrace.costs.adapters import ADAPTERS
from headrace.model.from_embedding import RESIDUAL_FACTORS, VALUE_FACTORS
from headrace.model.fusion import fusions

Source = Callable[[str, torch.Size], Tensor]
"""(parameter's name, its full shape) -> fp32 tensor on the host."""

PIECE_NUMBERS = 1 << 18
"""that one generator draws, about 3 ms: a matrix of 2,048 by 2,048 is work for 16 threads"""
RESIDUAL_WRITERS = (".mixer.out.weight", ".mlp.down.weight", ".mlp.down")
EXPERTS = (".mlp.gate_up", ".mlp.up", ".mlp.down")
"""Ends of names of matrices that experts stack, [experts, out, in]."""
BEFORE = ("pairs.embed.weight", "smear.weight")
"""Names of what reads the token before, which starts as zeros."""
FACTORS = {".stream.weight": RESIDUAL_FACTORS, ".mixer.value.weight": VALUE_FACTORS}
"""End of a name -> the learned factors that a block starts with."""


def random_source(config: ModelConfig, seed: int) -> Source:
    """Return the baseline's source of initial values."""

    def source(name: str, shape: torch.Size) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith((".bias", ".lora_b")) or name in BEFORE:
            return torch.zeros(shape)
        for end, factors in FACTORS.items():
            if name.endswith(end):
                return torch.tensor(factors)
        if name == "head.weight" and config.head_init == "zero":
            return torch.zeros(shape)
        divisor = 1.0
        if name.endswith(RESIDUAL_WRITERS):
            if config.output_init == "zero":
                return torch.zeros(shape)
            if config.output_init == "depth_scaled":
                divisor = (2 * config.layers) ** 0.5
        if name.endswith(".lora_a"):  # kaiming, as the adapters' authors start it
            bound = shape[1] ** -0.5
            return drawn(seed, name, shape, lambda x, g: x.uniform_(-bound, bound, generator=g))
        std = config.init_std
        if is_drawn_as_matrix(name, shape):
            if config.matrix_init == "orthogonal":
                return orthonormal(config, seed, name, shape) / divisor
            if config.matrix_init == "he":
                std = (2 / shape[-1]) ** 0.5
        std /= divisor
        return drawn(seed, name, shape, lambda x, g: x.normal_(0.0, std, generator=g))

    return source


def is_drawn_as_matrix(name: str, shape: torch.Size) -> bool:
    """Return whether `model.matrix_init` says how a parameter starts."""
    return name.startswith("blocks.") and (len(shape) == 2 or name.endswith(EXPERTS))


def orthonormal(config: ModelConfig, seed: int, name: str, shape: torch.Size) -> Tensor:
    """Return projections whose rows, or columns where these are fewer, are orthonormal.

    Args:
        config: the decoder, which says what a fused matrix holds.
        seed: the run's seed.
        name: the parameter's name.
        shape: its full shape; leading dimensions before the last two are experts.
    """
    normal = drawn(seed, name, shape, lambda x, g: x.normal_(generator=g))
    if len(shape) > 2:
        return torch.stack([_orthonormal(expert) for expert in normal])
    end = name.removesuffix(".weight").split(".", 2)[2]
    fusion = fusions(config).get(end)
    if fusion is None or shape[0] != fusion.groups * sum(fusion.split):
        return _orthonormal(normal)
    return fusion.fuse(tuple(map(_orthonormal, fusion.pieces(normal))))


def _orthonormal(normal: Tensor) -> Tensor:
    """Return the orthogonal factor of a QR decomposition, drawn evenly (arXiv math-ph/0609050)."""
    tall = normal.double() if normal.size(0) >= normal.size(1) else normal.double().t()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        q, r = torch.linalg.qr(tall)
    finally:
        torch.set_num_threads(threads)
    q = q * r.diagonal().sign()
    return (q if normal.size(0) >= normal.size(1) else q.t()).float().contiguous()


def drawn(
    seed: int, name: str, shape: torch.Size, draw: Callable[[Tensor, torch.Generator], Tensor]
) -> Tensor:
    """Return a tensor that `draw` fills piece by piece, as (seed, name) decide."""
    value = torch.empty(shape)
    pieces = list(value.view(-1).split(PIECE_NUMBERS))

    def fill(place: int) -> None:
        key = f"{seed}:{name}" + (f":{place}" if place else "")
        digest = hashlib.sha256(key.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        draw(pieces[place], generator)

    if len(pieces) == 1:
        fill(0)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(fill, range(len(pieces))))
    return value


def adding(stored: Source, fresh: Source) -> Source:
    """Return `stored` with adapters, which no stored model has, from `fresh`."""

    def source(name: str, shape: torch.Size) -> Tensor:
        return (fresh if name.endswith(ADAPTERS) else stored)(name, shape)

    return source
