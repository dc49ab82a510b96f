"""Predict what failures take of a run: goodput, by the interval of checkpoints and the restart.

Each of many GPUs fails seldom, and any failure ends the whole run. Failures come at random and do
not depend on one another, so the time between two of a run is exponential, with a mean that falls
with the number of GPUs. A failure costs the steps since the newest checkpoint and the restart,
which may fail too. For this the expected time has a closed form (Daly 2006,
doi.org/10.1016/j.future.2004.11.016, eq. 13), and a simulation of many runs shows how far one run
may be from it. Goodput is the time of the steps that a run keeps as a share of all its time.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.units import format_seconds
from headrace.plan.plan import Plan
from headrace.predict.intervals import Between

LLAMA_3 = 1000 * 419 / (54 * 16_384)
"""Failures per 1,000 GPU-days: 419 in 54 days of 16,384 H100s (arXiv 2407.21783, section 3.3.4). Of
two clusters of A100s the reports say 0.29 and 0.81 (arXiv 2410.21680)."""
DAY_S = 86_400
FEWEST = 0.01
"""Failures of a whole run below which none is told: of 100 such runs one has any."""
SAVE_S = 0.055
"""Seconds for which an asynchronous save stalls training: of 1b on two H200s (scaling.jsonl)."""
RUNS = 200
"""Runs that are simulated."""
MOST_FAILURES = 10_000
"""Failures of a simulated run after which it is given up as one that never ends."""
INTERVALS = (0.25, 0.5, 1.0, 2.0, 4.0)
RESTARTS_MINUTES = (1.0, 4.0, 10.0, 30.0)
"""Rows of a table of goodput, in times the plan's interval, and its columns."""


@dataclass(frozen=True)
class Reliability:
    """Hold how often a run fails, and what a failure costs.

    Args:
        mean_s: mean seconds from one failure of the run to the next; inf where it never fails.
        restart_s: seconds from a failure until steps are trained again.
        interval_s: seconds of training from one checkpoint to the next; inf without any.
        save_s: seconds for which a checkpoint stalls training.
    """

    mean_s: float
    restart_s: float
    interval_s: float
    save_s: float = SAVE_S

    def expected_s(self, work_s: float) -> float:
        """Return the expected seconds of a run that trains for `work_s` (Daly's equation 13)."""
        if math.isinf(self.mean_s) or work_s <= 0:
            return work_s
        each_s = min(self.interval_s, work_s)
        save_s = self.save_s if self.interval_s < work_s else 0.0
        exponent = (each_s + save_s) / self.mean_s
        restart = self.restart_s / self.mean_s
        if exponent + restart > math.log(float(MOST_FAILURES)):  # it hardly gets to a checkpoint
            return math.inf
        return self.mean_s * math.exp(restart) * math.expm1(exponent) * work_s / each_s

    def goodput(self, work_s: float) -> float:
        """Return the share of the expected time that makes steps which the run keeps."""
        expected_s = self.expected_s(work_s)
        return 1.0 if expected_s <= 0 else work_s / expected_s

    @property
    def best_interval_s(self) -> float:
        """Return about the best interval (Young 1974): saves cost as much as lost steps."""
        return math.sqrt(2 * self.save_s * self.mean_s)


@dataclass(frozen=True)
class SimulatedRuns:
    """Hold what many runs of one plan took, each with failures of its own, in seconds.

    Args:
        total_s: of each run, from its begin to its end; inf where it never ends.
        failures: of each run.
        lost_s: steps of each run that no checkpoint kept.
    """

    total_s: NDArray[np.float64]
    failures: NDArray[np.int64]
    lost_s: NDArray[np.float64]

    def between(self, low: float = 0.1, high: float = 0.9) -> Between:
        """Return between which seconds the runs lie, but for those beyond two quantiles."""
        ends = np.quantile(self.total_s, (low, high), method="nearest")
        return Between(float(ends[0]), float(ends[1]))


