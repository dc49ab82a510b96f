"""Multiply each hidden feature of the MLP by a gate: down(silu(gate x) * up x).

The gate is a second projection of the same input, so a gated MLP has three matrices. Where
`model.ffn` is left open it has 8/3 dim hidden features in place of 4 dim, which is as many
parameters as the plain MLP's; a plan that gives `model.ffn` gets half as many again.

The baseline's MLP is gated where `model.activation` says so, which is its default. This rewrites
the key, for families and plans that have another; `fused_swiglu` computes the same in one kernel.
Source: arXiv 2002.05202.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.plan.technique import Card, Evidence


class Swiglu(Keyed):
    """Multiply each hidden feature of the MLP by a gate: down(silu(gate x) * up x)."""

    claims: ClassVar[tuple[str, ...]] = ("config.activation",)
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="a lower loss at equal parameters and work: 1.636 nats in place of ReLU's 1.677 after "
        "524,288 steps of T5 (arXiv 2002.05202, Table 1)",
        costs="two wide activations that are kept instead of one, and a smaller product",
        helps="most sizes: Llama, Qwen and OLMo have it",
        hurts="plans that give model.ffn for a plain MLP: they get half as many weights again",
        source="arXiv 2002.05202",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.activation`."""
        return {"model.activation": "swiglu"}

    def active(self, build: Build) -> Evidence:
        """Count the MLPs of this rank that have rows of a gate beside those of hidden features."""
        mlps: list[Any] = [block.mlp for block in build.model.blocks.values()]
        if not mlps:
            return Evidence(None, "this rank holds no block")
        gated = sum(any("gate_up" in name for name, _ in mlp.named_parameters()) for mlp in mlps)
        return Evidence(
            active=gated == len(mlps),
            detail=f"{gated} of {len(mlps)} MLPs have a gate",
            numbers={"gated": gated},
        )
