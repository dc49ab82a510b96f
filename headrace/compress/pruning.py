"""Make a model smaller by leaving out heads, hidden features and layers: config and weights shrink.

What is left out is what text needs least. Each hidden feature of an MLP and each group of heads
(the queries of one key-value head) gets a factor of 1, and the mean over rows of text of the
squared gradient of the loss by this factor is its importance: the first-order change of the loss
without it (arXiv 1906.10771; LLM-Pruner, arXiv 2305.11627). A layer's is the rise of the loss
without it, which is measured. Layers keep equal widths, since one config describes all.

There are many shapes of one size, as fewer layers or narrower ones. Each is cut and its loss is
measured on the same text before any training, and the best is taken (Minitron's first search, arXiv
2407.14679, section 4). A pruned model has lost much: training on, best on the words of the model
that it was cut from, recovers it.

Shapes: B rows, T tokens, L layers, G groups of heads, F hidden features, D features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.core.errors import UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.core.progress import OnProgress
from headrace.costs.count import total_parameters
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.fusion import fusions
from headrace.model.mask import Rows, mask_of

FINE, COARSE, WIDE = 8, 64, 1024
"""Hidden features come in multiples of `FINE`, and of `COARSE` where there are `WIDE` or more."""
LEAST = 0.25
"""Least share of the hidden features that is left; of layers and of groups of heads it is half."""
NEAR = 0.95
"""Least size of a shape, as a share of what is asked for; the largest, where none is near."""


class PrunedShape(NamedTuple):
    """Hold how much of a model is left."""

    layers: int
    groups: int
    """Key-value heads, each with its queries."""
    channels: int
    """Hidden features of the MLP."""


@dataclass(frozen=True)
class Importance:
    """Hold how much text needs each part of a model; higher is more.

    Args:
        layers: the rise of the loss without each layer, in nats a token.
        groups_LG: of groups of heads.
        channels_LF: of hidden features.
    """

    layers: tuple[float, ...]
    groups_LG: Tensor
    channels_LF: Tensor


@dataclass(frozen=True)
class Kept:
    """Hold what is left of a model, in its own order.

    Args:
        layers: numbers of the layers.
        groups: numbers of the groups of heads, of each of these layers.
        channels: numbers of the hidden features, of each of these layers.
    """

    layers: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    channels: tuple[tuple[int, ...], ...]


def shape_of(config: ModelConfig) -> PrunedShape:
    """Return the whole shape of a model."""
    return PrunedShape(config.layers, config.resolved_kv_heads, config.resolved_ffn)


def config_of(config: ModelConfig, shape: PrunedShape) -> ModelConfig:
    """Return the config of a model that is cut to a shape."""
    queries = config.heads // config.resolved_kv_heads
    sizes = {
        "layers": shape.layers,
        "heads": shape.groups * queries,
        "kv_heads": shape.groups,
        "head_dim": config.resolved_head_dim,
        "ffn": shape.channels,
    }
    return ModelConfig.model_validate({**config.model_dump(), **sizes})


def shapes_within(
    config: ModelConfig, share: float, axes: Sequence[str], multiple: int = 1
) -> list[PrunedShape]:
    """Return the shapes of a model that is smaller by a share of its weights, the widest last.

    Args:
        config: the whole model.
        share: of all its weights, embeddings included, that is left out.
        axes: what may be left out: "layers", "heads", "channels".
        multiple: what the count of hidden features that are left is a multiple of.

    Raises:
        UnsupportedError: no shape is so small; names the most that can be left out.
    """
    whole, size = shape_of(config), total_parameters(config)
    most = size * (1 - share)
    layers, groups, channels = (
        _choices(whole.layers, 1, 0.5, "layers" in axes),
        _choices(whole.groups, 1, 0.5, "heads" in axes),
        _choices(
            whole.channels, lcm(multiple, _multiple(whole.channels)), LEAST, "channels" in axes
        ),
    )
    within: dict[PrunedShape, int] = {}
    smallest = size
    for count in layers:
        for group in groups:
            shapes = {
                shape: total_parameters(config_of(config, shape))
                for shape in (PrunedShape(count, group, wide) for wide in channels)
            }
            smallest = min(smallest, *shapes.values())
            fit = [shape for shape, numbers in shapes.items() if numbers <= most]
            within |= {shape: shapes[shape] for shape in fit[-1:]}
    if within:
        least = min(NEAR * most, max(within.values()))
        return [shape for shape, numbers in within.items() if numbers >= least]
    left_out = 100 * (1 - smallest / size)
    raise UnsupportedError(
        f"no shape leaves out {share:.1%} of the weights by {', '.join(axes)}: half of the layers "
        f"and of the heads and {1 - LEAST:.0%} of the hidden features are {left_out:.1f}%",
        f"--by {int(left_out)}%",
    )


def _choices(whole: int, multiple: int, least: float, is_free: bool) -> list[int]:
    """Return the counts that may be left of `whole`, rising."""
    if not is_free:
        return [whole]
    first = -(-max(1, int(whole * least)) // multiple) * multiple
    return [*range(first, whole, multiple), whole]


def _multiple(channels: int) -> int:
    return COARSE if channels >= WIDE else FINE


def importance_of(
    model: Decoder,
    ids_BT: Tensor,
    progress: OnProgress = lambda description, done, total: None,
) -> Importance:
    """Return how much text needs each part of a model, which stays as it is.

    Args:
        model: with its weights.
        ids_BT: the text.
        progress: takes how far it is.
    """
    config, total = model.config, len(ids_BT)
    whole = shape_of(config)
    groups_LG = torch.zeros(whole.layers, whole.groups, device=ids_BT.device)
    channels_LF = torch.zeros(whole.layers, whole.channels, device=ids_BT.device)
    for done, ids_T in enumerate(ids_BT):
        progress("measuring what text needs", done, total)
        with _factors(model) as (heads, channels), torch.enable_grad():
            _loss(model, ids_T[None]).backward(inputs=[*heads, *channels])
        for layer, (head, channel) in enumerate(zip(heads, channels, strict=True)):
            assert head.grad is not None and channel.grad is not None
            # All features of a group leave together: their first-order changes add up.
            groups_LG[layer] += head.grad.unflatten(0, (whole.groups, -1)).sum(-1).square()
            channels_LF[layer] += channel.grad.square()
    least = loss_on(model, ids_BT)
    rises = []
    for layer in range(config.layers):
        progress("measuring layers", layer, config.layers)
        with _without(model, layer):
            rises.append(loss_on(model, ids_BT) - least)
    return Importance(tuple(rises), groups_LG / total, channels_LF / total)


@contextmanager
def _factors(model: Decoder) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Multiply what the last linears of mixers and MLPs read by factors of 1, which it yields."""
    device = model.embed.weight.device
    every: tuple[list[Tensor], list[Tensor]] = ([], [])
    hooks = []

    def times(factor: Tensor) -> Callable[[Any, Any], Any]:
        return lambda module, given: (given[0] * factor, *given[1:])

    for block in model.blocks.values():
        linears: Any = (block.get_submodule("mixer.out"), block.get_submodule("mlp.down"))
        for linear, factors in zip(linears, every, strict=True):
            factor = torch.ones(linear.in_features, device=device, requires_grad=True)
            factors.append(factor)
            hooks.append(linear.register_forward_pre_hook(times(factor)))
    try:
        yield every
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _without(model: Decoder, layer: int) -> Iterator[None]:
    """Let a model compute without a layer."""
    block: Any = model.blocks[str(layer)]
    own = block.__dict__.get("forward")
    block.forward = lambda x_BTD, shared: x_BTD
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


