"""Pair predictions of plans and forecasts of gains with their outcomes.

A prediction of a plan stands before its outcome in one file. A forecast of a gain has a file of its
own, so only the day of its row gives the order.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from scoring.accuracy import relative_errors
from scoring.rows import (
    FORECASTS,
    PLANS,
    RECORDED_FORECASTS,
    Forecast,
    Outcome,
    Prediction,
    Topic,
    broken,
)

T = TypeVar("T")
Id = str | int
"""The name of a plan, which its prediction and its outcome share."""


def taken(topic: Topic[T], results: Path) -> list[T]:
    """Return the rows of a topic that were retracted."""
    return [row for row, why in topic.history(results) if why is not None]


def forecasts_ahead(results: Path) -> tuple[list[Forecast], dict[str, int]]:
    """Return forecasts written by the day of their outcome; count late, retracted and refused ones.

    A forecast counts as late, too, where forecasts_said.jsonl holds no standing row of it.
    """
    topic = FORECASTS.read(results)
    days: dict[tuple[Any, ...], str] = {}
    for row in RECORDED_FORECASTS.read(results).rows:
        days.setdefault(row.same(row.commit), row.date)
    rows = [
        row
        for row in topic.rows
        if (day := days.get(row.same(row.forecast_commit))) is not None and day <= row.date
    ]
    return rows, {
        "late": len(topic.rows) - len(rows),
        "retracted": len(taken(FORECASTS, results)),
        "refused": topic.refused,
    }


@dataclass
class Pairs:
    """Hold predictions written before their outcome, without one yet, and after it."""

    scored: list[tuple[Prediction, Outcome]] = field(default_factory=list)
    open: list[Prediction] = field(default_factory=list)
    after_outcome: list[Prediction] = field(default_factory=list)

    def tier(self, name: str) -> "Pairs":
        """Return the pairs of one tier."""
        return Pairs(
            [(p, o) for p, o in self.scored if p.tier == name],
            [p for p in self.open if p.tier == name],
            [p for p in self.after_outcome if p.tier == name],
        )

    def on(self, *, cpu: bool) -> "Pairs":
        """Return the pairs whose outcome ran on a CPU, or on anything else."""
        return Pairs(
            [(p, o) for p, o in self.scored if o.on_cpu is cpu],
            [p for p in self.open if p.for_cpu is cpu],
            [p for p in self.after_outcome if p.for_cpu is cpu],
        )

    def both(self, what: str) -> list[tuple[Id, float, float]]:
        """Return plan, predicted and measured value where both sides give a number for `what`."""
        values = [(p.id, getattr(p, what), getattr(o, what)) for p, o in self.scored]
        return [(plan, p, m) for plan, p, m in values if p is not None and m is not None]

    def errors(self, what: str) -> list[float]:
        """Return the relative errors of the predictions of `what`."""
        both = self.both(what)
        return relative_errors([p for _, p, _ in both], [m for *_, m in both]) if both else []


def paired(results: Path) -> tuple[Pairs, int]:
    """Return predictions with their outcomes, and how many rows were refused.

    Raises:
        ConfigError: a row is wrong, or a second one of the same plan.
    """
    topic = PLANS.read(results)
    outcomes: dict[Id, Outcome] = {}
    before: dict[tuple[Id, str], Prediction] = {}
    pairs = Pairs()
    for where, row in zip(topic.places, topic.rows, strict=True):
        if isinstance(row, Outcome):
            if row.id in outcomes:
                raise broken(where, f"a second outcome of {row.id!r}")
            outcomes[row.id] = row
        elif row.id in outcomes:
            pairs.after_outcome.append(row)
        elif (row.id, row.tier) in before:
            raise broken(where, f"a second prediction of {row.id!r} at the tier {row.tier}")
        else:
            before[row.id, row.tier] = row
    for prediction in before.values():
        outcome = outcomes.get(prediction.id)
        if outcome is None:
            pairs.open.append(prediction)
        else:
            pairs.scored.append((prediction, outcome))
    return pairs, topic.refused


def retracted(results: Path) -> list[tuple[Prediction, Outcome, str]]:
    """Return predictions that stood before their outcomes and were retracted, with the reasons."""
    outcomes: dict[Id, Outcome] = {}
    before: list[tuple[Prediction, str]] = []
    for row, why in PLANS.history(results):
        if isinstance(row, Prediction):
            if why is not None and row.id not in outcomes:
                before.append((row, why))
        elif why is None:
            outcomes[row.id] = row
    return [(p, outcomes[p.id], why) for p, why in before if p.id in outcomes]
