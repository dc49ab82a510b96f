"""A plan that was tried, as a row of the tuner's way."""

from dataclasses import dataclass
from typing import Literal

from headrace.core.statistics import Interval
from headrace.trials.kinds import Kind

Became = Literal["kept", "reverted", "not shown", "refused", "not tried"]
Stage = Literal["screen", "accept", "learning", "none"]


@dataclass(frozen=True)
class Step:
    """A plan that was tried beside the best so far.

    Args:
        number: from 1.
        changes: that made it of the best so far, in words.
        verdict: what became of it; "not shown" looked better, and is not kept: what was measured
            could not show that it is, or that it learns the same.
        reason: why.
        stage: "screen" and "accept" were measured, "learning" was trained over seeds.
        equality: what it does to learning.
        predicted: how much better it was expected to be for the aim: 1.1 is a tenth; None is
            unknown. Plans are tried in this order. For memory it is the saving, less for slower
            steps.
        predicted_speed: likewise the time of a step before over after, as `ratio` is.
        predicted_memory: likewise the peak after over before, as `memory` is, where that is the
            aim.
        ratio: measured: time of a step (or to the target) before over after.
        memory: peak after over before; None where it is not measured.
        loss, noise: difference of the mean losses, and what another seed moves them by, in nats.
        steps: timed of each plan.
        seconds: that it took.
        spent_s: that all trials had taken by then.
        before_s, after_s: seconds of a step (or to the target).
        peak_bytes: allocated.
        plan_sha256: of the plan that was tried.
        provisional: kept on fewer steps than are wanted, for there was no time for more, or for a
            target that no run went to.
    """

    number: int
    changes: tuple[str, ...]
    verdict: Became
    reason: str
    stage: Stage = "none"
    equality: Kind = "exact"
    predicted: float | None = None
    ratio: Interval | None = None
    memory: float | None = None
    loss: float | None = None
    noise: float | None = None
    steps: int = 0
    seconds: float = 0.0
    spent_s: float = 0.0
    before_s: float | None = None
    after_s: float | None = None
    peak_bytes: float | None = None
    plan_sha256: str = ""
    provisional: bool = False
    predicted_speed: float | None = None
    predicted_memory: float | None = None

    @property
    def foretold(self) -> float | None:
        """What was predicted in the unit of `ratio`; of a time to a target nothing is."""
        return None if self.stage == "learning" else self.predicted_speed

    def line(self) -> str:
        """It in a line; where memory is the aim the ratio of time is named."""
        said = "" if self.foretold is None else f", predicted {self.foretold:.3f}"
        name = "" if self.predicted_memory is None else "speed "
        found = "" if self.ratio is None else f" {name}{told(self.ratio)}{said},"
        verdict = f"{self.verdict} provisionally" if self.provisional else self.verdict
        return f"{verdict}: {' '.join(self.changes)}:{found} {self.reason}".replace("\n", " ")


def told(ratio: Interval) -> str:
    """A ratio with its interval, where there is one."""
    if ratio.n < 2:
        return f"{ratio.value:.3f} (n = 1)"
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
