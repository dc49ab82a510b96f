"""Compare the doctor's answers about natural runs with the measured gain of every change.

A natural run has no planted fault: its true bottleneck is the one whose best remedy gains most.
The answer about a run stands in natural_said.jsonl before anything is measured; natural.jsonl has
the measured gain of each change. A gain is the time of a step before over after, less 1.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from scoring.rows import (
    NATURAL,
    NATURAL_ANSWERS,
    NaturalAnswer,
    NaturalOutcome,
    Spread,
    broken,
)

NEAR = 0.8
"""Share of the best measured gain that a first remedy must reach to be right."""
HEALTHY_GAIN = 0.05
"""The gain up to which a run is healthy: no change gains more."""
WRONGED_GAIN = 0.10
"""The gain above which a run was wrongly called healthy: some change gains more."""
LOSS = -0.01
"""A measured gain below this is a loss; two readings of one plan differ by less."""
FEWEST_OTHERS = 2
"""Changes beside the first remedy that must have run before a best one counts as the best."""

Why = Literal[
    "near the best",
    "healthy, and it is",
    "no loss where nothing gains",
    "healthy was said",
    "no remedy was said",
    "the first remedy was refused",
    "the first remedy was not measured",
    "the first remedy is a loss",
    "another gains more",
]
"""The reasons why a run counts as right (the first three) or wrong, as a table shows them."""
RIGHT: tuple[Why, ...] = ("near the best", "healthy, and it is", "no loss where nothing gains")


class Change(NamedTuple):
    """Hold a change of a run, and its measured gain."""

    words: tuple[str, ...]
    gain: Spread


@dataclass(frozen=True)
class Run:
    """Hold a natural run: the doctor's answer, and the outcome of every change.

    Args:
        answer: the answer, given before anything was measured.
        came: the measured outcome.
    """

    answer: NaturalAnswer
    came: NaturalOutcome

    @property
    def measured(self) -> list[Change]:
        """Return the changes that ran, the one that gains most first."""
        ran = [Change(tuple(m.change), m.gain) for m in self.came.measured if m.gain is not None]
        return sorted(ran, key=lambda change: -change.gain.value)

    @property
    def best(self) -> Change | None:
        """Return the change that gains most; None where none gains."""
        ran = self.measured
        return ran[0] if ran and ran[0].gain.value > 0 else None

    @property
    def first(self) -> Spread | None:
        """Return the gain of the first remedy; None where there was none, or it did not run."""
        first = self.answer.first
        gains = {change.words: change.gain for change in self.measured}
        return gains.get(tuple(first.change)) if first else None

    @property
    def others(self) -> int:
        """Return how many changes ran beside the first remedy."""
        return len(self.measured) - (self.first is not None)

    @property
    def why(self) -> Why:
        """Return why the run counts as right or wrong, in the words of a table."""
        first, gain = self.answer.first, self.first
        best = self.best.gain.value if self.best else 0.0
        gains = best > HEALTHY_GAIN
        if self.answer.healthy or first is None:
            right: Why = "healthy, and it is"
            return right if not gains else _silent(self.answer)
        if gain is None:
            words = tuple(first.change)
            refused = any(tuple(m.change) == words for m in self.came.measured)
            return (
                "the first remedy was refused" if refused else "the first remedy was not measured"
            )
        if gain.value < LOSS:
            return "the first remedy is a loss"
        if not gains:
            return "no loss where nothing gains"
        return "near the best" if gain.value >= NEAR * best else "another gains more"

    @property
    def right(self) -> bool:
        """Return whether the first remedy is near the best, or the run is rightly healthy."""
        return self.why in RIGHT

    @property
    def counts(self) -> bool:
        """Return whether enough was measured; a right verdict needs `FEWEST_OTHERS` changes."""
        return not self.right or self.others >= FEWEST_OTHERS

    @property
    def healthy_wrong(self) -> bool:
        """Return whether the run was called healthy though some change gains more than a tenth."""
        return self.answer.healthy and bool(self.best and self.best.gain.value > WRONGED_GAIN)

    @property
    def forecast(self) -> tuple[Spread, Spread] | None:
        """Return the forecast and the measured gain of the first remedy; None without both."""
        first, gain = self.answer.first, self.first
        return (first.gain, gain) if first and first.gain and gain else None


def _silent(answer: NaturalAnswer) -> Why:
    return "healthy was said" if answer.healthy else "no remedy was said"


@dataclass(frozen=True)
class Runs:
    """Hold natural runs by whether they count.

    Args:
        scored: runs whose answer stood before, and of which enough was measured.
        thin: runs whose answer stood before, with too few measured changes to be called right.
        unanswered: outcomes without a standing answer from before.
        open: answers without an outcome yet.
        retracted: retracted outcomes with their answers.
        refused: rows of runs that could not be measured at all.
    """

    scored: list[Run]
    thin: list[Run]
    unanswered: list[NaturalOutcome]
    open: list[NaturalAnswer]
    retracted: list[Run]
    refused: int


def natural(results: Path) -> Runs:
    """Return every natural run of a folder of rows.

    An outcome counts only with a standing row of the same run and hardware, of that day or before,
    whose first remedy is the one in the outcome, since the answer may not change afterwards.

    Raises:
        ConfigError: a row is wrong, or a run has a second one that stands.
    """
    answers, came = NATURAL_ANSWERS.read(results), NATURAL.read(results)
    answered = {row.key: row for row in answers.rows}
    for standing in (answers, came):
        for key, times in Counter(row.key for row in standing.rows).items():
            if times > 1:
                keys = [row.key for row in standing.rows]
                earlier = len(keys) - 1 - keys[::-1].index(key)
                raise broken(standing.places[earlier], f"a second row of {' on '.join(key)!r}")
    runs, unanswered = list[Run](), list[NaturalOutcome]()
    for row in came.rows:
        before = answered.get(row.key)
        if before is not None and _ahead(before, row):
            runs.append(Run(before, row))
        else:
            unanswered.append(row)
    measured = {row.key for row in came.rows}
    return Runs(
        [run for run in runs if run.counts],
        [run for run in runs if not run.counts],
        unanswered,
        [row for row in answers.rows if row.key not in measured],
        _retracted(results),
        came.refused,
    )


def _ahead(answer: NaturalAnswer, came: NaturalOutcome) -> bool:
    """Return whether a row was written by the day of an outcome and belongs to it."""
    same = came.answer_commit in (None, answer.commit)
    first = answer.first.change if answer.first else None
    return same and answer.date <= came.date and first == (came.first_change or None)


def _retracted(results: Path) -> list[Run]:
    """Return the retracted outcomes, each with an earlier row that it was measured for."""
    answered = [row for row, _ in NATURAL_ANSWERS.history(results)]
    gone: Sequence[NaturalOutcome] = [r for r, why in NATURAL.history(results) if why is not None]
    pairs = [
        (next((s for s in answered if s.key == row.key and _ahead(s, row)), None), row)
        for row in gone
    ]
    return [Run(before, row) for before, row in pairs if before is not None]
