"""Find a learning rate by one short run in which it grows: the range test (arXiv 1506.01186).

The plan's own step is taken for a hundred or two batches while the learning rate grows
exponentially. The loss falls slowly, then fast, then no more, and rises where the rate is too high.
The suggestion is where it has made somewhat more than half of its fall, less where the run is
longer than the test: the best rate falls with the horizon (arXiv 2409.19913).
The factor grows for all parameter groups alike, so that several optimizers keep the ratios of their
rates, and the answer names each. The run is a scratch one (tuner/scratch.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.limits import LR_STEPS
from headrace.core.progress import Progress
from headrace.core.units import format_count
from headrace.costs.count import parameters_in_blocks
from headrace.plan.plan import Plan
from headrace.predict.scaling import is_swept, step_law_rate
from headrace.report.chart import ChartAxis, ChartLine, line_chart
from headrace.report.page import Safe, figure, legend, swatch
from headrace.train.train import step
from headrace.tuner.scratch import scratch_build, write_measured

LOWEST, HIGHEST = 1e-5, 1.0
"""Learning rates between which the test runs, as a rule: AdamW learns little below, and diverges
above."""
LAG = 1 / 3
"""Decades of the rate that the smoothed loss lags behind: ten steps of 150 over five decades."""
FALLEN = 0.55
"""Share of its whole fall that the smoothed loss has made where the rate is taken, chosen by sweeps
of two tiny decoders. Measured after (learning.jsonl, 400 steps, one seed), the loss at the
suggestion is 0.5% below, 0.6% (with Muon) and 0.8% above the best of a ladder of powers of two."""
HORIZON = -0.32
"""Power of a run's length with which its best rate varies, all else equal (arXiv 2409.19913)."""
RISEN, NOISE = 0.5, 0.2
"""Share of its fall that the smoothed loss may rise again before the test ends, and how many nats
it may in any case."""


@dataclass(frozen=True)
class RangeTest:
    """Hold the curve of a range test, and the rate that it suggests.

    Args:
        plan: the plan that was tested.
        rates: [N] the learning rate of AdamW at each step.
        losses: [N] the training loss of each step, in nats a token; the last may not be finite.
        parameters: parameters of the model without the embedding and the output matrix.
    """

    plan: Plan
    rates: list[float]
    losses: list[float]
    parameters: int

    @property
    def growth(self) -> float:
        """Return the decades that the rate grows by from one step to the next."""
        return math.log10(self.rates[1] / self.rates[0])

    @property
    def smoothed(self) -> list[float]:
        """Return the smoothed losses, [N]."""
        return smooth(self.losses, self.growth)

    @property
    def fall(self) -> float:
        """Return the nats that the smoothed loss fell by."""
        return self.smoothed[0] - min(filter(math.isfinite, self.smoothed))

    @property
    def fallen(self) -> float:
        """Return the learning rate of AdamW at which the loss had made `FALLEN` of its fall."""
        return fallen(self.rates, self.smoothed)

    @property
    def pick(self) -> float | None:
        """Return the suggested learning rate of AdamW: `fallen`, for as many steps as the run has.

        The test's own steps are those of all decades, whether it diverged before or not. Where the
        loss fell by no more than noise, None is suggested.
        """
        if self.fall < NOISE:
            return None
        steps = self.plan.horizon_steps
        if steps is None:
            return self.fallen
        own_steps = math.log10(HIGHEST / LOWEST) / self.growth
        return self.fallen * (steps / own_steps) ** HORIZON

    @property
    def tokens(self) -> int | None:
        """Return the tokens of the plan's whole run; None where it has no horizon."""
        steps = self.plan.horizon_steps
        return None if steps is None else self.plan.batches.before(steps)

    @property
    def step_law(self) -> float | None:
        """Return Step Law's learning rate of AdamW; None where the plan has no horizon."""
        return None if self.tokens is None else step_law_rate(self.parameters, self.tokens)

    @property
    def words(self) -> list[str] | None:
        """Return the overrides of the suggestion; None where there is none."""
        return None if self.pick is None else self.at(self.pick)

    @property
    def wider(self) -> str:
        """Return the option of another test, in which the loss may fall by more."""
        if self.diverged_at is None:
            return f"--high {max(HIGHEST, 100 * self.rates[-1]):g}"
        if self.rates[0] > LOWEST:
            return f"--low {LOWEST:g}"
        return f"--steps {2 * max(LR_STEPS, len(self.rates))}"

    def at(self, lr: float) -> list[str]:
        """Return the overrides of a learning rate of AdamW: all optimizers by one factor."""
        factor = lr / self.plan.optimizer.lr
        rates = {"optimizer.lr": self.plan.optimizer.lr} | {
            f"techniques.{name}.lr": technique.model_dump()["lr"]
            for name, technique in self.plan.techniques.items()
            if "routes" in technique.composes and "lr" in type(technique).model_fields
        }
        return [f"{key}={factor * rate:.3g}" for key, rate in rates.items()]

    @property
    def diverged_at(self) -> float | None:
        """Return the rate at which the test ended early; None where it reached the last one."""
        ended = not math.isfinite(self.losses[-1]) or has_diverged(self.smoothed)
        return self.rates[-1] if ended else None

    def to_dict(self) -> dict[str, Any]:
        """Return the curve and what follows from it as JSON values."""
        law = self.step_law
        swept = self.tokens is not None and is_swept(self.parameters, self.tokens)
        finite = [loss if math.isfinite(loss) else None for loss in self.losses]
        return {
            "name": self.plan.name,
            "lr": self.pick,
            "fallen": self.fallen,
            "overrides": self.words,
            "step_law_lr": law,
            "step_law_extrapolated": None if law is None else not swept,
            "fall": self.fall,
            "planned_lr": self.plan.optimizer.lr,
            "diverged_at": self.diverged_at,
            "rates": self.rates,
            "losses": finite,
            "smoothed": [x if math.isfinite(x) else None for x in self.smoothed],
        }


