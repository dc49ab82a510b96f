"""Scale the gradients down where their norm over all weights is above a limit.

A batch that the model finds surprising can have a gradient many times as long as the others, and
one such step can undo hundreds. Scaling all gradients by one factor keeps their direction. The
baseline does it already, by `optimizer.clip_norm`; this rewrites that key, and counts on the device
how often the limit was reached. The norm counts each number once over all ranks, and the host never
reads it in a step. Source: arXiv 1211.5063 (section 3.2).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.clipping import norm_in_the_update
from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

ROUNDING = 1e-3
"""Relative error of a norm that is measured again after the gradients were scaled."""


class GradientClipping(Technique[Build]):
    """Scale the gradients down where their norm over all weights is above a limit."""

    max_norm: float = Field(default=1.0, gt=0, le=1e6)
    """Largest norm of the gradients that an update sees; tuner range 0.1 to 10."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "stability"
    stage: ClassVar[Stage] = Stage.STEP
    images: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = ("clip",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("instability",)
    card: ClassVar[Card] = Card(
        buys="a bound on how far one step can move the weights; with Adam's normalised steps it "
        "mostly shields the two moments (derived)",
        costs="one pass over the gradients (derived); fused AdamW scales as it reads them",
        helps="pretraining at large learning rates; most published recipes clip at 1.0 (GPT-3, "
        "LLaMA)",
        hurts="a limit below the usual norm, which makes every step one of equal length",
        source="arXiv 1211.5063",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `optimizer.clip_norm`."""
        return {"optimizer.clip_norm": self.max_norm}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere: the norm is summed over all ranks."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Change nothing: the baseline's step measures the norm and scales already."""
        return ledger

    def apply(self, build: Build) -> None:
        """Count the steps whose gradients were longer than the limit."""
        counts = torch.zeros(2, device=build.device)
        build.notes[self.name()] = {"counts": counts, "last": None}
        baseline, step = build.clip, torch.ones((), device=build.device)

        def clip(build: Build, max_norm: float) -> Tensor:
            norm = baseline(build, max_norm)
            if max_norm > 0:
                counts.add_(torch.stack([step, (norm > max_norm).float()]))
                build.notes[self.name()]["last"] = norm
            return norm

        build.clip = clip

    def active(self, build: Build) -> Evidence:
        """Measure the gradients of the last step again, as the update saw them."""
        note = build.notes[self.name()]
        measured, clipped = note["counts"].tolist()
        if note["last"] is None:
            return Evidence(False, "no gradient was measured")
        before, after = float(note["last"]), float(norm_in_the_update(build))
        bound = min(before, self.max_norm) * (1 + ROUNDING)
        return Evidence(
            active=measured > 0 and not after > bound,
            detail=f"clipped {clipped:g} of {measured:g} steps at {self.max_norm:g}; the last norm "
            f"was {before:.3g}, and {after:.3g} in the update",
            numbers={"steps": measured, "clipped": clipped},
        )
