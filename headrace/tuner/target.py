"""Judge a change of learning by its time to the target, over seeds.

Two plans train to the same validation loss, seed for seed, with all that a run does. Evaluating and
compiling are on the clock (AlgoPerf). Every run begins with empty caches of the compiler's, or the
plan that runs first would pay for all. Kernels that this process loaded stay. A run that misses the
target took infinitely long.

The moment is where the straight line between two validations crosses the target, on the run's
clock. So how often a plan validates decides nothing, and two runs that end at the same validation
are not taken for equal.

The change is better where a sequential test over seeds is sure at p < 0.01 (core/statistics;
modded-nanogpt asks the same of a record): after two seeds where the effect is large, after all
where it is small. Mean seconds leave out the fastest and the slowest seed (MLPerf).

A change that is clearly behind is not followed. A run of it ends `PATIENCE` times as late as that
of the plan before with the same seed. It is given up when it lost its first seed clearly or its
first two at all, or where all seeds could no longer show it. Giving up makes no change look better.
Where the clock ends it between, it is "not shown", with the seeds that should do.

The first run is the plan before, with the first seed: the pilot, whose seconds say what all seeds
would take. Where the clock ends it before the target, its progress is reported. Runs of the plan
before are shared by all changes that are tried beside it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from headrace.core.errors import RefusalKind
from headrace.core.statistics import LOOKS, seeds_better, seeds_enough, seeds_ratio
from headrace.plan.plan import Plan
from headrace.train import train as trainer
from headrace.train.run_folder import RunFolder
from headrace.tuner.judge import Compared
from headrace.tuner.readings import NOT_DONE, Reading, read
from headrace.tuner.store import ALIKE_S, Store, fingerprint
from headrace.tuner.worker import Worker

Train = Callable[[Plan, float], Reading]
"""A function of a plan and a limit in seconds that returns the seconds to the target; none if it
was missed."""
LEVEL = 0.99
"""Level of all tests over seeds together: one change in a hundred that does nothing passes them."""
FEWEST = min(LOOKS)
"""Fewest seeds, which are enough where the effect is large."""
TRIMMED = 5
"""Seeds from which on the fastest and the slowest are left out of the mean seconds."""
GIVEN_UP = 2
"""Seeds that a change may lose before it won one."""
CLEARLY = 1.1
"""Ratio to the seconds of the plan before with which a first seed is lost clearly: runs of one plan
lie within 5% of each other."""
HOPELESS = 4
"""Ratio of needed to available seeds above which a change is given up."""
PATIENCE, LEAST_S = 1.25, 30.0
"""Ratio to the seconds of the plan before that a run to the target may take; and the seconds that
it may take in any case."""
ENDS_S = 12.0
"""Seconds of a limit for what no clock of a run counts: its start, its last evaluation and its
report. A tuning of 90 s took 102 on two cores without it."""


def reach(plan: Plan, cut: bool) -> Reading:
    """Train to the target, in the process that is asked.

    Args:
        plan: the run.
        cut: its minutes are not the plan's own: where they end it, nothing is known of the target.
    """

    def go(reading: Reading) -> None:
        from torch._inductor.utils import fresh_cache  # loads half of the compiler

        with fresh_cache():
            folder = trainer.run(plan).folder
        report = RunFolder(folder).read_report()
        goal, reading.tokens_per_s = report["goal"], report["steady_tokens_per_s"]
        if goal["reached"]:
            reading.seconds = [crossed_s(report["val"], plan.goal.bits_per_byte or 0.0)]
        if cut and not goal["reached"] and goal["ended_by"] == "minutes":
            why = f"{NOT_DONE} {plan.goal.minutes:.1f} minutes ({_came_to(report)})"
            reading.refuse(RefusalKind.TIME, why)

    return read(go)


def crossed_s(validations: Sequence[dict[str, Any]], target: float) -> float:
    """Return the seconds at which the line between two validations crosses the target."""
    index = next(i for i, one in enumerate(validations) if one["bits_per_byte"] <= target)
    after_s, after = validations[index]["wall_s"], validations[index]["bits_per_byte"]
    if not index:
        return after_s
    before_s, before = validations[index - 1]["wall_s"], validations[index - 1]["bits_per_byte"]
    return before_s + (after_s - before_s) * (before - target) / (before - after)


def _came_to(report: dict[str, Any]) -> str:
    """Render how far a run came that the clock ended."""
    known = [one["bits_per_byte"] for one in report["val"] if one["bits_per_byte"] is not None]
    low = f"{min(known):.4g} bits per byte" if known else "not validated yet"
    return f"{low} after {report['steps']:,} steps"


def train_with(worker: Worker, folder: Path) -> Train:
    """Return what trains to the target: runs kept under `folder`, without checkpoints."""

    def train(plan: Plan, limit_s: float) -> Reading:
        own = plan.goal.minutes or inf
        minutes = min(own, max(limit_s - ENDS_S, limit_s / 2) / 60)
        run = plan.replaced(
            directory=str(folder),
            goal=plan.goal.model_copy(update={"minutes": minutes}),
            checkpoint=plan.checkpoint.model_copy(update={"every_steps": 0}),
        )
        return worker.ask(reach, run, minutes < own, limit_s=limit_s + 60)

    return train


def learn(
    first: Plan,
    second: Plan,
    seeds: Sequence[int],
    train: Train,
    store: Store,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Compared:
    """Train both to the first's target, seed for seed, and judge.

    Args:
        first: the plan as it is; it has a target.
        second: with a change of learning.
        seeds: of both.
        train: see `train_with`.
        store: runs that stand.
        limit_s: no run may outlast this.
        clock: seconds that go by.
    """
    ends_s, most = clock() + limit_s, len(seeds)
    one: list[float] = []
    two: list[float] = []
    rates: list[list[float]] = [[], []]

    def cut(pilot: str = "") -> Compared:
        known = [seconds for seconds in one if isfinite(seconds)]
        if two:
            return _with(judge_seeds(one[: len(two)], two, most, up=True), rates)
        reason = "time was up before a seed of both"
        if not known:
            reason += ", and no run has reached the target yet"
            reason += f": the first plan's was {pilot}" if pilot and not one else ""
        return Compared("cut", reason, before_s=trimmed(known) if known else None)

    for seed in seeds:
        for plan, into in ((first, one), (second, two)):
            left_s = ends_s - clock()
            patient_s = left_s
            if into is two:
                patient_s = min(left_s, max(LEAST_S, PATIENCE * one[-1] + ENDS_S))
            if left_s <= 0:
                return cut()
            seeded = plan.replaced(seed=seed)
            what = {"target": fingerprint(seeded), "clock": "compiling too, to where it crosses"}
            by_clock = patient_s == left_s  # else it is the first that it is too late for
            reading = store.once(
                what,
                partial(train, seeded, patient_s),
                limit_s=patient_s,
                alike_s=ALIKE_S if by_clock else 0.0,
                repeat=False,
            )
            if reading.timed_out and by_clock:
                return cut(reading.refused)
            if reading.refused and not reading.timed_out:
                return Compared("refused", reading.refused, refusal=reading.refusal)
            into.append(reading.seconds[0] if reading.seconds else inf)
            if reading.tokens_per_s:
                rates[into is two].append(reading.tokens_per_s)
        if len(one) >= GIVEN_UP and not any(map(isfinite, one)):
            return Compared("refused", "the plan before it misses the target itself")
        if seeds_better(two, one, most, LEVEL) or given_up(one, two, most):
            break
    return _with(judge_seeds(one, two, most), rates)


def _with(compared: Compared, rates: Sequence[Sequence[float]]) -> Compared:
    a, b = (median(side) if side else None for side in rates)
    return replace(compared, rates=(a, b))


def given_up(before: Sequence[float], after: Sequence[float], most: int) -> str:
    """Return why more seeds of a change are not worth their time; "" where they are."""
    pairs = list(zip(before, after, strict=True))
    if any(isfinite(a) and not isfinite(b) for a, b in pairs):
        return f"it missed the target with a seed, or took over {PATIENCE:g} times as long"
    won = sum(b < a for a, b in pairs)
    if not won and (len(pairs) >= GIVEN_UP or pairs[0][1] > CLEARLY * pairs[0][0]):
        return "given up as lost"
    if GIVEN_UP < len(pairs) < most and all(map(isfinite, before)):
        enough = seeds_enough(after, before, LEVEL)
        if enough is None or enough > HOPELESS * most:
            return f"given up, for {most} seeds could not show a gain as small"
    return ""


def judge_seeds(
    before: Sequence[float], after: Sequence[float], most: int, *, up: bool = False
) -> Compared:
    """Judge by seconds to the target, seed for seed; inf is a target that was missed.

    Args:
        before: of the plan before.
        after: of the change.
        most: seeds that are tried at most.
        up: the clock ended it.
    """
    ratio, n, level = seeds_ratio(after, before), len(after), f"p < {1 - LEVEL:.2g}"
    won = sum(b < a for a, b in zip(before, after, strict=True))
    why, enough = given_up(before, after, most), seeds_enough(after, before, LEVEL)
    reason, verdict = f"sooner at the target with {won} of {n} seeds", "worse"
    if seeds_better(after, before, most, LEVEL):
        reason, verdict = f"{reason}, which is sure at {level}", "better"
    elif why:
        reason = f"{reason}: {why}"
    elif ratio is not None and ratio.value > 1:
        reason, verdict = f"{reason}, which is not shown at {level}", "not shown"
        enough = enough and max(enough, n + 1)
        reason += f"; about {enough} seeds should show such a gain" if enough else ""
        reason += f"; time was up after {n} of at most {most}" if up else ""
    return Compared(
        verdict,
        reason,
        ratio=ratio,
        seeds=n,
        won=won,
        enough=enough,
        before_s=trimmed(before),
        after_s=trimmed(after),
    )


def trimmed(seconds: Sequence[float]) -> float:
    """Return their mean, the fastest and the slowest left out where there are enough."""
    kept = sorted(seconds)[1:-1] if len(seconds) >= TRIMMED else seconds
    return fmean(kept)