def smooth(losses: Sequence[float], growth: float) -> list[float]:
    """Return running means of losses that lag by `LAG`; the first ones are of as many as there are.

    Args:
        losses: [N] losses.
        growth: decades that the rate grows by from one step to the next.
    """
    share = max(0.0, 1 - growth / LAG)
    smoothed, total, weight = list[float](), 0.0, 0.0
    for loss in losses:
        total, weight = share * total + (1 - share) * loss, share * weight + 1 - share
        smoothed.append(total / weight)
    return smoothed


def growing(low: float, high: float, steps: int) -> list[float]:
    """Return `steps` rates from `low` to `high`, each the same number of times the one before."""
    return [low * (high / low) ** (index / (steps - 1)) for index in range(steps)]


def fallen(rates: Sequence[float], smoothed: Sequence[float]) -> float:
    """Return the rate at which a smoothed loss has made `FALLEN` of its whole fall.

    Args:
        rates: [N] growing rates.
        smoothed: [N] their smoothed losses; what is not finite counts for nothing.
    """
    lowest = min(filter(math.isfinite, smoothed), default=smoothed[0])
    level = smoothed[0] - FALLEN * (smoothed[0] - lowest)
    return next((r for r, loss in zip(rates, smoothed, strict=True) if loss <= level), rates[0])


def has_diverged(smoothed: Sequence[float]) -> bool:
    """Return whether a smoothed loss has risen so far that the test may end."""
    lowest = min(smoothed)
    return not smoothed[-1] <= lowest + max(NOISE, RISEN * (smoothed[0] - lowest))


def find_rate(
    plan: Plan,
    *,
    steps: int = LR_STEPS,
    low: float = LOWEST,
    high: float = HIGHEST,
    progress: Progress | None = None,
) -> RangeTest:
    """Take the plan's own step on a scratch run whose learning rate grows.

    Args:
        plan: the run; its schedule is not used.
        steps: steps of the test, unless it diverges before.
        low: AdamW's learning rate at the first step.
        high: its learning rate at the last one.
        progress: shows how far the test is.

    Raises:
        ConfigError: there are too few steps, or `low` is not below `high`.
        ConfigError, UnsupportedError: the plan cannot run.
    """
    if not low < high:
        raise ConfigError(
            f"the rate grows from --low {low:g} to --high {high:g}, which is not higher",
            f"--high {max(HIGHEST, 1000 * low):g}",
        )
    progress = progress or Progress()
    plan = plan.with_keys(plan.model_dump(exclude_unset=True, exclude={"techniques"}))
    rates, losses = growing(low, high, steps), list[float]()
    growth = math.log10(rates[1] / rates[0])
    with scratch_build(plan, progress) as build:
        build.values["lr"] = lambda index: rates[index] / plan.optimizer.lr
        build.judges.clear()  # they refuse the steps at which the loss rises, and hide where it is
        for index in range(steps):
            losses.append(float(step(build, build.loader.step(index).micros, index)[0]))
            progress.task("range test", index + 1, steps)
            if not math.isfinite(losses[-1]) or has_diverged(smooth(losses, growth)):
                break
        model = build.config
    return RangeTest(plan, rates[: len(losses)], losses, parameters_in_blocks(model))


