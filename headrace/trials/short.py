"""A short training, whose losses tell techniques apart."""

import torch
from torch import Tensor

from headrace import train
from headrace.core.plan import Plan
from headrace.filled import check_active
from headrace.trials.readings import Reading, opened, read


def of_length(plan: Plan, steps: int) -> Plan:
    """The plan with a schedule that ends with the training, and a warmup that fits into it."""
    warmup = min(plan.schedule.warmup_steps, steps)
    ends = plan.schedule.model_copy(update={"steps": steps, "warmup_steps": warmup})
    return plan.replaced(schedule=ends)


def train_steps(plan: Plan, *, steps: int) -> Reading:
    """The loss of every step on the plan's own text, and evidence after the first."""

    def go(found: Reading) -> None:
        losses: list[Tensor] = []
        with opened(of_length(plan, steps), text=True) as (build, micros):
            for index in range(steps):
                losses.append(train.step(build, micros(index), index)[0])
                if index == 0:
                    found.evidence = {n: e.detail for n, e in check_active(build).items()}
            found.losses = torch.stack(losses).tolist()

    return read(go)
