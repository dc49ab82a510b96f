"""Measure what watching costs a step: nothing, signals, and profiler windows beside them.

    python benchmarks/overhead.py --plan benchmarks/plans/160m.toml --rounds 8 --every 1000

All sides call `train.step` of one build on the same rows, in blocks of steps timed by the wall
clock. `always_on` compares nothing and signals in alternation, A B B A, before any profiler was
loaded. Signals are what a run reads at all times: phases marked, numbers copied and drained, and
the GPU's gauges, here `OFTEN` times as often as in a run, so that a short block has some.

The first profiler window of a process loads CUPTI, and has its own number (`first_burst_s`). CUPTI
stays loaded, so blocks without any watching after it are compared with as many before it: `lasting`
is the jump between them beside a steady drift, which no pairing could take out here: half as many
blocks again on each side. Then signals alone and signals with one profiler window in the block are
compared, A B B A, a quarter as often. What a window costs over plain steps, including the writing
and the compressing, is shared out over `--every` steps. `with_bursts` is the sum of the three,
which were measured apart: their errors add as independent ones do. A row is written as soon as it
is measured.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from math import expm1, log
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import receipts

from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.statistics import Interval, order_abba, paired_ratio, t_two_sided
from headrace.data.loader import Micro
from headrace.observe.gauges import EVERY_S, Gauges
from headrace.observe.profiler import FIRST, ProfilerWindows
from headrace.observe.signals import Signals
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.tuner.readings import opened, wait

OFTEN = 10
"""The factor by which the gauges are read more often than in a run."""


class Silent:
    """Replace the clock of phases by one that times nothing."""

    def mark(self, phase: str) -> None:
        """Do nothing."""


class Sides:
    """Hold one build, and run its steps with more or less watching."""

    def __init__(
        self, build: Build, micros: Callable[[int], list[Micro]], steps: int, folder: Path
    ) -> None:
        self.build, self.micros, self.folder = build, micros, folder
        self.signals, self.index = Signals(build.device), 0
        self.steps = max(steps, FIRST + self._profiler_windows().length + 1)

    def _profiler_windows(self) -> ProfilerWindows:
        return ProfilerWindows(self.folder, self.build.device, every_steps=None)

    def off(self) -> float:
        """Return the seconds of a block with nothing watched."""
        return self._block(None, None)

    def on(self) -> float:
        """Return the seconds of a block with what a run always reads."""
        return self._block(self.signals, None)

    def profiled(self) -> float:
        """Return the seconds of a block with one profiler window in it."""
        return self._block(self.signals, self._profiler_windows())

    def _block(self, signals: Signals | None, windows: ProfilerWindows | None) -> float:
        self.build.phases = signals or Silent()
        gauges = Gauges(self.build.device, every_s=EVERY_S / OFTEN)
        if signals:
            gauges.start()
        wait(self.build)
        begin = time.perf_counter()
        for _ in range(self.steps):
            self.index += 1
            if signals:
                signals.mark("input")
                signals.mark("prepare")
            numbers = train.step(self.build, self.micros(self.index), self.index)
            if signals:
                signals.end_step(self.index, numbers, {})
                if windows:
                    windows.advance(self.index)
                signals.drain(keep=1)
                if windows:
                    windows.begin()
        wait(self.build)
        if signals:
            signals.drain(keep=0)
        if windows:
            windows.close()
        spent_s = time.perf_counter() - begin
        gauges.close()
        if windows and not windows.files:
            raise RuntimeError(f"no profiler window was recorded: {windows.report()}")
        return spent_s


def alternate(
    a: Callable[[], float], b: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of blocks of both sides, timed A B B A."""
    spent: dict[str, list[float]] = {"A": [], "B": []}
    for side in order_abba(rounds):
        spent[side].append((a if side == "A" else b)())
    return spent["A"], spent["B"]


def less_one(ratio: Interval) -> Interval:
    """Return a ratio of times as the share that it adds."""
    return Interval(ratio.low - 1, ratio.value - 1, ratio.high - 1, ratio.n)


def differences(more: list[float], less: list[float]) -> Interval:
    """Return the mean difference of pairs, with Student's interval."""
    off = [m - n for m, n in zip(more, less, strict=True)]
    half = t_two_sided(0.95, len(off) - 1) * stdev(off) / len(off) ** 0.5
    return Interval(fmean(off) - half, fmean(off), fmean(off) + half, len(off))


