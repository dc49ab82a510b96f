"""Let the weight decay change with the step, as the learning rate does.

Decoupled decay takes learning rate x decay of each weight at every step, so a rate that falls takes
the decay down with it. This gives the decay a curve of its own: a share of `optimizer.weight_decay`
(and of every other optimizer's) that goes from 1 at the first step to `final` at the horizon. Self-
supervised vision transformers raise it tenfold along a cosine; language models that warm the decay
down keep the last, small steps from shrinking what was learned. It is a pure function of the step,
in the socket `values`. Source: arXiv 2104.14294, section 3; arXiv 2011.11152 (decay that follows
the gradient's norm, which is left out here, is a schedule too).
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
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

SOCKET = "weight_decay"
"""Name of the share in the socket `values`."""


def decay_share(shape: str, final: float, horizon: int) -> Callable[[int], float]:
    """Return a function that gives the share of the weight decay at each step (0 is the first)."""

    def share(step: int) -> float:
        done = min(1.0, step / max(1, horizon))
        if shape == "cosine":
            done = 0.5 * (1 - math.cos(math.pi * done))
        return 1 + (final - 1) * done

    return share


class WeightDecaySchedule(Technique[Build]):
    """Let the weight decay change with the step, as the learning rate does."""

    final: float = Field(default=0.0, ge=0, le=1e3)
    """Share of the weight decay at the horizon; tuner range 0 to 10."""
    shape: Literal["linear", "cosine"] = "linear"
    """The curve from 1 to `final`: even, or half a cosine."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "schedule"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    images: ClassVar[bool] = True
    composes: ClassVar[tuple[str, ...]] = ("values",)
    follows_horizon: ClassVar[bool] = True
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="a decay that is not tied to the learning rate's curve",
        costs="one number a step (derived)",
        helps="long runs, in which decay matters; a raised one is DINO's (0.04 to 0.4, arXiv "
        "2104.14294)",
        hurts="short runs: one of 1,000 steps at a rate of 1e-3 and a decay of 0.1 takes a tenth "
        "of the weights in all (derived)",
        source="arXiv 2104.14294; arXiv 2011.11152",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a decay, another one at the end, and a horizon."""
        plan, name = context.plan, self.name()
        if plan is None:
            return Supported()
        if self.final == 1:
            return Unsupported(
                "final = 1 is the decay of the first step: nothing changes",
                mend(f"techniques.{name}.final=0"),
            )
        decays = [getattr(t, "weight_decay", 0.0) for t in plan.techniques.values()]
        if not plan.optimizer.weight_decay and not any(decays):
            return Unsupported(
                "optimizer.weight_decay = 0 is 0 at every share of it",
                mend("optimizer.weight_decay=0.1"),
            )
        if plan.horizon_steps is None:
            return Unsupported(
                "the plan does not say at which step the schedule ends",
                mend("schedule.steps=1000"),
                RefusalKind.PLAN,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger as it is: a decay costs what it did."""
        return ledger

    def apply(self, build: Build) -> None:
        """Give each step its share of the decay, which the step writes into every group."""
        horizon = build.plan.horizon_steps
        assert horizon is not None
        build.values[SOCKET] = decay_share(self.shape, self.final, horizon)

    def active(self, build: Build) -> Evidence:
        """Compare each group's decay with its share of what the optimizer began with."""
        groups = [g for one in build.optimizers.values() for g in one.param_groups]
        decays = [g for g in groups if g.get("initial_weight_decay")]
        if not decays:
            return Evidence(None, "this rank has no weights that decay")
        step, horizon = int(build.now["step"]), build.plan.horizon_steps or 1
        share = decay_share(self.shape, self.final, horizon)(step)
        same = all(g["weight_decay"] == g["initial_weight_decay"] * share for g in decays)
        numbers: dict[str, Any] = {"share": share, "groups": len(decays)}
        return Evidence(
            active=SOCKET in build.now and same,
            detail=f"after step {step + 1} the decay of {len(decays)} groups of weights is "
            f"{share:.3g} of their first",
            numbers=numbers,
        )
