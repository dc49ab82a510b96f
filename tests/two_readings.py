"""Make two readings of a pair, and judge them as a tuning does."""

from dataclasses import replace
from typing import Any

from numpy.random import default_rng

from headrace.train.guard import First
from headrace.tuner.judge import Compared, Rules, judge
from headrace.tuner.readings import Reading

CUDA = Rules(device="cuda", precision="bf16")
LIMITS = {"the loss": 0.01, "all parameters": 0.1, "": 0.1}


def firsts() -> list[First]:
    """Return the guard's readings of four batches at the same weights."""
    return [First(6.0, 1.0, {"a": 0.6, "b": 0.8}) for _ in range(4)]


def reading(
    step_s: float = 1.0,
    off: float = 0.0,
    steps: int = 40,
    scatter: float = 0.0,
    seed: int = 0,
) -> Reading:
    """Return four blocks and falling losses, all `off` higher, with noise of size `scatter`."""
    draw, own = default_rng(0), default_rng(seed + 1)
    losses = [8 * (i + 1) ** -0.1 + 0.05 * draw.standard_normal() for i in range(steps)]
    losses = [loss + off + scatter * own.standard_normal() for loss in losses]
    return Reading(
        seconds=[step_s * (1 + 0.001 * i) for i in range(4)],
        losses=losses,
        norms=[1.0] * steps,
        firsts=firsts(),
        limits=LIMITS,
        steps=54,
    )


def judged(after: Reading, before: Reading, kind: Any = "exact", rules: Rules = CUDA) -> Compared:
    """Return the verdict on a reading beside the one before it."""
    return judge(replace(after, beside=before), kind, rules)
