"""Let the learning rate fall with the root of the step, without an end.

After the warmup of W steps the rate at step n, the first being 0, is sqrt((W + 1) / (n + 1)) of the
highest. It needs no horizon: a run can go on for ever, and each checkpoint is as good a one to
branch off as any other. The warmup sets the time scale, so without one the rate is halved after
four steps. It rewrites `schedule.kind`.
Source: arXiv 1706.03762, section 5.3; T5 (arXiv 1910.10683, section 3.1.2).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.scheduled import Scheduled
from headrace.core.remedy import mend
from headrace.plan.doubts import usual_warmup
from headrace.plan.technique import Card, Doubt


class InverseSqrt(Scheduled):
    """Let the learning rate fall with the root of the step, without an end."""

    card: ClassVar[Card] = Card(
        buys="a run without an end, whose rate falls all the same",
        costs="a rate that is not near zero where the run stops, so that a cooldown still gains "
        "(arXiv 2106.04560, section 3.5)",
        helps="runs whose length is not known",
        hurts="short warmups, which set its time scale: without one the rate halves in four steps",
        source="arXiv 1706.03762; arXiv 1910.10683; arXiv 2106.04560",
    )

    def curve(self) -> Mapping[str, Any]:
        """Return the kind."""
        return {"kind": "inverse_sqrt"}

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a curve without a warmup, which falls at once."""
        if plan.schedule.warmup_steps:
            return None
        return Doubt(
            "schedule.warmup_steps = 0 sets the time scale of inverse_sqrt: the rate is halved "
            "after 4 steps, and a tenth after 100",
            mend(f"schedule.warmup_steps={usual_warmup(plan)}"),
        )
