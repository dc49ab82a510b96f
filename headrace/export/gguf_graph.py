"""Say which graph of llama.cpp computes a model, and what it calls the model's numbers.

A GGUF file holds no graph: `general.architecture` names one that llama.cpp has built in, and keys
give its numbers. What such a graph does differently from this model is refused here, by name. The
names of tensors are those of the `gguf` package's own table, which reads transformers' names.

Sources: llama.cpp, `src/models` and `conversion/`; the graphs were compared with Headrace's
models by tests/export/test_gguf.py, in llama.cpp itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headrace.core.errors import UnsupportedError
from headrace.core.model_config import ModelConfig, RopeScaling
from headrace.core.remedy import mend
from headrace.model.hf_config import architecture
from headrace.model.position import LearnedPosition, NoPosition, RotaryPosition, ScaledRope


class Difference(NamedTuple):
    """Hold one thing that a graph of llama.cpp computes otherwise than a model."""

    asks: str
    """what the model has, as "model.window = 64" """
    computes: str
    """what the graph does instead, as the end of a sentence"""
    changes: tuple[str, ...]
    """the words of a plan whose model the graph computes"""


@dataclass(frozen=True)
class Graph:
    """A graph is one architecture of llama.cpp.

    Args:
        name: its name in the file.
        rotates_neighbours: its rotation pairs feature 2i with 2i + 1, where ours pairs i with
            i + K/2, so rows of queries and keys are stored in another order.
        has_factors: it reads a factor for each pair's frequency, as Llama 3.1 needs.
        between: layers with a window between two without; None where no layer has one.
        differs: yields what it does otherwise beside windows and rotations.
    """

    name: str
    rotates_neighbours: bool = False
    has_factors: bool = False
    between: int | None = None
    differs: Callable[[ModelConfig], Iterator[Difference]] = lambda _: iter(())


def _gpt2(config: ModelConfig) -> Iterator[Difference]:
    if config.activation != "gelu_tanh":
        asks = f"model.activation = {config.activation!r}"
        yield Difference(asks, "computes gelu_tanh", ("model.activation=gelu_tanh",))


def _gemma(config: ModelConfig, layers: int) -> Iterator[Difference]:
    """Yield how queries are scaled otherwise; the graph of `layers` layers has dim / heads."""
    square = config.heads * config.resolved_head_dim / config.dim
    scale = square**0.5 if config.layers == layers else 1.0
    if abs(config.query_scale - scale) > 1e-6 * scale:
        asks = f"model.query_scale = {config.query_scale:g}"
        yield Difference(asks, f"has {scale:g}", (f"model.query_scale={scale!r}",))


def _gemma2(config: ModelConfig) -> Iterator[Difference]:
    yield from _gemma(config, 46)
    if not config.tied_embeddings:
        asks = "model.tied_embeddings = false"
        yield Difference(asks, "has no output matrix", ("model.tied_embeddings=true",))
    for key, usual in (("attention_cap", 50.0), ("logit_cap", 30.0)):
        if not getattr(config, key):
            yield Difference(f"model.{key} = 0", "always caps them", (f"model.{key}={usual}",))


def _gemma3(config: ModelConfig) -> Iterator[Difference]:
    yield from _gemma(config, 62)
    for key in ("attention_cap", "logit_cap"):
        if cap := getattr(config, key):
            yield Difference(f"model.{key} = {cap:g}", "has no cap", (f"model.{key}=0",))
    if not config.local_rope_theta and config.rope_scaling.kind != "none":
        scaled = f"model.rope_scaling.kind = {config.rope_scaling.kind!r} in layers with a window"
        change = (f"model.local_rope_theta={config.rope_theta!r}",)
        yield Difference(scaled, "scales the others alone", change)


_BETAS = (32.0, 1.0)
"""YaRN's turns in llama.cpp. Keys of a file for them have no effect in its release b11549."""
_LLAMA = Graph("llama", rotates_neighbours=True, has_factors=True)
GRAPHS: dict[str, Graph] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Phi3ForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Graph("qwen2"),
    "Qwen3ForCausalLM": Graph("qwen3"),
    "Gemma2ForCausalLM": Graph("gemma2", between=1, differs=_gemma2),
    "Gemma3ForCausalLM": Graph("gemma3", between=5, differs=_gemma3),
    "GPT2LMHeadModel": Graph("gpt2", differs=_gpt2),
}
"""The graph that computes what each class of transformers does."""