def jump(before: list[float], after: list[float]) -> Interval:
    """Return the share by which blocks are longer after one between them, beside a linear drift.

    At least two blocks on each side.
    """
    logs = [log(seconds) for seconds in (*before, *after)]
    n, cut = len(logs), len(before)
    at = [i - n / 2 for i in range(n + 1) if i != cut]
    width = sum(x * x for x in at) - sum(at) ** 2 / n

    def undrifted(values: list[float]) -> list[float]:
        mean, middle = fmean(values), fmean(at)
        slope = sum((x - middle) * v for x, v in zip(at, values, strict=True)) / width
        return [v - mean - slope * (x - middle) for x, v in zip(at, values, strict=True)]

    step, logarithms = undrifted([float(i >= cut) for i in range(n)]), undrifted(logs)
    weight = sum(s * s for s in step)
    size = sum(s * y for s, y in zip(step, logarithms, strict=True)) / weight
    rest = sum((y - size * s) ** 2 for s, y in zip(step, logarithms, strict=True))
    half = t_two_sided(0.95, n - 3) * (rest / (n - 3) / weight) ** 0.5
    return Interval(expm1(size - half), expm1(size), expm1(size + half), n)


def together(parts: list[Interval]) -> Interval:
    """Return the sum of what was measured apart: independent errors add in squares."""
    value = sum(part.value for part in parts)
    below = sum((part.value - part.low) ** 2 for part in parts) ** 0.5
    above = sum((part.high - part.value) ** 2 for part in parts) ** 0.5
    return Interval(value - below, value, value + above, min(part.n for part in parts))


def metric(interval: Interval, unit: str) -> dict[str, Any]:
    """Return an interval as a metric of a row."""
    return {"value": interval.value, "low": interval.low, "high": interval.high, "unit": unit}


def one(value: float, unit: str) -> dict[str, Any]:
    """Return a single reading as a metric of a row."""
    return {"value": value, "low": value, "high": value, "unit": unit}


def measure(sides: Sides, rounds: int, every: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the measurement, the number of pairs and the metrics of both rows."""
    for warm in (sides.off, sides.on):
        warm()
    off, on = alternate(sides.off, sides.on, rounds)
    always = less_one(paired_ratio(on, off))
    step_s = median(off) / sides.steps
    metrics = {"overhead": metric(always, "of a step"), "step_s": one(step_s, "s")}
    yield "always_on", always.n, metrics
    blocks = len(off) * 3 // 2
    before = [sides.off() for _ in range(blocks)]
    first_s = sides.profiled() - median(on)
    lasting = jump(before, [sides.off() for _ in range(blocks)])
    plain, with_window = alternate(sides.on, sides.profiled, -(-rounds // 4))
    cost_s = differences(with_window, plain)
    low, value, high = (s / (every * step_s) for s in (cost_s.low, cost_s.value, cost_s.high))
    whole = together([always, lasting, Interval(low, value, high, cost_s.n)])
    yield (
        "with_bursts",
        whole.n,
        {
            "overhead": metric(whole, "of a step"),
            "burst_s": metric(cost_s, "s"),
            "first_burst_s": one(first_s, "s"),
            "lasting": metric(lasting, "of a step"),
            "step_s": one(step_s, "s"),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8, help="of A B B A, two pairs each")
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument(
        "--every", type=int, default=1000, help="steps from one profiler window to the next"
    )
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    plan = Plan.read(args.plan.read_text(), catalogue(), overrides=args.set, without=args.without)
    with opened(plan) as (build, micros), tempfile.TemporaryDirectory() as folder:
        sides = Sides(build, micros, args.steps, Path(folder))
        for measurement, n, metrics in measure(sides, args.rounds, args.every):
            row = receipts.append(
                "overhead",
                metrics,
                results=args.results,
                measurement=measurement,
                n=n,
                shape=plan.name,
                seeds=[0],
                technique="signals",
                techniques=sorted(plan.techniques),
                plan_sha256=receipts.sha256(plan.dump()),
                block_steps=sides.steps,
                every_steps=args.every if measurement == "with_bursts" else None,
            )
            print(measurement, row["metrics"], flush=True)


if __name__ == "__main__":
    main()
