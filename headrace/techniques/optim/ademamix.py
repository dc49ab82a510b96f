"""Add a slow momentum, of gradients thousands of steps old, to AdamW's own.

One average of gradients cannot weigh the last steps and remember old ones too; AdEMAMix keeps both
(optim/ademamix). The slow one's weight and memory rise over `warmup`, so that a run begins as
AdamW. The plan's `optimizer.betas` are those of the other two. Source: arXiv 2409.03137.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from headrace.assemble.sockets import Build, Route
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.optim.ademamix import AdemamixOptimizer
from headrace.optim.elementwise import predict_rest, updated_in_lists
from headrace.parallel.layout import local_of
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
from headrace.plan.until import unknown_end

LONGEST = 0.25
"""Half-life of the slow momentum, as a share of the run, above which little of it is ever there: it
begins at zero. The paper's shortest runs, of 32,000 steps, have 0.22."""


class Ademamix(Technique[Build]):
    """Add a slow momentum, of gradients thousands of steps old, to AdamW's own."""

    alpha: float = Field(default=5.0, ge=0, le=1000)
    """Weight of the slow momentum beside the fast one; the paper has 4 to 10, which is the tuner's
    range."""
    slow: float = Field(default=0.9999, gt=0, lt=1)
    """Share of the old slow momentum that is kept; the paper's beta3. Its half-life is 6,931
    steps at 0.9999 and 693 at 0.999."""
    warmup: float = Field(default=1.0, gt=0, le=10**15)
    """How long weight and memory rise: at most 1 is a share of the schedule's steps, above it is
    steps."""

    rest: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    room: ClassVar[str] = "optim"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    images: ClassVar[bool] = True
    composes: ClassVar[tuple[str, ...]] = ("routes",)
    follows_horizon: ClassVar[bool] = True
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="fewer tokens to the same loss in long runs: a 1.3B model on 101B tokens is about "
        "where AdamW is on 197B in its paper",
        costs=(
            "a third state: 12 bytes a weight where AdamW has 8 (derived)",
            "18 passes over the weights where fused AdamW has one: 168 bytes a number instead of "
            "28 (derived)",
        ),
        helps="runs of tens of thousands of steps, which forget less",
        hurts="short runs, which end before the slow momentum has filled; a change of the data's "
        "distribution, which it follows late (section 5 of its paper)",
        source="arXiv 2409.03137; github.com/apple/ml-ademamix",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a run that is short beside the slow momentum's half-life."""
        lasts, half = plan.goal_steps, math.log(0.5) / math.log(self.slow)
        if lasts is None or lasts < 10 or half <= LONGEST * lasts:
            return None
        fits = 1 - float(f"{1 - 0.5 ** (1 / (0.2 * lasts)):.1g}")
        return Doubt(
            f"{self.name()} keeps half of a gradient for {half:,.0f} steps, and the run has "
            f"{lasts:,}: the slow momentum is still near the zero that it begins with",
            mend(f"techniques.{self.name()}.slow={fits:.8g}"),
        )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere where the warmup has an end: its work is by element."""
        plan = context.plan
        if plan is not None and self.warmup <= 1 and plan.horizon_steps is None:
            return unknown_end(f"techniques.{self.name()}.warmup", self.warmup, step=1000)
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Count three states, and the passes of its operations over lists."""
        ledger = predict_rest(ledger, self.name(), states=3, traffic=168, kernels=18, each=5)
        return updated_in_lists(ledger, self.name())

    def apply(self, build: Build) -> None:
        """Route all parameters that no other technique takes."""
        config, horizon = build.plan.optimizer, build.plan.horizon_steps or 1
        warmup = self.warmup if self.warmup > 1 else max(1.0, self.warmup * horizon)

        def make(named: Mapping[str, nn.Parameter]) -> AdemamixOptimizer:
            return AdemamixOptimizer(
                named,
                lr=config.lr,
                betas=(*config.betas, self.slow),
                eps=config.eps,
                weight_decay=config.weight_decay,
                alpha=self.alpha,
                warmup=warmup,
            )

        build.routes.append(Route(self.name(), lambda name, p: True, make, rest=self.rest))

    def active(self, build: Build) -> Evidence:
        """Report the weights that have a slow momentum, and how large it is beside the fast one."""
        optimizer = build.optimizers.get(self.name())
        states = [s for s in optimizer.state.values() if "slow" in s] if optimizer else []
        moved = sum(int(local_of(s["slow"]).count_nonzero()) for s in states)
        sizes = {
            key: sum(float(local_of(s[key]).abs().sum()) for s in states)
            for key in ("slow", "exp_avg")
        }
        weights = sum(local_of(p).numel() for p in build.routed.get(self.name(), {}).values())
        return Evidence(
            active=getattr(optimizer, "updates", 0) > 0 and moved > 0,
            detail=f"{moved} of {weights} weights have a slow momentum, "
            f"{sizes['slow'] / max(sizes['exp_avg'], 1e-30):.2g} of the fast one's size",
            numbers={"weights": weights, "moved": moved},
        )