def format_test(test: RangeTest) -> str:
    """Return the suggestion as text for a reader."""
    planned, law, end = test.plan.optimizer.lr, test.step_law, test.diverged_at
    tested = f"in {len(test.rates)} steps from {test.rates[0]:.0e} to {test.rates[-1]:.2g}"
    if test.pick is None:
        lines = [
            f"no learning rate: the loss fell by {test.fall:.2f} nats {tested}, and less than "
            f"{NOISE:g} is noise, from which no rate can be read; try: {test.wider}"
        ]
    else:
        lines = [
            f"learning rate {test.pick:.3g}: at {test.fallen:.3g} the loss had made {FALLEN:.0%} "
            f"of its fall of {test.fall:.2f} nats, {tested}"
        ]
        if test.pick != test.fallen:
            lines.append(
                f"{format_count(test.plan.horizon_steps or 0)} steps of the run take "
                f"{test.pick / test.fallen:.2f} of that (arXiv 2409.19913)"
            )
    lines.append(f"the plan says {planned:g}")
    if law is not None and test.tokens is not None:
        fits = "" if is_swept(test.parameters, test.tokens) else ", extrapolated"
        lines.append(
            f"Step Law says {law:.3g} for AdamW, {format_count(test.parameters)} parameters in "
            f"blocks and {format_count(test.tokens)} tokens{fits}"
        )
    if end is not None:
        lines.append(f"it diverged at {end:.2g}")
    if test.words is not None:
        lines.append(f"overrides: {' '.join(test.words)}")
    return "\n".join(lines)


def write_curve(test: RangeTest, folder: Path) -> Path:
    """Write the curve as a page with its picture, and as JSON beside it; return the page's path.

    Raises:
        ConfigError, RunError: the folder cannot be written.
    """
    entries = [
        (swatch("c0", "line"), "smoothed loss"),
        (swatch("soft", "line"), "loss of a step"),
    ]
    if test.pick is not None:
        entries.append((swatch("goal", "dot"), f"suggested: {test.pick:.3g}"))
    if test.step_law is not None:
        entries.append((swatch("c1", "line"), f"Step Law: {test.step_law:.3g}"))
    picture = figure("Loss as the learning rate grows", _chart(test))
    title, text = f"{test.plan.name} - learning rate", format_test(test)
    return write_measured(folder, "lr-find", title, text, test.to_dict(), picture, legend(entries))


def _chart(test: RangeTest) -> Safe:
    """Draw the losses over the logarithm of the rate, and where the suggestions lie."""
    first, pick = test.rates[0], test.pick
    places = np.log10(np.array(test.rates) / first)
    raw, smoothed = np.array(test.losses), np.array(test.smoothed)
    raw[~np.isfinite(raw)], smoothed[~np.isfinite(smoothed)] = np.nan, np.nan
    low, high = float(np.nanmin(raw)), float(np.nanmax(smoothed))
    lines = [ChartLine(places, raw, "soft", faint=True), ChartLine(places, smoothed, "c0")]
    if (law := test.step_law) is not None and first <= law <= test.rates[-1]:
        place = math.log10(law / first)
        lines.insert(0, ChartLine(np.array([place, place]), np.array([low, high]), "c1"))
    suggestion = "no rate is suggested" if pick is None else f"the suggestion is {pick:.3g}"
    return line_chart(
        "lr-find",
        lines,
        label=f"Training loss over the learning rate; {suggestion}",
        axis=ChartAxis("learning rate", lambda place: f"{first * 10**place:.1e}"),
        y_label="nats per token",
        top=high + 0.1 * (high - low),
        limit=None if pick is None else max(0.0, math.log10(pick / first)),
    )
