"""Learning-rate schedules: pure functions of the step, so that a resume needs no state."""

import math
from collections.abc import Callable

from headrace.plan.plan import ScheduleConfig


def learning_rate(config: ScheduleConfig, horizon: int | None) -> Callable[[int], float]:
    """Return a function that gives the share of the learning rate at each step (0 is the first).

    Args:
        config: kind, warmup, decay.
        horizon: the step at which decay ends; None only for `constant`.
    """
    kind, warmup, final = config.kind, config.warmup_steps, config.final_fraction

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if kind == "constant" or horizon is None:
            return 1.0
        if kind == "cosine":  # arXiv 1608.03983
            done = min(1.0, (step - warmup) / max(1, horizon - warmup))
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))
        # warmup_stable_decay (arXiv 2404.06395), linear at the end
        decay = max(1, min(round(horizon * config.decay_fraction), horizon - warmup))
        done = min(1.0, max(0.0, (step - (horizon - decay)) / decay))
        return 1 - (1 - final) * done

    return share
