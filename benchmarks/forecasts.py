"""Measure how right the doctor's forecasts are: record them first, then measure the gains.

    python benchmarks/forecasts.py --say --shapes 160m 1b
    python benchmarks/forecasts.py --measure --shapes 160m 1b --limit-s 500 --part 2/4

`--say` writes what the doctor forecasts for each remedy of each planted plan, at no device time, to
results/forecasts_said.jsonl, which is to be committed before anything is measured. A planted plan
is a shape's recipe with something that ails it (`BASES`). Its remedies are those that a reader is
shown: the first ones of each bottleneck that the ledger prices, unless their gain or loss is
smaller than `--least`.

`--measure` takes the forecasts that have no row yet in results/forecasts.jsonl, times the planted
plan before and after each group of its remedies, and each remedy between, and writes one row a
remedy: its forecast as it was recorded, and the gain. It prints first how long it will take.
Several GPUs measure a part each, all remedies of a planted plan on one. Interrupted, it writes what
it has.

These are forecasts of plans that nobody ran. Those of a run know its step, and whether its device
waited for launches: `--run` times the planted plans alone, into results/forecasts_run.jsonl, and
with `--of run` the other two record and measure the forecasts that the doctor makes of them.

    python benchmarks/forecasts.py --run --shapes 400m
    python benchmarks/forecasts.py --say --of run --shapes 400m
    python benchmarks/forecasts.py --measure --of run --shapes 400m
"""

import argparse
import json
import math
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import parts
import receipts
import torch

from headrace.assemble.context import choose_device, elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError, RefusalKind
from headrace.costs.machine import Machine
from headrace.doctor.findings import KIND_OF, Finding
from headrace.doctor.forecast import MeasuredRun
from headrace.doctor.remedies import PlanRemedy, remedies
from headrace.doctor.words.answer import SHOWN
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.tuner.readings import Reading, time_steps
from headrace.tuner.worker import Worker

CATALOGUE = catalogue()
GROUP = 4
"""Remedies between two timings of their base, since the speed of a host drifts."""
SIDE_S, SIDE_LIMIT_S = 40.0, 240.0
"""Seconds that a reading takes with building and compiling: the estimate, and the limit."""
PRICED = (
    "computation",
    "memory bandwidth",
    "kernel efficiency",
    "launch",
    "memory capacity",
    "unused memory",
)
"""Bottlenecks whose remedies the ledger forecasts."""
BARE = "-*"
"""The word for leaving out every technique."""
BASES: dict[str, str] = {
    "recipe": "",
    "trunk": BARE,
    "eager": "-torch_compile",
    "unfused": "-fused_swiglu -fused_cross_entropy",
    "checkpointed": "+full_checkpoint",
    "few_rows": "batch.micro_sequences={few}",
    "naive": f"{BARE} +full_checkpoint batch.micro_sequences={{few}}",
    "compiled_trunk": f"{BARE} +torch_compile",
    "fp32": f"{BARE} model.precision=fp32",
}
"""Maps what ails a plan to changes of the recipe; `few` is a quarter of its micro-batch."""
AILING = ("trunk", "eager", "checkpointed", "few_rows", "naive")
"""Planted plans that are measured by default: in the others there is little to gain."""


# --- planted plans and what is said of them --------------------------------------------------


assumed = cache(Machine.assumed)
"""Return the assumed rates of a device; the same machine for the same name, with its caches."""


def at(plan: Plan, device_name: str = "") -> tuple[Context, Machine]:
    """Return where a plan runs, here or on a named device, and that device's datasheet rates."""
    if device_name:
        here = make_context(plan, torch.device("cpu"))
        return elsewhere(here, device_name), assumed(device_name)
    context = make_context(plan, choose_device(plan))
    return context, assumed(context.device_name)


