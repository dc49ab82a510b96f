"""Say where it was measured before that a change which rounds otherwise learns the same.

A large step leaves a tuning no time for the hundreds that show equal learning, and two trainings
that differ by rounding alone drift apart by more than the margin: at 1B, 121 steps left 0.018 nats
open. So a change may rest on receipts, as a card's numbers do. `benchmarks/equal_learning.py`
trains plans with it and without it for 1,000 steps, over shapes and seeds, and writes
`equal_learning.json` from the rows of results/equal_learning.jsonl. A receipt holds for runs of its
precision whose model is no narrower than the narrowest that was measured, whose products average
more. What the run itself computes is compared all the same: gradients at the same weights, and the
losses of the steps that were timed, which must not speak against it (equality.py).

A change of several such techniques is shown where the upper ends of their intervals together lie
below the margin.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headrace.plan.plan import Plan
from headrace.tuner.effects import effect_of, rounding_words

FILE = Path(__file__).parent / "equal_learning.json"
LEAST_STEPS, LEAST_SHAPES, LEAST_SEEDS = 1000, 2, 5
"""Fewest steps of each training, shapes, and pairs of trainings that a receipt may rest on."""


@dataclass(frozen=True)
class EqualLearning:
    """Hold by how much a technique was measured to learn worse.

    Args:
        technique: its name.
        knobs: values of knobs that it holds for.
        precision: of the runs, "bf16" or "fp32".
        least_dim: features of the narrowest model.
        shapes: the shapes that were trained.
        seeds: pairs of trainings, over all shapes.
        steps: of each training.
        nats: the mean extra loss per token at the end of the training.
        high: upper end of its interval, one-sided, 95%.
        hardware: the device.
    """

    technique: str
    knobs: Mapping[str, Any]
    precision: str
    least_dim: int
    shapes: tuple[str, ...]
    seeds: int
    steps: int
    nats: float
    high: float
    hardware: str

    def holds(self, plan: Plan, precision: str) -> bool:
        """Return whether it says something of a plan, which has the technique and runs so."""
        technique = plan.techniques[self.technique]
        return (
            self.steps >= LEAST_STEPS
            and len(self.shapes) >= LEAST_SHAPES
            and self.seeds >= LEAST_SEEDS
            and precision == self.precision
            and plan.model.dim >= self.least_dim
            and all(getattr(technique, knob) == value for knob, value in self.knobs.items())
        )

    @property
    def text(self) -> str:
        """Return the receipt in words."""
        trained = f"{self.seeds} pairs of {self.steps:,} steps of {' and '.join(self.shapes)}"
        off = f"{self.nats:+.4f} nats (at most {self.high:+.4f})"
        return f"{self.technique} was off by {off} in {trained}"


@cache
def receipts() -> tuple[EqualLearning, ...]:
    """Return the receipts of this version."""
    rows = json.loads(FILE.read_text())
    return tuple(EqualLearning(**{**row, "shapes": tuple(row["shapes"])}) for row in rows)


def shown_before(
    first: Plan,
    second: Plan,
    margin: float,
    precision: str,
    known: Sequence[EqualLearning] | None = None,
) -> str:
    """Return what shows that a change learns the same, in words; "" where nothing does.

    Args:
        first: the plan as it is.
        second: with techniques that round otherwise, and with changes that are exact.
        margin: nats per token that all of them may lose together.
        precision: of the plans where they run, "bf16" or "fp32".
        known: receipts; this version's, without.
    """
    if effect_of(first, second) != "approximate":
        return ""
    added = second.techniques.keys() - first.techniques.keys()
    rounding = {word.partition("=")[0] for word in rounding_words(first, second)}
    names = {name for name in added if f"+{name}" in rounding}
    knobs = {f"techniques.{name}." for name in names}
    if any(word[1:] not in names and not word.startswith(tuple(knobs)) for word in rounding):
        return ""  # a technique that goes, other knobs of one that stays, or a key
    found = []
    for name in sorted(names):
        mine = [r for r in (receipts() if known is None else known) if r.technique == name]
        holding = [r for r in mine if r.holds(second, precision)]
        if not holding:
            return ""
        found.append(min(holding, key=lambda r: r.high))
    if sum(max(0.0, r.high) for r in found) >= margin:
        return ""
    return "; ".join(r.text for r in found)
