"""Compare the learning rates that a run's optimizers have with a curve that was asked for."""

from typing import Any

from headrace.assemble.sockets import Build
from headrace.optim.schedule import learning_rate
from headrace.plan.technique import Evidence

POINTS = 256
"""Number of steps, spread over the horizon, at which two curves are compared."""


def follows_schedule(build: Build, keys: dict[str, Any]) -> Evidence:
    """Return whether every optimizer's rate is that of the plan's schedule with `keys` in it.

    The rates of the last step are read from the optimizers, those of others from the socket.

    Args:
        build: the run, after a step.
        keys: keys of the table `schedule` with their values, as a technique asks for them.
    """
    plan, step = build.plan, int(build.now.get("step", 0))
    wanted = learning_rate(plan.schedule.model_copy(update=keys), plan.horizon_steps)
    groups = [g for optimizer in build.optimizers.values() for g in optimizer.param_groups]
    if not groups:
        return Evidence(None, "this rank trains no weights")
    given, last = build.values["lr"], plan.horizon_steps or POINTS
    in_force = all(group["lr"] == group["initial_lr"] * given(step) for group in groups)
    # No curve begins at 0, but a trial holds the weights still for its first steps.
    held = next((number for number in range(last + 1) if given(number) > 0), 0)
    steps = {number * last // POINTS for number in range(POINTS + 1)} | {max(0, step - held)}
    same = all(given(held + number) == wanted(number) for number in steps)
    return Evidence(
        active=in_force and same,
        detail=f"after step {step + 1} the rate of {len(groups)} groups of weights is "
        f"{given(step):.3g} of their highest, and {given(last):.3g} at step {last}",
        numbers={"groups": len(groups), "share": given(step), "last_share": given(last)},
    )