def simulate(how: Reliability, work_s: float, *, runs: int = RUNS, seed: int = 0) -> SimulatedRuns:
    """Simulate runs that train for `work_s`, failure by failure.

    Args:
        how: how often they fail, and what it costs.
        work_s: seconds that the run would take without failures and saves.
        runs: how many.
        seed: of the failures.
    """
    random = np.random.default_rng(seed)
    clock, kept, lost = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    failures, open_ = np.zeros(runs, np.int64), np.arange(runs)
    if math.isinf(how.expected_s(work_s)):
        return SimulatedRuns(clock + math.inf, failures, lost)
    each_s = min(how.interval_s, work_s)
    for _ in range(MOST_FAILURES):
        left = work_s - kept[open_]
        saves = np.ceil(left / each_s - 1e-9) - 1  # none at the end
        needed = left + how.save_s * saves
        until = np.full(len(open_), math.inf)
        if how.mean_s < math.inf:
            until = random.exponential(how.mean_s, len(open_))
        ends = needed <= until
        clock[open_[ends]] += needed[ends]
        if ends.all():
            return SimulatedRuns(clock, failures, lost)
        until, open_ = until[~ends], open_[~ends]
        done = np.floor(until / (each_s + how.save_s))
        kept[open_] += done * each_s
        lost[open_] += until - done * (each_s + how.save_s)
        failures[open_] += 1
        clock[open_] += until
        _restart(how, random, clock, failures, open_)
    clock[open_] = math.inf
    return SimulatedRuns(clock, failures, lost)


def _restart(
    how: Reliability,
    random: np.random.Generator,
    clock: NDArray[np.float64],
    failures: NDArray[np.int64],
    which: NDArray[np.int64],
) -> None:
    """Let runs restart, which may fail too."""
    for _ in range(MOST_FAILURES):
        if not len(which):
            return
        until = random.exponential(how.mean_s, len(which))
        fails = until < how.restart_s
        clock[which] += np.where(fails, until, how.restart_s)
        which = which[fails]
        failures[which] += 1
    clock[which] = math.inf


