"""Raise the learning rate from near zero over the first steps.

The first updates of Adam divide by second moments of one or a few gradients, so their size says
little of the slope, and weights drawn at random have the steepest one. A rate that rises evenly to
its whole value over `steps` steps keeps these updates short, and higher rates become usable after
them. It rewrites `schedule.warmup_steps`; every kind of schedule begins with it.
Source: arXiv 1706.02677, section 2.2; arXiv 1910.04209; arXiv 2406.09405.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from headrace.assemble.scheduled import Scheduled
from headrace.core.limits import MOST
from headrace.core.remedy import mend
from headrace.plan.technique import Card, Context, Supported, Unsupported


class Warmup(Scheduled):
    """Raise the learning rate from near zero over the first steps."""

    steps: int = Field(default=100, ge=1, le=MOST)
    """Steps until the rate is whole; tuner range 10 to 2000."""

    symptoms: ClassVar[tuple[str, ...]] = ("instability", "recipe")
    card: ClassVar[Card] = Card(
        buys="learning rates at which a run without it diverges (arXiv 2406.09405, fig. 1)",
        costs="steps at a low rate: half of what they would move (derived)",
        helps="high rates, large batches, wide models and random weights",
        hurts="runs of few steps, and rates that are low already",
        source="arXiv 1706.02677; arXiv 2406.09405",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `schedule.warmup_steps`; nothing where it ends too late, which `supports` says."""
        ends = plan.horizon_steps
        return {} if ends and self.steps > ends else super().keys(plan)

    def curve(self) -> Mapping[str, Any]:
        """Return the steps of the warmup."""
        return {"warmup_steps": self.steps}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require that the warmup ends within the schedule."""
        ends = context.plan.horizon_steps
        if ends and self.steps > ends:
            return Unsupported(
                f"a warmup of {self.steps} steps is past the schedule's end at step {ends}",
                mend(f"techniques.{self.name()}.steps={max(1, ends // 10)}"),
            )
        return Supported()
