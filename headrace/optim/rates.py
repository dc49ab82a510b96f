"""Compare the learning rates that a run's optimizers have with a curve that was asked for."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.optim.schedule import learning_rate
from headrace.plan.plan import Plan
from headrace.plan.technique import Evidence

POINTS = 256
"""Number of steps, spread over the horizon, at which two curves are compared."""


def follows_schedule(
    plan: Plan,
    keys: Mapping[str, Any],
    given: Callable[[int], float],
    step: float,
    optimizers: Iterable[Any],
) -> Evidence:
    """Return whether every optimizer's rate is that of the plan's schedule with `keys` in it.

    Args:
        plan: the run.
        keys: keys of the table `schedule` with their values, as a technique asks for them.
        given: what gives the run its share of the rate at each step.
        step: the newest step.
        optimizers: those of the run, after that step.
    """
    wanted = learning_rate(plan.schedule.model_copy(update=dict(keys)), plan.horizon_steps)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not groups:
        return Evidence(None, "this rank trains no weights")
    newest, last = int(step), plan.horizon_steps or POINTS
    in_force = all(
        group["lr"] == group["initial_lr"] * group["lr_factor"] * given(newest) for group in groups
    )
    # No curve begins at 0, but a trial holds the weights still for its first steps.
    delay = next((number for number in range(last + 1) if given(number) > 0), 0)
    steps = {number * last // POINTS for number in range(POINTS + 1)} | {max(0, newest - delay)}
    same = all(given(delay + number) == wanted(number) for number in steps)
    return Evidence(
        active=in_force and same,
        detail=f"after step {newest + 1} the rate of {len(groups)} groups of weights is "
        f"{given(newest):.3g} of their highest, and {given(last):.3g} at step {last}",
        numbers={"groups": len(groups), "share": given(newest), "last_share": given(last)},
    )
