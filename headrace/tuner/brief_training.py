"""Train for a few steps, whose losses tell techniques apart."""

import torch
from torch import Tensor

from headrace.assemble.filled import evidence_after, newest
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.tuner.readings import Reading, opened, read


def of_length(plan: Plan, steps: int) -> Plan:
    """Return the plan with a schedule and a warmup that end with the training.

    A technique that asks for a longer warmup is left out.
    """
    warmup = min(plan.schedule.warmup_steps, steps)
    ends = plan.schedule.model_copy(update={"steps": steps, "warmup_steps": warmup})
    shorter = warmup < plan.schedule.warmup_steps
    longer = {n for n, keys in plan.made().items() if shorter and "schedule.warmup_steps" in keys}
    kept = {n: technique for n, technique in plan.techniques.items() if n not in longer}
    return plan.replaced(schedule=ends, techniques=kept)


def train_steps(plan: Plan, *, steps: int) -> Reading:
    """Return a reading with the loss of every step on the plan's own text, and evidence.

    The first step with targets is asked already: a technique that is not in force ends the
    training.
    """

    def go(reading: Reading) -> None:
        losses: list[Tensor] = []
        evidence = None
        with opened(of_length(plan, steps), text=True) as (build, micros):
            for index in range(steps):
                numbers = train.step(build, micros(index), index)
                losses.append(numbers[0])
                if evidence is None:
                    evidence = evidence_after(build, numbers, last=index == steps - 1)
            reading.losses = torch.stack(losses).tolist()
            reading.evidence = (evidence or {}) | newest(build)

    return read(go)
