"""Define the table `schedule` of a plan: how the learning rate depends on the step."""

from typing import Annotated, Literal

from pydantic import Field

from headrace.core.limits import MOST
from headrace.core.strict import Strict

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A share from 0 to 1."""
ENDLESS = ("constant", "inverse_sqrt")
"""Kinds of schedule that need no horizon."""


class ScheduleConfig(Strict):
    """Scale the learning rate: its share of `optimizer.lr` depends on the step alone."""

    kind: Literal["cosine", "warmup_stable_decay", "inverse_sqrt", "constant"] = "cosine"
    """The curve after the warmup; inverse_sqrt and constant have no end."""
    warmup_steps: int = Field(default=0, ge=0, le=MOST)
    """Steps of linear rise from zero."""
    decay_fraction: Fraction = 0.2
    """Last share of the horizon in which warmup_stable_decay falls."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """How warmup_stable_decay falls: `linear`, or `sqrt`, which is 1 - sqrt(share of the decay)."""
    final_fraction: Fraction = 0.1
    """Share of the learning rate at the horizon, of cosine and warmup_stable_decay."""
    steps: int | None = Field(default=None, ge=1, le=MOST)
    """The horizon in steps; without it the horizon is that of goal.steps or goal.tokens."""
