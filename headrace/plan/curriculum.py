"""Define the table `data.curriculum` of a plan: how hard a text is, and when harder text may come.

A pacing function says which share of the easiest rows is open at a place of the run, from `start`
to all. It is cut into a finite number of stages, so that the order is computed and not kept.
`step` and `exponential` are the single-step and exponential pacing of Hacohen and Weinshall (2019,
arXiv 1904.03626, section 2.2); `linear` and `root` are those of Platanios et al. (2019, arXiv
1903.09848, equations 6 and 7, p = 2); `sorted` is the strict order of Bengio et al. (2009,
"Curriculum Learning").
"""

import math
from typing import Literal

from pydantic import Field

from headrace.core.strict import Strict
from headrace.plan.until import end_step

Pacing = Literal["linear", "root", "step", "exponential", "sorted"]


class CurriculumKnobs(Strict):
    """The knobs of a curriculum are what is hard, what comes first, and how fast the rest opens."""

    score: str = Field(default="compression", pattern="^(compression|length|(loss|column):.+)$")
    """What is hard: `compression` (bytes that zlib makes of a byte of text), `length` (tokens of a
    document), `loss:runs/NAME` (nats per token under a trained run's model), or `column:FIELD` (a
    number of the source's rows; dots lead into it, as in `column:meta.difficulty`). A row's score
    is the mean of its documents', weighted by their tokens in it."""
    first: Literal["easy", "hard"] = "easy"
    """Whether the lowest scores come first, or the highest: an anti-curriculum."""
    pacing: Pacing = "root"
    """How the open share grows; `sorted` reads every row in the order of its score instead."""
    start: float = Field(default=0.2, gt=0, le=1)
    """Share of the rows that is open in the first step; `sorted` has no use for it. Tuner range
    0.05 to 0.5."""
    until: float = Field(default=0.5, gt=0, le=10**15)
    """When all rows are open: at most 1 is a share of schedule.steps or goal.steps, above it is a
    step. Tuner range 0.2 to 0.9."""
    stages: int = Field(default=16, ge=1, le=256)
    """Stages into which the pacing function is cut; within one the open share stays."""

    @property
    def column(self) -> str:
        """Return the field of the source's rows that scores them; "" where none does."""
        kind, _, field = self.score.partition(":")
        return field if kind == "column" else ""

    @property
    def run(self) -> str:
        """Return the folder of the run that scores documents; "" where none does."""
        kind, _, folder = self.score.partition(":")
        return folder if kind == "loss" else ""

    def ends(self, horizon: int | None) -> int | None:
        """Return the first step at which all rows are open; None where the horizon is not known.

        Args:
            horizon: last step of the run's schedule or goal.
        """
        return end_step(self.until, horizon)

    def open_share(self, place: float) -> float:
        """Return the share of the rows that is open at a place of the pacing [0, 1]."""
        start = self.start
        if place >= 1 or self.pacing == "sorted":
            return 1.0
        if self.pacing == "linear":
            return start + (1 - start) * place
        if self.pacing == "root":
            return math.sqrt(start**2 + (1 - start**2) * place)
        if self.pacing == "exponential":
            return start ** (1 - place)
        return start

    def open_shares(self, ends: int) -> list[tuple[int, float]]:
        """Return (first step, open share) of each stage; the last one has all rows.

        Args:
            ends: the first step at which all rows are open.
        """
        count = self.stages if self.pacing not in ("step", "sorted") else 1
        by_step = {ends * n // count: self.open_share(n / count) for n in range(count + 1)}
        return sorted(by_step.items())  # of several stages in one step the last counts


class CurriculumConfig(CurriculumKnobs):
    """Read easy text first: a score for every document, and how fast harder rows open."""