def _loss(model: Decoder, ids_BT: Tensor) -> Tensor:
    """Return the mean loss of rows in nats a token; each row is a document of its own."""
    positions = torch.arange(ids_BT.size(1), device=ids_BT.device)[None]
    logits_BTV = model.logits(ids_BT, Rows(positions, None, None))
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


@torch.no_grad()
def loss_on(model: Decoder, ids_BT: Tensor) -> float:
    """Return the mean loss of rows of text, in nats a token."""
    return sum(float(_loss(model, ids_T[None])) for ids_T in ids_BT) / len(ids_BT)


def kept_of(importance: Importance, shape: PrunedShape) -> Kept:
    """Return the most important parts of a model, as many as a shape has."""
    ranked = sorted(range(len(importance.layers)), key=lambda n: -importance.layers[n])
    layers = tuple(sorted(ranked[: shape.layers]))

    def best(scores_N: Tensor, count: int) -> tuple[int, ...]:
        return tuple(sorted(scores_N.topk(count).indices.tolist()))

    return Kept(
        layers,
        tuple(best(importance.groups_LG[layer], shape.groups) for layer in layers),
        tuple(best(importance.channels_LF[layer], shape.channels) for layer in layers),
    )


def cut(state: Mapping[str, Tensor], config: ModelConfig, kept: Kept) -> dict[str, Tensor]:
    """Return the weights of what is left of a model, by the names of the smaller one.

    Args:
        state: every parameter of the whole model, by name.
        config: of the whole model.
        kept: what is left.
    """
    small = config_of(
        config, PrunedShape(len(kept.layers), len(kept.groups[0]), len(kept.channels[0]))
    )
    new_layer = {layer: number for number, layer in enumerate(kept.layers)}
    made: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith("blocks."):
            made[name] = value
            continue
        _, layer, rest = name.split(".", 2)
        if (number := new_layer.get(int(layer))) is not None:
            part = _cut_one(rest, value, config, small, kept.groups[number], kept.channels[number])
            made[f"blocks.{number}.{rest}"] = part
    return made


