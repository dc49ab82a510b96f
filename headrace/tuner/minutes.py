"""Predict what a trial takes from those that were measured before it.

No trial begins whose verdict cannot come within what is left; it says what it needs instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from headrace.core.units import format_seconds
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage
from headrace.tuner.equality import STRETCH
from headrace.tuner.paired_blocks import FITS, PAIR_STEPS, TRAINED

SOONER = 0.5
"""Share of the seconds that the first pair took before its timed steps that may be enough for the
next: then caches are warm, and a process runs. Later pairs replace this guess."""


@dataclass(frozen=True)
class TrialSeconds:
    """Hold the seconds that a trial needs.

    Args:
        ready_s: building, compiling and warming both plans; 0 where nothing is known of it.
        timed_s: a look at both.
        trained_s: training both until an approximate change can be shown to learn the same.
        steps: of each in that training.
    """

    ready_s: float
    timed_s: float
    trained_s: float = 0.0
    steps: int = 0

    @property
    def seconds(self) -> float:
        """Return all of them, in seconds."""
        return self.ready_s + self.timed_s + self.trained_s

    @property
    def limit_s(self) -> float:
        """Return the limit of a reading in which they fit, in seconds."""
        return max(self.seconds / FITS, self.trained_s / TRAINED)

    @property
    def untrained(self) -> "TrialSeconds":
        """Return what the trial needs where no training has to show anything."""
        return replace(self, trained_s=0.0)

    @property
    def words(self) -> str:
        """Render what they are for."""
        parts = [f"ready in {format_seconds(self.ready_s)}"] if self.ready_s else []
        parts += [f"a look in {format_seconds(self.timed_s)}"]
        if self.trained_s:
            parts.append(f"{self.steps:,} steps of both in {format_seconds(self.trained_s)}")
        return ", ".join(parts)


def compiles(plan: Plan) -> bool:
    """Return whether a part of the plan compiles before its first step is done."""
    return any(t.stage is Stage.COMPILE for t in plan.techniques.values())


def needs(
    ready: Sequence[tuple[bool, float]],
    compiled: bool,
    steps: int,
    step_s: float,
    after_s: float,
    *,
    looks: bool = False,
) -> TrialSeconds | None:
    """Return what a trial takes; None where nothing like it was measured.

    Where a training must show that it learns the same, that alone may be too long, so the trial has
    an answer before anything was measured, which leaves out what nobody knows.

    Args:
        ready: of each pair so far whether the second plan compiles, and its seconds until both
            were warm.
        compiled: whether this one does.
        steps: of each in a training that must show that it learns the same; 0 for none.
        step_s: of the plan before, measured or predicted.
        after_s: of the changed plan, as it is predicted.
        looks: the training is one in stretches, after each of which the plan before takes a step
            with the other's weights.
    """
    alike = [seconds for one, seconds in ready if one == compiled]
    if not step_s or not (alike or steps):
        return None
    first = SOONER if alike and alike[0] == ready[0][1] else 1.0
    ready_s = median(alike[1:]) if len(alike) > 1 else first * sum(alike)
    trained_s = steps * (step_s + after_s + looks * step_s / STRETCH)
    return TrialSeconds(ready_s, PAIR_STEPS * step_s, trained_s, steps)
