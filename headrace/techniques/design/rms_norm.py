"""Divide features by their root mean square, and leave the mean as it is.

Layer norm subtracts the mean, divides by the standard deviation, and learns a weight and a bias per
feature. Re-centring buys little: RMSNorm leaves it out, and has half of the parameters and one sum
over the features less. With `weight` off it learns nothing at all, as in nanochat and
modded-nanogpt: the next matrix can learn the same scale.

The baseline normalises so where `model.norm` says so, which is its default. This rewrites the key,
for families and plans that have another; `fused_rms_norm` computes the same in one kernel. Weights
that were trained with layer norm are converted when a run starts from them: the mean is subtracted
once, in what writes to the stream, and biases of norms go into the linears behind them
(model/rms_conversion). Training on recovers what is left. Source: arXiv 1910.07467; 2305.14858.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from headrace.assemble.adapted import AdapterTechnique
from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.model.adapter import read_config
from headrace.model.norm import RMSNorm, UnitRMSNorm
from headrace.model.rms_conversion import is_converted
from headrace.plan.technique import Card, Context, Evidence, Supported, Unsupported


class RmsNorm(Keyed):
    """Divide features by their root mean square, and leave the mean as it is."""

    weight: bool = True
    """Whether each feature has a learned weight."""

    claims: ClassVar[tuple[str, ...]] = ("config.norm",)
    symptoms: ClassVar[tuple[str, ...]] = ("memory bandwidth:elementwise",)
    card: ClassVar[Card] = Card(
        buys="the loss of layer norm in 7 to 64% less time per step (arXiv 1910.07467, abstract; "
        "of models of 2019, without fused kernels)",
        costs="nothing that was shown; without weights the freedom to weigh a feature",
        helps="models of layer norms, as GPT-2's",
        hurts="weights that were trained with layer norm, until training on recovers what "
        "converting them cannot keep: the last norm's bias, and the mean of tied embeddings",
        source="arXiv 1910.07467",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.norm`."""
        return {"model.norm": "rms_norm" if self.weight else "unit_rms_norm"}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require random weights, or those of RMSNorm, or those of layer norm and no adapter."""
        model, given = context.plan.model, context.plan.techniques
        adapters = [name for name, one in given.items() if isinstance(one, AdapterTechnique)]
        if model.pretrained and (adapters or model.adapter):
            stored = read_config(Path(model.pretrained))
            if is_converted(model, stored):
                other = adapters[0] if adapters else "model.adapter"
                return Unsupported(
                    f"the weights of model.pretrained have layer norm, and beside {other} they "
                    "stay as they are",
                    mend(f"-{self.name()}"),
                )
        return super().supports(context)

    def active(self, build: Build) -> Evidence:
        """Count the norms of this rank that have no mean, and their learned weights."""
        model = build.model
        norms: list[Any] = [n for b in model.blocks.values() for n in (b.mixer_norm, b.mlp_norm)]
        norms += [] if model.norm is None else [model.norm]
        if not norms:
            return Evidence(None, "this rank holds no norm")
        wanted = RMSNorm if self.weight else UnitRMSNorm
        right = sum(isinstance(norm, wanted) for norm in norms)
        weights = sum(p.numel() for norm in norms for p in norm.parameters())
        return Evidence(
            active=right == len(norms) and (weights > 0) == self.weight,
            detail=f"{right} of {len(norms)} norms divide by the root mean square, with "
            f"{weights:,} learned weights",
            numbers={"norms": right, "weights": weights},
        )