def _cut_one(
    rest: str,
    value: Tensor,
    config: ModelConfig,
    small: ModelConfig,
    groups: tuple[int, ...],
    channels: tuple[int, ...],
) -> Tensor:
    """Return what is left of a parameter of a layer, called `rest` there."""
    linear = rest.rpartition(".")[0]
    before, after = fusions(config), fusions(small)
    many = config.resolved_kv_heads
    if linear == "mixer.qkv":
        pieces = [piece.unflatten(0, (many, -1)) for piece in before[linear].pieces(value)]
        return after[linear].fuse(tuple(p[list(groups)].flatten(0, 1) for p in pieces))
    if rest == "mixer.out.weight":
        return value.unflatten(1, (many, -1))[:, list(groups)].flatten(1)
    if linear == "mlp.gate_up":
        pieces = before[linear].pieces(value)
        return after[linear].fuse(tuple(piece[list(channels)] for piece in pieces))
    if linear == "mlp.up":
        return value[list(channels)]
    if rest == "mlp.down.weight":
        return value[:, list(channels)]
    return value


def smaller(state: Mapping[str, Tensor], config: ModelConfig, device: torch.device) -> Decoder:
    """Return a plain decoder of these weights."""
    with torch.device("meta"):
        model = Decoder(config, baseline_parts(config), mask_of(config))
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    return model


class Tried(NamedTuple):
    """Hold a shape that was cut, and its loss before any training."""

    shape: PrunedShape
    parameters: int
    loss_nats: float


def try_shapes(
    model: Decoder,
    shapes: Sequence[PrunedShape],
    importance: Importance,
    ids_BT: Tensor,
    progress: OnProgress = lambda description, done, total: None,
) -> list[Tried]:
    """Return the loss of each shape on text, the lowest first.

    Args:
        model: the whole model.
        shapes: what to try.
        importance: of its parts.
        ids_BT: the text.
        progress: takes how far it is.
    """
    state, config = model.state_dict(), model.config
    tried = []
    for done, shape in enumerate(shapes):
        progress("trying shapes", done, len(shapes))
        small = config_of(config, shape)
        made = smaller(cut(state, config, kept_of(importance, shape)), small, ids_BT.device)
        tried.append(Tried(shape, total_parameters(small), loss_on(made, ids_BT)))
    return sorted(tried, key=lambda one: one.loss_nats)
