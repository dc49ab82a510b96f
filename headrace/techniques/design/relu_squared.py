"""Square what is positive of the MLP's hidden features, and drop the rest.

A search over programs found relu(x)^2 (Primer): it is one of the two changes to which its authors
trace most of their gain over the Transformer. It has no gate: two matrices, wider ones, and one
activation kept in place of two. About half of the hidden features are zero. nanochat and
modded-nanogpt have it.

The baseline computes it where `model.activation` says so; this rewrites the key. Where `model.ffn`
is left open, the MLP has 4 dim hidden features, as many parameters as a gated one's. Source: arXiv
2109.08668.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.plan.technique import Card, Evidence

ASKED = (-2.0, 0.0, 0.5, 3.0)
"""Numbers whose activation shows the rule."""


class ReluSquared(Keyed):
    """Square what is positive of the MLP's hidden features, and drop the rest."""

    claims: ClassVar[tuple[str, ...]] = ("config.activation",)
    symptoms: ClassVar[tuple[str, ...]] = ("recipe", "memory capacity:activations")
    card: ClassVar[Card] = Card(
        buys="a lower loss than ReLU's or GELU's at equal work (arXiv 2109.08668), and "
        "one activation fewer to keep than a gated MLP has (derived)",
        costs="activations that grow with the square: fp16 has little room for them",
        helps="short runs of small models: the speedruns' recipes have it",
        hurts="weights that were trained with another activation; export to Llama's architecture",
        source="arXiv 2109.08668; github.com/KellerJordan/modded-nanogpt",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.activation`."""
        return {"model.activation": "relu2"}

    def active(self, build: Build) -> Evidence:
        """Count the MLPs of this rank whose activation makes squares of a few numbers."""
        mlps: list[Any] = [block.mlp for block in build.model.blocks.values()]
        if not mlps:
            return Evidence(None, "this rank holds no block")
        x = torch.tensor(ASKED)
        rules = [getattr(mlp, "activation", None) or getattr(mlp, "activate", None) for mlp in mlps]
        gated = [any("gate_up" in name for name, _ in mlp.named_parameters()) for mlp in mlps]
        right = sum(
            rule is not None and not gate and torch.equal(rule(x), x.relu().square())
            for rule, gate in zip(rules, gated, strict=True)
        )
        return Evidence(
            active=right == len(mlps),
            detail=f"{right} of {len(mlps)} MLPs square what is positive",
            numbers={"squared": right},
        )
