"""Measure what reading ahead gains where data is read slowly: steps, and their data wait.

    python benchmarks/loading.py 160m --slow 4 --steps 160

A run is timed with its rows at hand. Then each row takes so long to read, as from a slow disk, that
one thread needs `--slow` steps for the rows of one, and the run is timed again: with one thread
that reads ahead, and with `loader_workers`, which takes as many as it needs. Each run is one row of
results/loading.jsonl: of the second half of its steps, the median, the waits' median and slowest
hundredth, the share that stalled, and the speed beside the run whose rows were at hand, by the
median step and by all of them: a step in three that waits long leaves the median as it was.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any
from unittest.mock import patch

import receipts

from headrace.cli.catalogue import catalogue
from headrace.data.rows import Cut
from headrace.observe.waits import STALL_SHARE
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.train import train

SIDES = {
    "at hand": ("data.workers=1",),
    "one reader": ("data.workers=1",),
    "loader_workers": ("+loader_workers",),
}
"""Maps each timed side to its changes of the plan; all but the first read slowly."""


def slowly(seconds: float) -> Any:
    """Make reading a row take longer inside, without work for a core."""
    plain = Cut.row

    def row(self: Cut, source: int, unit: int) -> Any:
        time.sleep(seconds)
        return plain(self, source, unit)

    return patch.object(Cut, "row", row)


def timed(plan: Plan, row_s: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the second half of a run's steps, and its report."""
    with slowly(row_s):
        folder = train.run(plan, catalogue=catalogue()).folder
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return steps[len(steps) // 2 :], json.loads((folder / "report.json").read_text())


def metrics(steps: list[dict[str, Any]], healthy: tuple[float, float]) -> dict[str, Any]:
    """Return the metrics of steps; `healthy` has the median and mean seconds with rows at hand."""
    steps_s, waits_s = ([step[key] for step in steps] for key in ("step_s", "input_s"))
    step_s = median(steps_s)
    stalled = sum(wait_s > STALL_SHARE * step_s for wait_s in waits_s) / len(waits_s)
    cuts = quantiles(waits_s, n=100, method="inclusive")
    return {
        "step": receipts.spread(steps_s, "s"),
        "wait_p50": receipts.spread([cuts[49]], "s"),
        "wait_p99": receipts.spread([cuts[98]], "s"),
        "stalled": receipts.spread([stalled], "of the steps"),
        "ratio_to_at_hand": receipts.spread([healthy[0] / step_s], "x"),
        "whole_ratio_to_at_hand": receipts.spread([healthy[1] / fmean(steps_s)], "x"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="a name of plans/, or a plan file")
    parser.add_argument("--slow", type=float, default=4.0, help="steps that one thread reads for")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--set", nargs="*", default=[], help="keys of the plan")
    parser.add_argument("--knobs", nargs="*", default=[], help="of loader_workers: workers=6")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    file = receipts.plan_file(args.shape)
    plan, healthy, row_s = Plan.read(file.read_text(), catalogue()), None, 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for name, words in SIDES.items():
            folder = json.dumps(f"{scratch}/{name}")
            keys = [f"goal.steps={args.steps}", f"directory={folder}", *args.set]
            if name == "loader_workers":
                keys += [f"techniques.{name}.{knob}" for knob in args.knobs]
            side = changed(plan, [*words, *keys], catalogue())
            steps, report = timed(side, row_s)
            steps_s = [step["step_s"] for step in steps]
            healthy = healthy or (median(steps_s), fmean(steps_s))
            values = metrics(steps, healthy)
            receipts.append(
                "loading",
                values,
                results=args.results,
                shape=file.stem,
                side=name,
                slow=args.slow if row_s else 0,
                n=len(steps),
                seeds=[side.seed],
                row_s=row_s,
                plan_sha256=receipts.sha256(side.dump()),
                techniques=sorted(side.techniques),
                loader=report["techniques"].get("loader_workers", {}).get("numbers"),
            )
            print(name, {key: one["value"] for key, one in values.items()}, flush=True)
            if not row_s:
                row_s = args.slow * healthy[0] / side.rows_per_step


if __name__ == "__main__":
    main()
