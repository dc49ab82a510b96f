"""Say where a part of the run ends: the knob `until`, as a share of the run or as a step.

At most 1 is a share of where the schedule ends, above it is a step. Techniques never import each
other, so those that change something until then share this: the step, what refuses a share of an
end that nobody says, what doubts an end behind the run's, and values that double until it.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from headrace.core.remedy import mend
from headrace.plan.technique import Doubt, Technique, Unsupported

T = TypeVar("T")

SHORTEST = 3
"""Steps of a run below which no end is doubted: it is a trial of whether anything runs."""


def end_step(until: float, horizon: int | None) -> int | None:
    """Return the first step after that part of the run; None where the horizon is not known.

    Args:
        until: at most 1 is a share of the horizon, above it a step.
        horizon: the step at which the schedule ends.
    """
    if until > 1:
        return round(until)
    return None if horizon is None else max(1, round(until * horizon))


def unknown_end(key: str, share: float, step: int = 100) -> Unsupported:
    """Return the refusal of a share of a run whose end the plan does not say.

    Args:
        key: of the plan, as in `techniques.batch_ramp.until`.
        share: its value.
        step: what the key could be instead.
    """
    return Unsupported(
        f"{key} = {share:g} is a share of schedule.steps or goal.steps, and the plan has neither",
        mend("schedule.steps=1000") | mend(f"{key}={step}"),
    )


def unreached_end(
    technique: Technique[Any], plan: Any, ends: int | None, does: str, so: str
) -> Doubt | None:
    """Return the doubt about a part of the run that is longer than the run; None if it is not.

    Args:
        technique: whose knob `until` it is.
        plan: the run.
        ends: the first step after that part.
        does: what the technique does until then, as in `makes rows whole`.
        so: what follows for the run.
    """
    lasts = plan.goal_steps
    if ends is None or lasts is None or lasts < SHORTEST or ends < lasts:
        return None
    return Doubt(
        f"{technique.name()} {does} after {ends:,} steps, and the run has {lasts:,}: {so}",
        mend(f"techniques.{technique.name()}.until={max(2, lasts // 3)}"),
    )


def doubled(start: int, whole: int) -> list[int]:
    """Return `start`, its doublings that are below `whole`, and `whole`."""
    values = [start]
    while values[-1] * 2 < whole:
        values.append(values[-1] * 2)
    return [*values, whole]


def value_at(step: int, values: Sequence[T], ends: int) -> T:
    """Return the value of a step: all but the last share the steps before `ends` evenly."""
    last = len(values) - 1
    return values[min(step * last // ends, last)]
