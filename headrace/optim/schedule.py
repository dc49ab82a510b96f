"""Learning-rate schedules: pure functions of the step, so that a resume needs no state."""

import math
from collections.abc import Callable

from headrace.plan.schedule import ScheduleConfig


def learning_rate(config: ScheduleConfig, horizon: int | None) -> Callable[[int], float]:
    """Return a function that gives the share of the learning rate at each step (0 is the first).

    Args:
        config: kind, warmup, decay.
        horizon: the step at which decay ends; None only for `constant` and `inverse_sqrt`.
    """
    kind, warmup, final = config.kind, config.warmup_steps, config.final_fraction

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if kind == "inverse_sqrt":  # arXiv 1706.03762, section 5.3
            return math.sqrt((warmup + 1) / (step + 1))
        if kind == "constant" or horizon is None:
            return 1.0
        if kind == "cosine":  # arXiv 1608.03983
            done = min(1.0, (step - warmup) / max(1, horizon - warmup))
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))
        # warmup_stable_decay (arXiv 2404.06395), by 1 - sqrt at the end (arXiv 2405.18392)
        begins = decay_begins(config, horizon)
        done = min(1.0, max(0.0, (step - begins) / (horizon - begins)))
        return 1 - (1 - final) * (math.sqrt(done) if config.decay_shape == "sqrt" else done)

    return share


def decay_begins(config: ScheduleConfig, horizon: int) -> int:
    """Return the last step that has the whole rate; of warmup_stable_decay the stable phase's end.

    Where the warmup fills the horizon, it is the step before the horizon.
    """
    if config.kind != "warmup_stable_decay":
        return config.warmup_steps
    stable = horizon - config.warmup_steps
    return horizon - max(1, min(round(horizon * config.decay_fraction), stable))
