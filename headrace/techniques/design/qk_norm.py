"""Normalise queries and keys per head before their product, so that scores cannot grow.

A score is a product of a query and a key, and both may grow without end: attention then ends on one
token, and gradients vanish or the run diverges. Normalised by their root mean square (and a weight
per feature), a score is at most the head's size times both weights, before the scale.

The baseline does it where `model.qk_norm` says so, before the rotation; this rewrites the key. With
`model.norm = "unit_rms_norm"` these norms have no weights either. `fused_rope` computes it in the
rotation's kernel. Sources: arXiv 2302.05442 (section 2.1), arXiv 2010.04245.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.model.norm import RMSNorm, UnitRMSNorm
from headrace.plan.technique import Card, Evidence


class QkNorm(Keyed):
    """Normalise queries and keys per head before their product, so that scores cannot grow."""

    claims: ClassVar[tuple[str, ...]] = ("config.qk_norm",)
    symptoms: ClassVar[tuple[str, ...]] = ("instability", "recipe")
    card: ClassVar[Card] = Card(
        buys="runs that stay stable at learning rates at which others diverge (arXiv 2302.05442, "
        "fig. 1; arXiv 2309.14322, fig. 1)",
        costs="a pass over queries and keys in each layer (derived); fused_rope hides it",
        helps="high learning rates, Muon, long runs and half precision",
        hurts="weights that were trained without it",
        source="arXiv 2302.05442, section 2.1",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.qk_norm`."""
        return {"model.qk_norm": True}

    def active(self, build: Build) -> Evidence:
        """Count the mixers of this rank with queries whose heads are normalised, and keys too."""
        mixers: list[Any] = [block.mixer for block in build.model.blocks.values()]
        having = [mixer for mixer in mixers if hasattr(mixer, "q_norm")]
        if not having:
            return Evidence(None, "no block of this rank has queries")
        norms = (RMSNorm, UnitRMSNorm)
        right = sum(isinstance(m.q_norm, norms) and isinstance(m.k_norm, norms) for m in having)
        return Evidence(
            active=right == len(having),
            detail=f"{right} of {len(having)} mixers normalise queries and keys",
            numbers={"mixers": right},
        )
