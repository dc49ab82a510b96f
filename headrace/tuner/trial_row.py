"""Hold a trial: a plan that was tried beside the best so far, as a row of the tuner's path."""

from dataclasses import dataclass
from math import ceil, isfinite
from typing import Literal

from headrace.core.statistics import Interval, break_even_steps
from headrace.core.units import format_bytes, format_seconds
from headrace.plan.plan import Plan
from headrace.plan.schedule import ENDLESS
from headrace.plan.technique import Effect

TrialVerdict = Literal["kept", "reverted", "not shown", "refused", "not tried"]
TrialStage = Literal["screen", "accept", "learning", "none"]
COMPILES_S = 0.5
"""Seconds of compiling from which a reader is told when they break even."""

UNCOUNTED = "memory is not counted on a CPU, nor what CUDA graphs hold"
"""Why a peak was not measured."""


@dataclass(frozen=True)
class TrialRow:
    """Hold a plan that was tried beside the best so far.

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
        compile_s: by which the first steps of a run take longer with the change than without it;
            None is not known.
        provisional: kept on fewer steps than are wanted, for there was no time for more, or for a
            target that no run went to.
    """

    number: int
    changes: tuple[str, ...]
    verdict: TrialVerdict
    reason: str
    stage: TrialStage = "none"
    equality: Effect = "exact"
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
    compile_s: float | None = None

    @property
    def predicted_ratio(self) -> float | None:
        """Return what was predicted in the unit of `ratio`; None of a time to a target."""
        return None if self.stage == "learning" else self.predicted_speed

    @property
    def saved_s(self) -> float | None:
        """Return the seconds that the change saves of each step; None where not measured."""
        if self.stage == "learning" or self.ratio is None or self.before_s is None:
            return None
        return self.before_s * (1 - 1 / self.ratio.value)

    @property
    def break_even(self) -> float | None:
        """Return the steps after which its compiling breaks even; None where it saves nothing."""
        if not self.saved_s or self.saved_s < 0 or self.compile_s is None:
            return None
        return break_even_steps(self.compile_s, self.saved_s, 0.0)

    def worth(self, length: "Length | None") -> bool | None:
        """Return whether its compiling breaks even in a run of that length; None if unknown."""
        if self.break_even is None or length is None:
            return None
        return self.break_even <= length.steps

    def bought(self, length: "Length | None") -> str:
        """Render what a kept change buys, and when its compiling breaks even; "" if nothing.

        Args:
            length: of a run of the plan with the change.
        """
        if self.verdict != "kept":
            return ""
        if self.stage == "learning":
            one_s, two_s = self.before_s, self.after_s
            if one_s is None or two_s is None or not (isfinite(one_s) and isfinite(two_s)):
                return ""
            return f"a target in {format_seconds(two_s)} instead of {format_seconds(one_s)}"
        if not self.saved_s or self.saved_s < 0:
            before = self.peak_bytes / self.memory if self.peak_bytes and self.memory else 0.0
            less = before - (self.peak_bytes or 0.0)
            return f"{format_bytes(less)} of the peak" if less > 0 else ""
        words = f"{format_seconds(self.saved_s)} of each step"
        if self.break_even is None or self.compile_s is None or self.compile_s < COMPILES_S:
            return words
        words += f"; {format_seconds(self.compile_s)} of compiling break even after "
        words += f"{ceil(self.break_even):,} steps"
        if length is None:
            return words
        worth = "worth it" if self.worth(length) else "not worth it for this run alone"
        return f"{words}, and this run {length.words}: {worth}"

    def line(self) -> str:
        """Render it in a line; where memory is the aim the ratio of time is named."""
        predicted = (
            "" if self.predicted_ratio is None else f", predicted {self.predicted_ratio:.3f}"
        )
        name = "" if self.predicted_memory is None else "speed "
        measured = "" if self.ratio is None else f" {name}{format_ratio(self.ratio)}{predicted},"
        verdict = f"{self.verdict} provisionally" if self.provisional else self.verdict
        return f"{verdict}: {' '.join(self.changes)}:{measured} {self.reason}".replace("\n", " ")


@dataclass(frozen=True)
class Length:
    """Hold how long a plan's run is.

    Args:
        steps: after which it ends at the latest.
        words: what ends it, as the end of a sentence: "is 2,000 steps".
        ends: likewise in few words: "2,000 steps".
    """

    steps: float
    words: str
    ends: str


def length_of(plan: Plan, step_s: float | None) -> Length | None:
    """Return when a plan's budgets or its schedule end it; None where only a target does.

    Past the end of a schedule the rate falls no more, and what the plan describes is over.

    Args:
        plan: the run.
        step_s: seconds of its step; without them budgets of time and money end nothing.
    """
    goal, price, ends = plan.goal, plan.hardware.dollars_per_hour, []
    horizon = 0 if plan.schedule.kind in ENDLESS else plan.schedule.steps
    for steps in (plan.goal_steps, horizon):
        if steps:
            ends.append(Length(float(steps), f"is {steps:,} steps", f"{steps:,} steps"))
    minutes = [(goal.minutes, f"{goal.minutes:g} minutes")] if goal.minutes else []
    if goal.dollars and price:
        minutes.append((60 * goal.dollars / price, f"${goal.dollars:,.2f}"))
    for long, words in minutes if step_s else []:
        steps = 60 * long / (step_s or 1.0)
        ends.append(Length(steps, f"is {words}, some {steps:,.0f} steps", words))
    return min(ends, key=lambda one: one.steps, default=None)


def format_ratio(ratio: Interval) -> str:
    """Render a ratio with its interval, where there is one."""
    if ratio.n < 2:
        return f"{ratio.value:.3f} (n = 1)"
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