def planted(path: Path, base: str) -> Plan:
    """Return a shape's recipe with what ails it."""
    recipe = Plan.read(path.read_text(), CATALOGUE)
    few = max(d for d in range(1, max(1, recipe.micro_rows // 4) + 1) if recipe.micro_rows % d == 0)
    words = BASES[base].format(few=few).split()
    bare = [f"-{name}" for name in recipe.techniques] if BARE in words else []
    added = {w[1:] for w in words if w[0] == "+"}
    bare = [w for w in bare if w[1:] not in added]
    words = [w for w in words if w != BARE and not (w[0] == "-" and w[1:] not in recipe.techniques)]
    return changed(recipe, [*bare, *words], CATALOGUE)


def forecast(
    plan: Plan, least: float, device_name: str = "", measured: MeasuredRun | None = None
) -> list[PlanRemedy]:
    """Return what the doctor forecasts for a plan, each change once."""
    by_change: dict[tuple[str, ...], PlanRemedy] = {}
    for bottleneck in PRICED:
        finding = Finding(KIND_OF[bottleneck], confidence="inferred")
        known = remedies(
            finding, plan, *at(plan, device_name), CATALOGUE, measured or MeasuredRun()
        )
        for remedy in known[:SHOWN]:
            if remedy.gain is not None and abs(remedy.gain.value) >= least:
                by_change.setdefault(remedy.change, remedy)
    return list(by_change.values())


def say(args: argparse.Namespace) -> None:
    """Write a row for each forecast that has none."""
    known = {key(row) for row in _rows(args.results, "forecasts_said")}
    for path in map(receipts.plan_file, args.shapes):
        for base in args.bases:
            workload = f"{path.stem} {base}"
            plan = planted(path, base)
            measured = None
            if args.of == "run" and (measured := ran(workload, plan, args)) is None:
                continue
            forecast_remedies = forecast(plan, args.least, args.device_name, measured)
            for remedy in forecast_remedies:
                words = " ".join(remedy.change)
                if (args.of, workload, words) in known or remedy.gain is None:
                    continue
                gain = remedy.gain
                receipts.append(
                    "forecasts_said",
                    {},
                    results=args.results,
                    of=args.of,
                    remedy=words,
                    workload=workload,
                    forecast={"low": gain.low, "value": gain.value, "high": gain.high},
                    forecast_from=remedy.forecast_from,
                    equality=remedy.equality,
                    memory_bytes=remedy.memory_bytes,
                    baseline_sha256=receipts.sha256(plan.dump()),
                )
            print(f"{workload}: {len(forecast_remedies)} remedies", flush=True)


def ran(workload: str, plan: Plan, args: argparse.Namespace) -> MeasuredRun | None:
    """Return the last timing of a planted plan on the device; None where it could not run."""
    wanted = {"baseline_sha256": receipts.sha256(plan.dump()), "hardware": args.device_name}
    wanted = {key: value for key, value in wanted.items() if value}
    rows = [
        row
        for row in _rows(args.results, "forecasts_run", "workload")
        if all(row[key] == value for key, value in wanted.items())
    ]
    if not rows:
        raise SystemExit(f"{workload}: nobody timed it: --run")
    if "refused" in rows[-1]:
        print(f"{workload}: {rows[-1]['refused']}", flush=True)
        return None
    return MeasuredRun(rows[-1]["metrics"]["step"]["value"], by_host=rows[-1]["by_host"])


def run(args: argparse.Namespace) -> None:
    """Time each planted plan; write its step and whether it waited for launches."""
    ends_s = time.monotonic() + args.limit_s
    with Worker(here=args.here) as worker:
        for path in map(receipts.plan_file, args.shapes):
            for base in args.bases:
                if time.monotonic() >= ends_s:
                    print(f"left: {path.stem} {base}", flush=True)
                    continue
                bench = Bench(f"{path.stem} {base}", [], args, worker, ends_s)
                reading = bench.time(bench.base)
                step_metric = receipts.spread(reading.seconds, "s") if reading.seconds else None
                receipts.append(
                    "forecasts_run",
                    {"step": step_metric} if step_metric else {},
                    results=args.results,
                    workload=bench.workload,
                    by_host=reading.by_host,
                    n=len(reading.seconds),
                    baseline_sha256=receipts.sha256(bench.base.dump()),
                    **({} if step_metric else {"refused": reading.refused}),
                )


# --- what came of it -------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    """Measure every forecast without an outcome, base by base."""
    done = {key(row) for row in _rows(args.results, "forecasts")}
    waiting: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(args.results, "forecasts_said"):
        shape, _, base = row["workload"].partition(" ")
        asked = shape in {receipts.plan_file(s).stem for s in args.shapes} and base in args.bases
        if asked and row.get("of", "plan") == args.of:
            waiting.setdefault(row["workload"], []).append(row)
    mine = parts.share({name: 1.0 + len(rows) for name, rows in waiting.items()}, args.part)
    waiting = {
        name: left
        for name, rows in waiting.items()
        if name in mine and (left := [row for row in rows if key(row) not in done])
    }
    sides = sum(map(len, waiting.values()))
    groups = sum(1 + -(-len(rows) // GROUP) for rows in waiting.values())
    print(
        f"{sides} remedies of {len(waiting)} plans: about {SIDE_S * (sides + groups):.0f} s",
        flush=True,
    )
    ends_s = time.monotonic() + args.limit_s
    with Worker(here=args.here) as worker:
        for workload, rows in waiting.items():
            left = Bench(workload, rows, args, worker, ends_s).run()
            if left:
                print(f"left: {workload}: {left}", flush=True)


class Bench:
    """Hold one planted plan and its remedies while they are measured."""

    def __init__(
        self,
        workload: str,
        rows: list[dict[str, Any]],
        args: argparse.Namespace,
        worker: Worker,
        ends_s: float,
    ) -> None:
        self.workload, self.rows, self.args = workload, rows, args
        self.worker, self.ends_s = worker, ends_s
        shape, _, base = workload.partition(" ")
        (path,) = {p for p in map(receipts.plan_file, args.shapes) if p.stem == shape}
        self.base = planted(path, base)

    def run(self) -> int:
        """Measure group by group, and return how many remedies were not begun."""
        waiting, before = self.rows, None
        while waiting and time.monotonic() < self.ends_s:
            before = before or self.time(self.base)
            if before.refused:
                self.write(waiting, [before], [before] * len(waiting))
                return 0
            group, readings = waiting[:GROUP], list[Reading]()
            try:
                for row in group:
                    if time.monotonic() >= self.ends_s:
                        break
                    readings.append(self.side(row))
                after = self.time(self.base)
            except KeyboardInterrupt:
                self.write(group[: len(readings)], [before], readings)
                raise SystemExit(130) from None
            ran = [before, after] if not after.refused else [before]
            self.write(group[: len(readings)], ran, readings)
            waiting, before = waiting[len(readings) :], None if after.refused else after
        return len(waiting)

    def side(self, row: dict[str, Any]) -> Reading:
        """Return the reading of the plan with a remedy."""
        try:
            plan = changed(self.base, row["remedy"].split(), CATALOGUE)
        except HeadraceError as error:
            return Reading(refused=str(error), refusal=RefusalKind.OTHER)
        return self.time(plan, row["remedy"])

    def time(self, plan: Plan, name: str = "(base)") -> Reading:
        """Return a reading of a plan's steps."""
        warm, timed = self.args.steps
        began_s = time.monotonic()
        reading = self.worker.ask(
            time_steps, plan, limit_s=SIDE_LIMIT_S, text=True, warm=warm, timed=timed, blocks=2
        )
        outcome = reading.refused or f"{mean(reading.seconds) * 1e3:.2f} ms"
        print(f"{self.workload} {name}: {outcome} ({time.monotonic() - began_s:.0f} s)", flush=True)
        return reading

    def write(
        self, rows: Iterable[dict[str, Any]], bases: list[Reading], readings: list[Reading]
    ) -> None:
        """Write one row for each remedy."""
        for row, reading in zip(rows, readings, strict=True):
            facts = {k: row[k] for k in ("remedy", "workload", "forecast", "forecast_from")}
            facts["of"] = row.get("of", "plan")
            facts |= {"said": row["commit"], "baseline_sha256": receipts.sha256(self.base.dump())}
            if reading.refused:
                receipts.append(
                    "forecasts",
                    {},
                    results=self.args.results,
                    n=0,
                    refused=reading.refused,
                    **facts,
                )
                continue
            before_s, after_s = [mean(base.seconds) for base in bases], mean(reading.seconds)
            gains = [base_s / after_s - 1 for base_s in before_s]
            receipts.append(
                "forecasts",
                {"gain": receipts.spread(gains, "of the time after")},
                results=self.args.results,
                n=len(bases),
                measured=mean(gains),
                before_s=mean(before_s),
                after_s=after_s,
                **facts,
            )


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return the key of a forecast."""
    return row.get("of", "plan"), row["workload"], row["remedy"]


def _rows(results: Path, topic: str, about: str = "remedy") -> list[dict[str, Any]]:
    """Return the rows about a remedy that no row retracts."""
    file = results / f"{topic}.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    gone = {row.get("retracts") for row in rows}
    return [row for number, row in enumerate(rows, 1) if number not in gone and about in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--say", action="store_true", help="write forecasts; needs no device")
    parser.add_argument("--measure", action="store_true", help="measure what was said")
    parser.add_argument("--run", action="store_true", help="time the planted plans alone")
    parser.add_argument("--of", choices=("plan", "run"), default="plan", help="what is forecast")
    parser.add_argument("--shapes", nargs="+", default=["160m", "1b"], help="names or plan files")
    parser.add_argument("--bases", nargs="+", default=list(AILING), choices=list(BASES))
    parser.add_argument("--least", type=float, default=0.02, help="smaller gains are not measured")
    parser.add_argument("--device-name", default="NVIDIA H200", help='"" is the device here')
    parser.add_argument("--steps", nargs=2, type=int, default=[3, 5], metavar=("WARM", "TIMED"))
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no reading begins later")
    parser.add_argument("--part", type=parts.part, default=(1, 1), help="K/N, of several GPUs")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    if args.run:
        run(args)
    if args.say:
        say(args)
    if args.measure:
        measure(args)


if __name__ == "__main__":
    main()
