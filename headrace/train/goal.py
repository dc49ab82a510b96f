"""Decide when a run ends, by pure functions of its plan and its counters."""

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from headrace.plan.plan import Plan


@dataclass
class Counters:
    """Hold how far a run has come.

    Every checkpoint saves it. A resumed run reaches the same values, except for the times.
    """

    step: int = 0
    tokens: int = 0
    wasted_tokens: int = 0
    wall_s: float = 0.0
    skipped_steps: int = 0
    restarts: int = 0
    val: list[dict[str, float]] = field(default_factory=list)
    phase_s: dict[str, float] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)
    guard: dict[str, Any] | None = None
    """Differences of the first step from the first step of the plain trainer."""
    first_loss: float | None = None
    """Loss of the first step in nats per token; None where it was not finite."""
    last_loss: float | None = None
    """Loss of the newest step that was read, in nats per token; None where it was not finite."""
    before: dict[str, float] | None = None
    """Validation loss before the first step; None where it was not asked for."""
    general: dict[str, Any] | None = None
    """Loss on the general text before the first step and at the end; None where none is named."""
    attention: dict[str, Any] | None = None
    """Measurements that chose the attention backend, and what torch's own choice launched."""

    def plain(self) -> dict[str, Any]:
        """Return the counters as JSON values."""
        return asdict(self)

    def saw(self, step: int, loss: float | None) -> None:
        """Record the loss of a step that was read; one that is not finite is recorded as None."""
        self.last_loss = loss if loss is not None and isfinite(loss) else None
        if step == 1:
            self.first_loss = self.last_loss

    @property
    def bits_per_byte(self) -> float | None:
        """Return the newest validation loss in bits per byte; None before the first validation."""
        return self.val[-1]["bits_per_byte"] if self.val else None

    @property
    def evaluated(self) -> bool:
        """Return whether the newest validation measured the current weights."""
        return bool(self.val) and self.val[-1]["step"] == self.step


def ended_by(plan: Plan, counters: Counters) -> str | None:
    """Return the name of the goal that ends the run now; None where the run goes on."""
    goal, price = plan.goal, plan.hardware.dollars_per_hour
    if goal.bits_per_byte and (counters.bits_per_byte or float("inf")) <= goal.bits_per_byte:
        return "bits_per_byte"
    if goal.steps and counters.step >= goal.steps:
        return "steps"
    if goal.tokens and counters.tokens >= goal.tokens:
        return "tokens"
    if goal.minutes and counters.wall_s >= goal.minutes * 60:
        return "minutes"
    if goal.dollars and price and counters.wall_s / 3600 * price >= goal.dollars:
        return "dollars"
    return None


def seconds_left(plan: Plan, step: int, wall_s: float, a_step_s: float) -> float | None:
    """Return the seconds until the goal's steps, minutes or dollars end the run.

    Args:
        plan: the run's.
        step: the newest step.
        wall_s: seconds of the run so far.
        a_step_s: seconds of a step, with all that stands between steps.
    """
    ends = []
    if plan.goal_steps:
        ends.append((plan.goal_steps - step) * a_step_s)
    if plan.goal.minutes:
        ends.append(plan.goal.minutes * 60 - wall_s)
    if plan.goal.dollars and (price := plan.hardware.dollars_per_hour):
        ends.append(plan.goal.dollars / price * 3600 - wall_s)
    return max(0.0, min(ends)) if ends else None


def reached(plan: Plan, counters: Counters) -> dict[str, Any]:
    """Return the goal of the plan, and whether and when it was reached, for report.json."""
    target, reason = plan.goal.bits_per_byte, ended_by(plan, counters)
    if target:
        hit = next((v for v in counters.val if v["bits_per_byte"] <= target), None)
    else:
        hit = {"step": counters.step, "wall_s": counters.wall_s, "tokens": counters.tokens}
        hit = hit if reason else None
    return {
        "asked": plan.goal.model_dump(exclude_none=True),
        "reached": hit is not None,
        "step": hit and hit["step"],
        "wall_s": hit and hit["wall_s"],
        "tokens": hit and hit["tokens"],
        "ended_by": reason,
    }
