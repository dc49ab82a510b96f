"""A short training, whose losses tell techniques apart."""

import torch
from torch import Tensor

from headrace.assemble.filled import evidence_after, newest
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.tuner.readings import Reading, opened, read


def of_length(plan: Plan, steps: int) -> Plan:
    """The plan with a schedule that ends with the training, and a warmup that fits into it."""
    warmup = min(plan.schedule.warmup_steps, steps)
    ends = plan.schedule.model_copy(update={"steps": steps, "warmup_steps": warmup})
    return plan.replaced(schedule=ends)


def train_steps(plan: Plan, *, steps: int) -> Reading:
    """The loss of every step on the plan's own text, and evidence after the last.

    The first step with targets is asked already: what is not in force then ends the training.
    """

    def go(found: Reading) -> None:
        losses: list[Tensor] = []
        told = None
        with opened(of_length(plan, steps), text=True) as (build, micros):
            for index in range(steps):
                numbers = train.step(build, micros(index), index)
                losses.append(numbers[0])
                if told is None:
                    told = evidence_after(build, numbers, last=index == steps - 1)
            found.losses = torch.stack(losses).tolist()
            found.evidence = (told or {}) | newest(build)

    return read(go)
