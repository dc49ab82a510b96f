"""Let a score fall with distance, each head at its own slope, instead of rotating (ALiBi).

A score loses slope x distance, and nothing else tells a token its place: no rotation, no table.
The slopes are not learned, a geometric series over the heads, so that some heads look near and some
far. A row longer than those of training holds no angle that was never seen, and the model reads on
where rotations break. Distances are counted inside of a document.

The bias is one part of the mask description. torch's SDPA takes it as one dense tensor for all
layers, heads x length^2 numbers, rounded to the run's precision, and leaves its causal kernel;
`flex_attention` computes it inside of its kernel. Backends without a bias refuse, and so does the
ring of `context_parallel`. Slopes belong to the model's heads: ranks that share these, of a tensor
or of `ulysses`, have the slopes of their own. Sampling computes rows whole. Source: arXiv
2108.12409.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any, ClassVar

import torch

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.costs.decoder_work import masked
from headrace.costs.ledger import Ledger, Line
from headrace.costs.mask_work import EACH_HEAD
from headrace.model.attention import weights
from headrace.model.mask import MaskSpec, Rows, slopes
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

BAND = 0.05
"""Relative error that a measured slope may have: a weight in bf16 has 8 bits, and a slope is the
logarithm of two of them over many tokens."""
SLOPE = 17.0
"""Features of a head that take as long as a slope does in flex_attention: 17.4 at 160m and 16.2 at
1b (results/techniques.jsonl)."""
APART = 64
"""Tokens between the keys whose weights are compared; further apart, rounding shows less."""


class Alibi(Technique[Build]):
    """Let a score fall with distance, each head at its own slope, instead of rotating."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("config.position",)
    composes: ClassVar[tuple[str, ...]] = ("mask",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys=(
            "rows longer than those of training (arXiv 2108.12409)",
            "no rotation",
        ),
        costs=(
            "under SDPA a dense bias of heads x length^2 numbers and the causal kernel (derived)"
        ),
        helps="models that read longer texts than they were trained on",
        hurts="finding what stands far back: every head but the flattest looks near (derived)",
        source="arXiv 2108.12409",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Set `model.position` to none: slopes alone give tokens their place."""
        return {"model.position": "none"}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support random weights, where no ring of ranks computes attention."""
        plan = context.plan
        if plan.model.pretrained:
            return Unsupported(
                "the weights of model.pretrained have learned other positions", "leave it out"
            )
        if plan.mesh.context > 1 and context.has_ring:
            return Unsupported(
                f"the ring of mesh.context = {plan.mesh.context} ranks has no bias",
                context.whole("context"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep a dense mask of numbers for every head; no layer copies it, as it would flags."""
        sizes = ledger.sizes
        wider = sizes["heads"] * sizes["activation_bytes"]
        ledger = ledger.without([n for n in ledger.memory if n.endswith("/mask_copy")])
        if "mask" in ledger.memory:
            ledger = ledger.scaled(lambda name: name == "mask", wider)
        else:
            bias = wider * sizes["mask"] / sizes["rows"]
            ledger = ledger.with_line("mask", Line(bias, ("loss", "turn", "backward")))
        facts = {"mask": wider * sizes["mask"], "mask_copy": 0.0, EACH_HEAD: 1.0}
        return masked(replace(ledger, sizes={**sizes, **facts}), 1.0, 1.0, extra=SLOPE)

    def apply(self, build: Build) -> None:
        """Compose the mask; the plan's key took the rotation away."""
        assert build.config.position == "none"
        build.mask = replace(build.mask, alibi=build.config.heads)

    def active(self, build: Build) -> Evidence:
        """Read the slope of each head that this rank attends with, as the run's backend has it.

        It is how the backend weighs two keys that are else equal, under the run's own mask.
        """
        length, config, world = build.plan.data.sequence_length, build.config, build.world
        shares = (world.size("tensor"), world.size("context"))
        width, parts = config.resolved_head_dim, shares[0] * shares[1]
        rotation = build.model.position.prepare(torch.zeros(1, 1, device=build.device))
        q, k = (
            torch.zeros(1, length, heads // parts, width, dtype=build.dtype, device=build.device)
            for heads in (config.heads, config.resolved_kv_heads)
        )
        places = torch.arange(length, device=build.device)
        attend, mine = build.model.attend, (world.place("tensor"), world.place("context"))
        right_H = slopes(config.heads, build.device).unflatten(0, (*shares, -1))[mine]
        falls = -log(torch.finfo(build.dtype).tiny) - 1  # a weight that falls by more is none
        apart = max(1, min(APART, length - 1, int(falls / right_H.max().item())))
        with torch.no_grad():
            run = build.model.mask
            spec, own = MaskSpec(alibi=run.alibi, alibi_share=run.alibi_share), length // shares[1]
            mask = build.model.prepare_mask(spec, Rows(places[None, :own]), own)
            group = torch.zeros_like(places)
            group[-1], group[-1 - apart] = 1, 2
            _, near_H, far_H = weights(attend, mask, q, k, group)[0, -1].unbind(-1)
        slope_H = (near_H / far_H).log() / apart
        rounded = 2 * torch.finfo(build.dtype).eps / apart  # of the logarithms of both weights
        off = (((slope_H - right_H).abs() - rounded).clamp(min=0) / right_H).max().item()
        return Evidence(
            active=rotation is None and off < BAND,
            detail=f"scores of {len(right_H)} heads fall by {slope_H.min().item():.3g} to "
            f"{slope_H.max().item():.3g} per token, {100 * off:.2g}% off their slopes at most",
            numbers={"flattest": slope_H.min().item(), "steepest": slope_H.max().item()},
        )
