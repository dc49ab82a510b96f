"""Rotate queries and keys by their places, so that a score knows how far apart two tokens are.

Each pair of a head's features is turned by an angle of position x frequency, and frequencies fall
from 1 by powers of `model.rope_theta`. A product of a turned query and a turned key depends on the
two places only by their distance: near and far are told apart without a table of places, which
would end with the rows of training. Nothing is learned and nothing kept but one cosine and sine per
place, shared by all layers.

The baseline rotates where `model.position` says so, which is its default. This rewrites the key,
for families and plans that have another, so everything else follows from the config, the prediction
too. `fused_rope` computes the same in one kernel, and `yarn` slows the frequencies for longer rows.
Source: arXiv 2104.09864.

Shapes: T places, P pairs of a head's features.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.model import position
from headrace.model.adapter import shape_of
from headrace.model.attention import SelfAttention
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

PLACES = (0, 1, 2, 5)
"""Where angles are measured: from the second on each is a multiple of the second's."""
ROUNDING = 1e-4
"""Relative change of an angle that is more than fp32's cosine and sine of it."""


class Rope(Technique[Build]):
    """Turn queries and keys by their places, so that a score knows how far apart two tokens are."""

    theta: float | None = Field(default=None, gt=1, le=1e12)
    """Base of the wavelengths; without it model.rope_theta stays. Tuner range 1e4 to 1e6."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "design"
    stage: ClassVar[Stage] = Stage.DESIGN
    claims: ClassVar[tuple[str, ...]] = ("config.position",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:parameters",)
    card: ClassVar[Card] = Card(
        buys=(
            "a loss that is lower by 0.20 (1b) and 0.17 (160m) after 200 steps than GPT-2's "
            "learned positions give, where another seed moves it by 0.06 and 0.001",
            "the same beside BERT's (arXiv 2104.09864, fig. 3)",
            "the context x dim parameters of a learned table (derived)",
        ),
        costs="a few products by element of queries and keys in each layer (derived)",
        helps="plans and families whose positions are learned, or that have none",
        hurts="reading rows longer than those of training, whose angles no layer has seen (arXiv "
        "2108.12409, fig. 1): yarn and alibi are for that",
        source="arXiv 2104.09864",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.position`, and `model.rope_theta` where a base is asked for."""
        base = {} if self.theta is None else {"model.rope_theta": self.theta}
        return {"model.position": "rope", **base}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require random weights, or those that have learned these positions."""
        model = context.plan.model
        if not model.pretrained:
            return Supported()
        model = shape_of(model)
        if model.position != "rope":
            return Unsupported(
                "the weights of model.pretrained have learned other positions", "leave it out"
            )
        if self.theta not in (None, model.rope_theta):
            return Unsupported(
                f"the weights of model.pretrained have learned theta = {model.rope_theta:g}, not "
                f"{self.theta:g}",
                mend(f"techniques.{self.name()}.theta={model.rope_theta}"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger of the rewritten config, which it already is."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan's keys are in force."""
        assert build.config.position == "rope"
        assert self.theta in (None, build.config.rope_theta)

    def active(self, build: Build) -> Evidence:
        """Report by how much the blocks rotate each pair per place, and whether by the plan's base.

        A technique that fills the rotation has its own frequencies, of which it has evidence.
        """
        blocks = build.model.blocks
        if not len(blocks):
            return Evidence(None, "this rank holds no block")
        turning = sum(isinstance(block.mixer, SelfAttention) for block in blocks.values())
        if not turning:
            return Evidence(None, "no block of this rank has queries")
        turned_TP = _turned(build.model.position, build.device)
        if turned_TP is None:
            return Evidence(False, "nothing turns queries and keys")
        angle_P = turned_TP[1].angle()
        expected_TP = torch.stack(
            [torch.polar(torch.ones_like(angle_P), t * angle_P) for t in PLACES]
        )
        places = (
            float((turned_TP - expected_TP).abs().max()) < ROUNDING and float(angle_P.min()) > 0
        )
        base = self.theta or build.config.rope_theta
        config = build.config.model_copy(update={"rope_theta": base})
        wanted_P = position.RotaryPosition(config).frequencies(angle_P.device)
        based = wanted_P.shape == angle_P.shape and wanted_P.allclose(angle_P, rtol=ROUNDING)
        slowest, fastest = float(angle_P.min()), float(angle_P.max())
        return Evidence(
            active=places and (based or "parts.position" in build.filled),
            detail=f"queries and keys of {turning} of {len(blocks)} blocks turn by {slowest:.3g} "
            f"to {fastest:.3g} radians per place"
            + ("" if places else ", not at every place")
            + ("" if based else f", which is not base {base:g}"),
            numbers={"blocks": turning, "slowest": slowest, "fastest": fastest},
        )


def _turned(part: Any, device: torch.device) -> Tensor | None:
    """Return what rotates queries and keys at `PLACES`: complex of size 1 [T, P], or None."""
    rotation = part.prepare(torch.tensor([PLACES], device=device))
    if rotation is None:
        return None
    cos, sin = (part.expand(1, len(PLACES), 1, -1)[0, :, 0].cpu() for part in rotation)
    return torch.complex(cos, sin).sgn()