@dataclass(frozen=True)
class Failures:
    """Hold what failures are predicted to take of a run.

    Args:
        rate: failures per 1,000 GPU-days.
        is_assumed: whether the plan leaves that open.
        gpus: number of GPUs.
        work_s: seconds of the run without failures.
        how: how often it fails, and what that costs.
        every_steps: steps between two checkpoints, on disk or in memory; 0 without any.
        step_s: seconds of a step.
    """

    rate: float
    is_assumed: bool
    gpus: int
    work_s: float
    how: Reliability
    every_steps: int
    step_s: float

    @property
    def expected(self) -> float:
        """Return how often the run is expected to fail."""
        return self.how.expected_s(self.work_s) / self.how.mean_s

    @cached_property
    def goodput(self) -> float:
        """Return the share of the expected time that makes steps which the run keeps."""
        return self.how.goodput(self.work_s)

    @cached_property
    def goodput_between(self) -> Between:
        """Return the goodput of 80% of simulated runs."""
        ends = simulate(self.how, self.work_s).between()
        return Between(self.work_s / ends.high, self.work_s / ends.low)

    @property
    def best_every_steps(self) -> int:
        """Return about the best number of steps between two checkpoints."""
        return max(1, round(min(self.how.best_interval_s, self.work_s) / self.step_s))

    @property
    def best_goodput(self) -> float:
        """Return goodput with about the best interval; the run's own where it saves nothing."""
        if not self.every_steps:
            return self.goodput
        return self.with_interval(self.best_every_steps, self.how.restart_s)

    def with_interval(self, steps: int, restart_s: float) -> float:
        """Return the goodput with checkpoints every so many steps and another restart."""
        how = Reliability(self.how.mean_s, restart_s, steps * self.step_s, self.how.save_s)
        return how.goodput(self.work_s)

    def table(self) -> tuple[list[float], list[tuple[int, list[float]]]]:
        """Return minutes of restarts, and goodput with each for several intervals in steps."""
        whole, best = max(1, round(self.work_s / self.step_s)), self.best_every_steps
        around = {self.every_steps or whole, best}
        steps = {max(1, round(own * times)) for own in around for times in INTERVALS}
        steps = {min(n, whole) for n in steps | around}
        minutes = sorted({*RESTARTS_MINUTES, self.how.restart_s / 60})
        rows = [(n, [self.with_interval(n, 60 * m) for m in minutes]) for n in sorted(steps)]
        return minutes, rows

    def to_dict(self) -> dict[str, Any]:
        """Return every number as JSON values."""
        return {
            "per_1000_gpu_days": self.rate,
            "assumed": self.is_assumed,
            "gpus": self.gpus,
            "expected": self.expected,
            "mean_s_between": self.how.mean_s,
            "restart_s": self.how.restart_s,
            "checkpoint_every_steps": self.every_steps,
            "best_every_steps": self.best_every_steps,
            "goodput": self.goodput,
            "goodput_between": asdict(self.goodput_between),
        }

    def lengthened(self, ends: Between) -> Between:
        """Return the ends of a step's seconds, each with its end of what failures take."""
        goodput = self.goodput_between
        high = ends.high / goodput.low if goodput.low else math.inf
        return Between(ends.low / goodput.high if goodput.high else math.inf, high)

    def lines(self) -> list[str]:
        """Return lines for a reader."""
        whose = "as those of Llama 3, assumed" if self.is_assumed else "the plan's"
        plural = "s" if self.gpus > 1 else ""
        counted = "; hours and dollars count it" if self.expected >= FEWEST else ""
        ends = self.goodput_between
        each = (
            f"checkpoints every {self.every_steps} steps" if self.every_steps else "no checkpoint"
        )
        if not self.goodput:
            return [
                f"failures: one each {format_seconds(self.how.mean_s)} ({self.rate:.2g} per 1,000 "
                f"GPU-days, {whose}, of {self.gpus} GPU{plural}); {each}: it hardly ever ends; "
                f"checkpoint.every_steps={self.best_every_steps} would keep steps"
            ]
        lines = [
            f"failures: {self.expected:.2g} expected, {self.rate:.2g} per 1,000 GPU-days ({whose}) "
            f"of {self.gpus} GPU{plural}, each {format_seconds(self.how.restart_s)} to restart; "
            f"{each}",
            f"  goodput {self.goodput:.2%}, of 80% of {RUNS} simulated runs {ends.low:.2%} to "
            f"{ends.high:.2%}{counted}",
        ]
        best = self.best_every_steps
        if (better := self.with_interval(best, self.how.restart_s)) > self.goodput + 0.005:
            lines.append(f"  with checkpoint.every_steps={best} goodput would be {better:.2%}")
        return lines


def failures_of(
    plan: Plan, step_s: float, work_s: float, *, on_gpu: bool, fewest: float = FEWEST
) -> Failures | None:
    """Return what failures take of a run; None where it is expected to have none.

    Args:
        plan: the plan of the run.
        step_s: seconds of a step.
        work_s: seconds of all steps.
        on_gpu: whether it runs on GPUs; CPUs fail where the plan says how often.
        fewest: failures of the whole run below which none is expected.
    """
    rate, gpus = plan.hardware.failures_per_1000_gpu_days, plan.mesh.ranks
    known = LLAMA_3 if rate is None and on_gpu else (rate or 0.0)
    per_s = known * gpus / 1000 / DAY_S
    if not per_s or per_s * work_s < fewest:
        return None
    saved = plan.checkpoint
    each: Sequence[int] = [n for n in (saved.every_steps, saved.memory_every_steps) if n]
    every = min(each, default=0)
    how = Reliability(
        1 / per_s, 60 * plan.hardware.restart_minutes, every * step_s if every else math.inf
    )
    return Failures(known, rate is None, gpus, work_s, how, every, step_s)
