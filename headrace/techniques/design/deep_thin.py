"""Make the model deeper and thinner at equal parameters.

Below a billion parameters, depth is worth more than width at equal parameters: MobileLLM's models
of 125M and 350M have 30 and 32 layers (arXiv 2402.14905). `ratio` multiplies the layers of a base;
features, heads and hidden features shrink until the blocks have as many parameters as before,
within 2%. The base is the family's own model, or what the knobs say: its keys are rewritten, so a
plan names the base here and not in its table `model`.

The heads keep their size, and are dropped one by one, with their keys. Of all counts of heads that
leave room for an MLP the one is taken whose hidden features are the most like the base's in
proportion. The tables of the vocabulary shrink with the features, and are not counted: their size
is the tokenizer's. It rewrites `model.head_dim`, `dim`, `heads`, `kv_heads`, `layers` and `ffn` of
the same table, and tells in its evidence what it chose. Source: arXiv 2402.14905, section 2.2.
"""

from collections.abc import Mapping
from math import log, prod
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.count import block_linears
from headrace.model.zoo import families
from headrace.plan.technique import Card, Context, Evidence, Supported, Unsupported

TOLERANCE = 0.02
"""Largest relative change of the blocks' parameters."""
MULTIPLES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Hidden features are a multiple of the first of these that keeps the parameters."""


class BlockShape(NamedTuple):
    """A shape holds the sizes of a decoder's blocks."""

    head_dim: int
    dim: int
    heads: int
    kv_heads: int
    layers: int
    ffn: int

    @staticmethod
    def of(config: ModelConfig) -> "BlockShape":
        """Return the sizes of a config."""
        width, kv, ffn = config.resolved_head_dim, config.resolved_kv_heads, config.resolved_ffn
        return BlockShape(width, config.dim, config.heads, kv, config.layers, ffn)

    def parameters(self, like: ModelConfig) -> int:
        """Return the weights of all blocks' matrices, of attention and MLP as `like` has them."""
        config = like.model_copy(update=self._asdict())
        return self.layers * sum(i * o for i, o in block_linears(config).values())


class DeepThin(Keyed):
    """Make the model deeper and thinner at equal parameters."""

    ratio: float = Field(default=2.0, gt=1, lt=64)
    """Layers over the base's; tuner range 1.5 to 4."""
    base_dim: int | None = Field(default=None, ge=1, le=1 << 16)
    """Features of the base; without it the family's."""
    base_layers: int | None = Field(default=None, ge=1, le=1_000)
    """Layers of the base; without it the family's."""
    base_heads: int | None = Field(default=None, ge=2, le=100_000)
    """Query heads of the base; without it the family's."""
    base_kv_heads: int | None = Field(default=None, ge=1, le=100_000)
    """Key and value heads of the base; without it the family's, or as many as `base_heads`."""
    base_ffn: int | None = Field(default=None, ge=1, le=1 << 24)
    """Hidden features of the base; without it the family's."""

    claims: ClassVar[tuple[str, ...]] = (
        "config.head_dim",
        "config.dim",
        "config.heads",
        "config.kv_heads",
        "config.layers",
        "config.ffn",
    )
    settled: ClassVar[tuple[str, ...]] = (
        "base_dim",
        "base_layers",
        "base_heads",
        "base_kv_heads",
        "base_ffn",
    )
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="accuracy of models of 125M and 350M at equal parameters (arXiv 2402.14905, fig. 4), "
        "and smaller tables of the vocabulary (derived)",
        costs="time: more and smaller products one after another, and activations that grow by "
        "about the root of the ratio (derived)",
        helps="models below a billion parameters that parameters limit, as on a phone",
        hurts="time to a loss where launches or latency bind a step; pipelines of few ranks",
        source="arXiv 2402.14905, section 2.2",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return the keys of the chosen shape; none where there is none, which `supports` tells."""
        shape = self.choose(plan, round(self.base(plan).layers * self.ratio))
        return {} if shape is None else {f"model.{k}": v for k, v in shape._asdict().items()}

    def base(self, plan: Any) -> BlockShape:
        """Return the shape that is made deeper."""
        own = ModelConfig(**families()[plan.model.family])
        sizes = {"dim": self.base_dim, "layers": self.base_layers, "heads": self.base_heads}
        sizes |= {"kv_heads": self.base_kv_heads, "ffn": self.base_ffn}
        given = {key: value for key, value in sizes.items() if value is not None}
        if {"dim", "heads"} & {*given}:  # and nothing else of the family's widths
            given = {"head_dim": 0, "kv_heads": 0, "ffn": 0} | given
        return BlockShape.of(own.model_copy(update={**given, "activation": plan.model.activation}))

    def choose(self, plan: Any, layers: int) -> BlockShape | None:
        """Return the shape of so many layers that is the most like the base, or None."""
        base, like, shapes = self.base(plan), plan.model, []
        queries, rest = divmod(base.heads, base.kv_heads)
        if rest or base.dim % base.heads or layers <= base.layers:
            return None
        wanted, unit = base.parameters(like), base.dim // base.heads
        for heads in range(queries, base.heads, queries):
            dim, kv_heads = heads * unit, heads // queries
            thin = BlockShape(base.head_dim, dim, heads, kv_heads, layers, 1)
            each = thin._replace(ffn=2).parameters(like) - thin.parameters(like)
            exact = (wanted - thin.parameters(like)) / each + 1
            for multiple in MULTIPLES:
                shape = thin._replace(ffn=round(exact / multiple) * multiple)
                if shape.ffn > 0 and abs(shape.parameters(like) / wanted - 1) <= TOLERANCE:
                    shapes.append((abs(log(shape.ffn / dim * base.dim / base.ffn)), shape))
                    break
        return min(shapes)[1] if shapes else None

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require random weights, and a count of heads that leaves room for an MLP."""
        plan, base = context.plan, self.base(context.plan)
        if plan.model.pretrained:
            return Unsupported(
                "the weights of model.pretrained have their shape", mend(f"-{self.name()}")
            )
        layers = round(base.layers * self.ratio)
        if self.choose(plan, layers) is not None:
            return Supported()
        fits = [n for n in range(base.layers + 1, 64 * base.layers) if self.choose(plan, n)]
        why = f"no shape of {layers} layers has the parameters of the base's {base.layers}"
        if not fits:
            return Unsupported(f"{why}, nor has one of any other depth", mend(f"-{self.name()}"))
        near = min(fits, key=lambda n: abs(n - layers)) / base.layers
        return Unsupported(why, mend(f"techniques.{self.name()}.ratio={near:g}"))

    def active(self, build: Build) -> Evidence:
        """Compare this rank's blocks with the chosen shape, and tell both shapes."""
        config, base = build.config, self.base(build.plan)
        blocks = build.model.blocks
        if not len(blocks):
            return Evidence(None, "this rank holds no block")
        shape = BlockShape.of(config)
        more = shape.parameters(config) / base.parameters(build.plan.model) - 1
        here = {f"blocks.{n}.mixer_norm.weight" for n in blocks} & {*build.layouts}
        thin = all(prod(build.layouts[name].shape) == config.dim for name in here)
        return Evidence(
            active=config.layers > base.layers and abs(more) <= TOLERANCE and thin,
            detail=f"layers {base.layers} -> {shape.layers}, features {base.dim} -> {shape.dim}, "
            f"heads {base.heads} -> {shape.heads}, hidden features {base.ffn} -> {shape.ffn}; the "
            f"blocks' parameters change by {more:+.2%}",
            numbers={**shape._asdict(), "more_parameters": more},
        )