def graph_of(config: ModelConfig, position: nn.Module) -> Graph:
    """Return the graph of llama.cpp that computes a model.

    Args:
        config: the model, resolved.
        position: its filled `parts.position`, whose rule may be a technique's.

    Raises:
        UnsupportedError: none does; names what the nearest computes instead. Its remedy is a change
            of the plan, where one mends all of it. Or no class of transformers computes it either.
    """
    graph = GRAPHS[architecture(config).name]
    differences = [*_differences(graph, config, position)]
    if not differences:
        return graph
    listed = "; ".join(f"{one.asks}, and it {one.computes}" for one in differences)
    words = (
        [word for one in differences for word in one.changes]
        if all(o.changes for o in differences)
        else []
    )
    raise UnsupportedError(
        f"llama.cpp's graph {graph.name} does not compute this model: {listed}", mend(*words)
    )


def _differences(graph: Graph, config: ModelConfig, position: nn.Module) -> Iterator[Difference]:
    window, between = config.window, config.window_between
    if graph.between is None and window:
        asks = f"model.window = {window}"
        yield Difference(
            asks, "has no window", tuple(f"model.{k}=0" for k in ("window", "window_between"))
        )
    elif graph.between is not None and (not window or between != graph.between):
        asks = f"model.window = {window} and model.window_between = {between}"
        computes = f"has a window in {graph.between} of {graph.between + 1} layers"
        changes = (f"model.window={window or 4096}", f"model.window_between={graph.between}")
        yield Difference(asks, computes, changes)
    rule = rule_of(position)
    if rule is None:
        asks = f"positions by {type(position).__name__}"
        yield Difference(asks, "rotates by fixed frequencies", ())
    elif rule.kind == "llama3" and not graph.has_factors:
        asks = "a rotation scaled by llama3"
        yield Difference(asks, "reads no factors", ("model.rope_scaling.kind=none",))
    elif rule.kind == "yarn" and (rule.beta_fast, rule.beta_slow) != _BETAS:
        asks = f"a rotation scaled by yarn from {rule.beta_fast:g} to {rule.beta_slow:g} turns"
        yield Difference(asks, f"has {_BETAS[0]:g} and {_BETAS[1]:g}", ())
    yield from graph.differs(config)


def rule_of(position: nn.Module) -> RopeScaling | None:
    """Return how a model's rotations are slowed down; None where it is none of these rules."""
    if type(position) is ScaledRope:
        return position.rule
    plain = (NoPosition, LearnedPosition, RotaryPosition)
    return RopeScaling() if type(position) in plain else None


def numbers(
    graph: Graph, config: ModelConfig, position: nn.Module, *, context: int
) -> dict[str, int | float | str]:
    """Return the keys of a file that give a graph its numbers, without the graph's name.

    Args:
        graph: from `graph_of`, which has no difference.
        config: the model.
        position: its filled `parts.position`.
        context: the longest row, in tokens.
    """
    values: dict[str, int | float | str] = {
        "context_length": config.context or context,
        "embedding_length": config.dim,
        "block_count": config.layers,
        "feed_forward_length": config.resolved_ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.resolved_kv_heads,
    }
    norm = "layer_norm_epsilon" if config.norm == "layer_norm" else "layer_norm_rms_epsilon"
    values[f"attention.{norm}"] = config.norm_eps
    if config.position == "learned":
        return values
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        values[key] = config.resolved_head_dim
    values["rope.freq_base"] = config.rope_theta
    if graph.between is not None:
        values["attention.sliding_window"] = config.window
        values["rope.freq_base_swa"] = config.local_rope_theta or config.rope_theta
    if graph.name == "gemma2":
        values["attn_logit_softcapping"] = config.attention_cap
        values["final_logit_softcapping"] = config.logit_cap
    return values | _scaling(position)


def _scaling(position: nn.Module) -> dict[str, int | float | str]:
    """Return the keys of a rotation that is slowed down."""
    rule = rule_of(position)
    if not isinstance(position, ScaledRope) or rule is None or rule.kind == "llama3":
        return {}
    if rule.kind == "ntk":
        return {"rope.freq_base": position.stretched_theta}
    scaling: dict[str, int | float | str] = {
        "rope.scaling.type": rule.kind,
        "rope.scaling.factor": rule.factor,
    }
    if rule.kind == "yarn":
        scaling["rope.scaling.original_context_length"] = position.original
    return scaling


def frequency_divisors(position: nn.Module) -> Tensor | None:
    """Return what llama.cpp divides each pair's frequency by, fp32 [K/2], or None for nothing."""
    rule = rule_of(position)
    if not isinstance(position, ScaledRope) or rule is None or rule.kind != "llama3":
        return None
    device = torch.device("cpu")
    plain = RotaryPosition.frequencies(position, device)
    return plain / position.frequencies(device)


def as_neighbours(rows: Tensor, heads: int) -> Tensor:
    """Return rows of queries or keys so that features i and i + K/2 of a head are neighbours.

    Args:
        rows: a weight [H x K, ...] or a bias [H x K].
        heads: H.
    """
    halves = rows.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)
