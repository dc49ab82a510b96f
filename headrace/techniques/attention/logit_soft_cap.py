"""Keep attention's scores within a cap by a tanh (logit soft-capping).

A score s becomes cap x tanh(s / cap): small ones stay, large ones end at the cap, and no head can
put all its weight on one token by growing its queries and keys without end. Gemma 2 caps
attention's scores at 50. Order of the parts: the scale, then the cap, then a slope of distance,
then the mask.

The cap is one part of the mask description. `flex_attention` computes it inside of its kernel.
torch's SDPA has none, so the default backend computes attention by plain matmuls then and keeps
the scores: rows x heads x length^2 numbers a layer, rounded once to the run's precision before the
tanh in fp32. Backends without a cap refuse. The final logits are not capped here. Sampling computes
rows whole. Source: Gemma 2 (arXiv 2408.00118, section 2).
"""

from dataclasses import replace
from math import exp, log, tanh
from typing import Any, ClassVar

import torch
from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.costs.mask_work import soft_capped
from headrace.model.attention import weights
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

LARGEST = 60.0
"""A score whose inverse exponential bf16 still holds; fp16 is asked about two that are nearer."""

LOW = 1.0
"""Cap below which a plan gets a warning that attention is nearly even. Chosen, not measured: at 1
the largest weight is 7.4 times the least; published caps are 30 and 50."""


class LogitSoftCap(Technique[Build]):
    """Keep attention's scores within a cap by a tanh."""

    cap: float = Field(default=50.0, gt=0, le=100)
    """Largest score, after the scale by head size; tuner range 20 to 100."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    composes: ClassVar[tuple[str, ...]] = ("mask",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("instability",)
    card: ClassVar[Card] = Card(
        buys="scores that cannot grow beyond the cap (arXiv 2408.00118)",
        costs=(
            "under SDPA attention by plain products, with all scores kept for the backward "
            "pass (derived)",
            "the fused kernels that have no cap",
        ),
        helps="long runs whose attention collapses onto single tokens, with flex_attention",
        hurts="memory and time under SDPA; model.qk_norm bounds scores too and keeps every kernel",
        source="arXiv 2408.00118, section 2",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a cap so low that a token attends nearly evenly to all others."""
        if self.cap >= LOW:
            return None
        usual = f"techniques.{self.name()}.cap=50"
        return Doubt(
            f"techniques.{self.name()}.cap = {self.cap:g} lets a token look at most "
            f"{exp(2 * self.cap):.3g} times as much at one as at another",
            mend(usual),
            changes=(usual,),
        )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support whole rows on one rank."""
        plan = context.plan
        if cap := plan.model.attention_cap:
            return Unsupported(
                f"scores of this model are capped already: model.attention_cap = {cap:g}",
                mend(f"-{self.name()}"),
            )
        if context.has_ring:
            return Unsupported(
                f"the ring of mesh.context = {plan.mesh.context} ranks has no cap",
                context.whole("context"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add a dense mask, and what plain matmuls keep of every score."""
        return soft_capped(ledger)

    def apply(self, build: Build) -> None:
        """Compose the mask."""
        build.mask = replace(build.mask, soft_cap=self.cap)

    def active(self, build: Build) -> Evidence:
        """Read how the run's backend weighs a key of a large score beside a smaller one.

        That is none, unless its weight would be too small for the run's numbers.
        """
        length, config = build.plan.data.sequence_length, build.config
        heads, groups, width = config.heads, config.resolved_kv_heads, config.resolved_head_dim
        score = min(self.cap, LARGEST)
        other = max(0.0, score + log(torch.finfo(build.dtype).tiny))
        q = torch.zeros(1, length, heads, width, dtype=build.dtype)
        k = torch.zeros(1, length, groups, width, dtype=build.dtype)
        q[..., 0], k[:, -1, :, 0], k[:, -2, :, 0] = 1.0, score * width**0.5, other * width**0.5
        places = torch.arange(length, device=build.device)
        group = torch.zeros_like(places)
        group[-1], group[-2] = 1, 2
        attend = build.model.attend
        with torch.no_grad():
            spec = MaskSpec(soft_cap=build.model.mask.soft_cap)
            mask = attend.prepare(spec, Rows(places[None]), length)
            weight_TN = weights(attend, mask, q.to(build.device), k.to(build.device), group)
        _, large_H, other_H = weight_TN[0, -1].unbind(-1)
        capped = self.cap * tanh(other / self.cap)
        seen = (large_H / other_H).log().mean().item() + capped
        right = self.cap * tanh(score / self.cap)
        return Evidence(
            active=abs(seen - right) < 0.25 * (score - other - right + capped),
            detail=f"a score of {score:.3g} weighs as one of {seen:.4g}; the cap makes it "
            f"{right:.4g}",
            numbers={"score": score, "weighs_as": seen},
        )
