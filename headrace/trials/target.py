"""A change of learning is worth its time to the target, and only over seeds.

Two plans train to the same validation loss, seed for seed, with all that a run does. Evaluating and
compiling are on the clock (AlgoPerf); every run begins with empty caches of the compiler's, or the
plan that runs first would pay for all. Kernels that this process loaded stay. A run that does not
get there took infinitely long.
The change is better where the paired test over seeds is sure at p < 0.01 (core/statistics;
modded-nanogpt asks the same of a record). Seconds are told without the fastest and the slowest seed
(MLPerf). A change that loses its first two seeds is given up: with so few left it could not win.

The first run is the plan before, with the first seed: the pilot, whose seconds say what all seeds
would take. Where the clock ends it before the target, how far it came is told.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from headrace import train as trainer
from headrace.core.plan import Plan
from headrace.core.statistics import paired_ratio, seeds_better
from headrace.progress import Progress
from headrace.run_folder import RunFolder
from headrace.trials.judge import Compared
from headrace.trials.readings import NOT_DONE, Reading, read
from headrace.trials.store import ALIKE_S, Store, fingerprint
from headrace.trials.worker import Worker

Train = Callable[[Plan, float], Reading]
"""(plan, limit in seconds) -> seconds to the target; none if it was missed."""
LEVEL = 0.99
"""Of the test over seeds: one change in a hundred that does nothing passes it."""
SEEDS = 7
"""The fewest with which all that win pass it by their signs alone."""
TRIMMED = 5
"""Seeds from which on the fastest and the slowest are left out of the mean seconds."""
GIVEN_UP = 2
"""Seeds that a change may lose before it won one."""
PATIENCE, LEAST_S = 2.0, 60.0
"""Times as long as the plan before may a run take to the target; and what it may in any case."""
ENDS_S = 12.0
"""Of a limit, for what no clock of a run counts: its start, its last evaluation and its report. A
tuning of 90 s took 102 on two cores without it."""


def reach(plan: Plan, cut: bool) -> Reading:
    """Train to the target, in the process that is asked.

    Args:
        plan: the run.
        cut: its minutes are not the plan's own: where they end it, nothing is known of the target.
    """

    def go(found: Reading) -> None:
        from torch._inductor.utils import fresh_cache  # loads half of the compiler

        with fresh_cache():
            folder = trainer.run(plan, progress=Progress())
        assert folder is not None, "one process is the first rank"
        report = RunFolder(folder).read_report()
        goal, found.tokens_per_s = report["goal"], report["steady_tokens_per_s"]
        if goal["reached"]:
            found.seconds = [goal["wall_s"]]
        if cut and not goal["reached"] and goal["ended_by"] == "minutes":
            found.refused = f"{NOT_DONE} {plan.goal.minutes:.1f} minutes ({_came_to(report)})"

    return read(go)


def _came_to(report: dict[str, Any]) -> str:
    """How far a run came that the clock ended, in words."""
    known = [one["bits_per_byte"] for one in report["val"] if one["bits_per_byte"] is not None]
    low = f"{min(known):.4g} bits per byte" if known else "not validated yet"
    return f"{low} after {report['steps']:,} steps"


def train_with(worker: Worker, folder: Path) -> Train:
    """Runs kept under `folder`, without checkpoints."""

    def train(plan: Plan, limit_s: float) -> Reading:
        own = plan.goal.minutes or inf
        minutes = min(own, max(limit_s - ENDS_S, limit_s / 2) / 60)
        run = plan.replaced(
            directory=str(folder), goal=plan.goal.model_copy(update={"minutes": minutes}),
            checkpoint=plan.checkpoint.model_copy(update={"every_steps": 0}),
        )  # fmt: skip
        return worker.ask(reach, run, minutes < own, limit_s=limit_s + 60)

    return train


def learn(
    first: Plan, second: Plan, seeds: Sequence[int], train: Train, store: Store, *,
    limit_s: float, clock: Callable[[], float] = time.monotonic,
) -> Compared:  # fmt: skip
    """Both to the first's target, seed for seed.

    Args:
        first: the plan as it is; it has a target.
        second: with a change of learning.
        seeds: of both.
        train: see `train_with`.
        store: runs that stand.
        limit_s: no run may outlast this.
        clock: seconds that go by.
    """
    ends_s = clock() + limit_s
    one: list[float] = []
    two: list[float] = []
    rates: list[list[float]] = [[], []]

    def cut(pilot: str = "") -> Compared:
        known = [seconds for seconds in one if isfinite(seconds)]
        told = f"time was up after {len(two)} of {len(seeds)} seeds"
        if not known:
            told += ", and no run has reached the target yet"
            told += f": the first plan's was {pilot}" if pilot and not one else ""
        return Compared("cut", told, before_s=trimmed(known) if known else None)

    for seed in seeds:
        for plan, into in ((first, one), (second, two)):
            left_s = ends_s - clock()
            patient_s = left_s
            if into is two:
                patient_s = min(left_s, max(LEAST_S, PATIENCE * one[-1]))
            if left_s <= 0:
                return cut()
            seeded = plan.replaced(seed=seed)
            what = {"target": fingerprint(seeded), "clock": "compiling too"}
            by_clock = patient_s == left_s  # else it is the first that it is too late for
            found = store.once(
                what, partial(train, seeded, patient_s), limit_s=patient_s,
                alike_s=ALIKE_S if by_clock else 0.0, again=False,
            )  # fmt: skip
            if found.refused.startswith(NOT_DONE) and by_clock:
                return cut(found.refused)
            if found.refused and not found.refused.startswith(NOT_DONE):
                return Compared("refused", found.refused)
            into.append(found.seconds[0] if found.seconds else inf)
            if found.tokens_per_s:
                rates[into is two].append(found.tokens_per_s)
        if len(one) >= GIVEN_UP and not any(map(isfinite, one)):
            return Compared("refused", "the plan before it misses the target itself")
        if len(two) >= GIVEN_UP and not any(b < a for a, b in zip(one, two, strict=True)):
            break
    a, b = (median(found) if found else None for found in rates)
    return replace(judge_seeds(one, two, len(seeds)), rates=(a, b))


def judge_seeds(before: Sequence[float], after: Sequence[float], wanted: int) -> Compared:
    """What seconds to the target say, seed for seed; inf is a target that was missed."""
    both = [(a, b) for a, b in zip(before, after, strict=True) if isfinite(a) and isfinite(b)]
    ratio = paired_ratio([a for a, _ in both], [b for _, b in both]) if both else None
    won = sum(b < a for a, b in zip(before, after, strict=True))
    told = f"sooner at the target with {won} of {len(after)} seeds"
    better = len(after) == wanted and seeds_better(after, before, LEVEL)
    if not better and won == len(after):
        told += ", by too little or too unlike each other for so few"
    return Compared(
        "better" if better else "worse", told, ratio=ratio,
        before_s=trimmed(before), after_s=trimmed(after), won=won,
    )  # fmt: skip


def trimmed(seconds: Sequence[float]) -> float:
    """Their mean, the fastest and the slowest left out where there are enough."""
    kept = sorted(seconds)[1:-1] if len(seconds) >= TRIMMED else seconds
    return fmean(kept)
