"""Say that AdamW updates what no other technique takes, with these settings, and prove it.

The baseline's optimizer is torch's fused AdamW: one kernel reads and writes weights, gradients and
both moments of a list of tensors, 28 bytes a number. It stands in every plan that puts nothing in
its place, so this technique fills no socket. It makes the choice explicit: its knobs rewrite
`optimizer.*`, what would take AdamW's place is refused beside it, and the run shows that the fused
kernel made the updates. Source: arXiv 1711.05101.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.parallel.layout import local_of
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
)

Decay = Annotated[float, Field(ge=0, lt=1)]


class Adamw(Technique[Build]):
    """Update by torch's fused AdamW: the baseline's optimizer, made explicit and proven."""

    betas: tuple[Decay, Decay] | None = None
    """`optimizer.betas`; left open, the plan's."""
    eps: float | None = Field(default=None, gt=0, le=1)
    """`optimizer.eps`; left open, the plan's."""
    weight_decay: float | None = Field(default=None, ge=0, le=1e6)
    """`optimizer.weight_decay`; left open, the plan's. Tuner range 0.01 to 0.3."""

    rest: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    room: ClassVar[str] = "optim"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    images: ClassVar[bool] = True
    equality: ClassVar = "learning"
    card: ClassVar[Card] = Card(
        buys="the update in one pass over 28 bytes a number, where torch's plain AdamW makes a "
        "dozen passes (derived)",
        costs="two fp32 moments: 8 bytes a weight (derived)",
        helps="everything: it is what others are compared with",
        hurts="matrices of models trained from scratch, which other rules move further a token; "
        "tuned AdamW is closer to them than their papers say (arXiv 2509.02046)",
        source="arXiv 1711.05101; torch.optim.AdamW(fused=True)",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return the keys of `optimizer.*` whose knobs are set."""
        knobs: dict[str, Any] = {"eps": self.eps, "weight_decay": self.weight_decay}
        knobs["betas"] = None if self.betas is None else [*self.betas]  # as TOML has them
        return {f"optimizer.{key}": value for key, value in knobs.items() if value is not None}

    def supports(self, context: Context) -> Supported:
        """Run everywhere."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger as it is: the baseline's update is in it."""
        return ledger

    def apply(self, build: Build) -> None:
        """Leave the sockets alone: the baseline makes AdamW for what is left."""

    def active(self, build: Build) -> Evidence:
        """Report the weights whose moments the fused kernel has moved, and by which settings."""
        taken = build.routed.get(self.name(), {})
        optimizer, config = build.optimizers.get(self.name()), build.plan.optimizer
        betas = config.betas if self.betas is None else self.betas
        eps = config.eps if self.eps is None else self.eps
        decay = config.weight_decay if self.weight_decay is None else self.weight_decay
        same = isinstance(optimizer, torch.optim.AdamW) and all(
            group["fused"] and group["betas"] == betas and group["eps"] == eps
            for group in optimizer.param_groups
        )
        states = [optimizer.state.get(p, {}) for p in taken.values()] if optimizer else []
        moved = sum("exp_avg_sq" in state for state in states)
        numbers = sum(local_of(p).numel() for p in taken.values())
        return Evidence(
            active=same and moved > 0 and config.weight_decay == decay,
            detail=f"the fused kernel updated {moved} of {len(taken)} tensors, {numbers} weights, "
            f"with betas {betas[0]:g} and {betas[1]:g}, eps {eps:g} and decay {decay:g}",
            numbers={"tensors": len(taken), "moved": moved, "weights": numbers},
        )
