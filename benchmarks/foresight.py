"""Compare the planner with configurations that were written down before any was run.

    python benchmarks/foresight.py list
    python benchmarks/foresight.py predict
    python benchmarks/foresight.py predict --machine MACHINE.json
    python benchmarks/foresight.py measure --first
    python benchmarks/foresight.py predict --machine MACHINE.json --calibrated
    python benchmarks/foresight.py measure --limit-s 500
    CUDA_VISIBLE_DEVICES=1 python benchmarks/foresight.py measure --part 2/4 --results FOLDER
    python benchmarks/foresight.py picks

`plans/held_out*.toml` are the lists. They hold choices, whose candidates are timed, and plans for
memory alone, of which only those near the device's capacity are run. The second list is for the
planner that the outcomes of the first one changed. `predict` needs no GPU. It writes a row for each
configuration to results/plans.jsonl, at the tier of what it was given: rates of the datasheet, the
file that `headrace probe` kept, or beside either 20 measured steps of each choice's first candidate
(`measure --first`), by which its others are predicted. Those rows are committed. Then `measure`
runs what has a prediction and no outcome, each from a fresh build in a process that takes readings,
and `picks` writes a row for each choice from the rows that stand. A row that is there is never
written again, so every command can be given again. Several GPUs take a part each. All candidates of
a choice run on one GPU, since each GPU has a clock of its own, and that GPU was probed itself.

A plan that fits leaves at least 7% of memory free: `fits` is true where the planner answers "yes",
and false where it answers "tight" or "no".
"""

import argparse
import gc
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parts
import receipts
import torch
from lists import LISTS, Configuration, configurations, firsts
from residuals import known, on_device

from headrace.core.errors import RefusalKind
from headrace.costs.machine import Machine
from headrace.plan.plan import Plan
from headrace.predict.calibration import ENOUGH, MeasuredPlan
from headrace.predict.prediction import Prediction, calibrated, predict
from headrace.tuner.readings import Reading, time_steps
from headrace.tuner.worker import Worker

DEVICE = "NVIDIA H200"
WARM, TIMED = 3, 8
BRIEF = (2, 1)
"""Warm and timed steps of a plan of which only memory is measured."""
RISKY = (0.88, 1.12)
"""Predicted reserved bytes over capacity, from and to, at which a plan may or may not fit."""
CHILD_S = 150.0
START_S = 9.0
"""Seconds of a configuration beside its steps: the build, compiling a block. It is a guess."""
CLOSE = 0.01
"""Candidates whose predicted times differ by a smaller share than this are no choice."""


# --- predict ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planner:
    """Hold what a prediction is made with: a machine, and measured steps where there are any."""

    machine: Machine
    measured: dict[str, tuple[Plan, MeasuredPlan]] | None = None
    """Maps a choice to its first candidate and the measured time of that one's steps."""

    @property
    def tier(self) -> str:
        """Return the tier: what the prediction rests on."""
        if self.measured is not None:
            return "after_20_steps"
        return "after_probes" if self.machine.source == "probes" else "no_gpu"

    def of(self, one: Configuration) -> Prediction:
        """Return the prediction of a plan."""
        calibration = None
        if self.measured is not None:
            plan, steps = self.measured[one.choice]
            calibration = calibrated(plan, on_device(plan, DEVICE), self.machine, steps)
        return predict(one.plan, on_device(one.plan, DEVICE), self.machine, calibration)


def write_predictions(args: argparse.Namespace) -> None:
    """Write a row for each configuration that has none at this tier."""
    machine = Machine.read(args.machine) if args.machine else Machine.assumed(DEVICE)
    rows = known(args.results)
    first = firsts(args.list)
    came = {r["id"]: r for r in rows if r["kind"] == "outcome"}
    measured = {
        one.choice: (one.plan, MeasuredPlan(came[one.id]["step_s"], steps=came[one.id]["timed"]))
        for one in first.values()
        if came.get(one.id, {}).get("step_s")
    }
    planner = Planner(machine, measured if args.calibrated else None)
    done = {r["id"] for r in rows if r["kind"] == "prediction" and r["tier"] == planner.tier}
    done |= {*came} | ({one.id for one in first.values()} if args.calibrated else set())
    mine, wrote = shared(args, rows), 0
    for one in configurations(args.list):
        if one.id in done or (not one.choice and planner.tier != "no_gpu"):
            continue
        if mine is not None and _group(one) not in mine:
            continue
        if args.calibrated and one.choice not in measured:
            continue
        prediction = planner.of(one)
        receipts.append(
            "plans",
            {},
            results=args.results,
            kind="prediction",
            id=one.id,
            tier=planner.tier,
            **predicted(one, one.plan, prediction),
            rates_of=machine.date or "datasheet",
            calibrated_by=prediction.rates.calibrated_by,
            predicted_for=DEVICE,
        )
        wrote += 1
    print(f"{wrote} predictions at the tier {planner.tier}")


def shared(args: argparse.Namespace, rows: list[dict[str, Any]]) -> set[str] | None:
    """Return the groups of this part, split by the predictions without a GPU; None means all."""
    if args.part == (1, 1):
        return None
    predictions = {r["id"]: r for r in rows if r["kind"] == "prediction" and r["tier"] == "no_gpu"}
    every = [
        c for c in configurations(args.list) if c.id in predictions and _runs(c, predictions[c.id])
    ]
    return parts.share(_costs(every, predictions), args.part)


def predicted(one: Configuration, plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """Return the part of a row that a prediction fills."""
    time, memory = prediction.time, prediction.memory
    ends = time.step_between if one.choice else None
    return {
        "step_s": time.step_s if one.choice else None,
        "step_between_s": [ends.low, ends.high] if ends else None,
        "allocated_bytes": memory.peak_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "peak_at": memory.peak_at,
        "fits": memory.fits == "yes",
        "says": memory.fits,
        "risky": risky(prediction),
        "choice": one.choice,
        "shape": one.shape,
        "changes": one.words,
        "unknown": prediction.time.unknown,
        "techniques": sorted(plan.techniques),
        "plan_sha256": receipts.sha256(plan.dump()),
    }


def risky(prediction: Prediction) -> bool:
    """Return whether the plan is so near the capacity that it may not fit."""
    share = (
        prediction.memory.reserved_bytes or prediction.memory.peak_bytes
    ) / prediction.memory.capacity_bytes
    return RISKY[0] <= share <= RISKY[1]


# --- measure ---------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    """Measure each configuration that is to be run and has no outcome."""
    if not torch.cuda.is_available() and not args.here:
        raise SystemExit("no GPU is here: outcomes are measured on one")
    rows = known(args.missing) + (known(args.results) if args.results != args.missing else [])
    predictions = {r["id"]: r for r in rows if r["kind"] == "prediction" and r["tier"] == "no_gpu"}
    done = {r["id"] for r in rows if r["kind"] == "outcome"}
    every = [
        c for c in configurations(args.list) if c.id in predictions and _runs(c, predictions[c.id])
    ]
    mine, first = shared(args, rows), firsts(args.list)
    ends_s, left = time.monotonic() + args.limit_s, []
    with Worker(here=args.here) as worker:
        for one in every:
            leads = bool(one.choice) and first[one.choice].id == one.id
            if one.id in done or not one.id.startswith(args.only) or (args.first and not leads):
                continue
            if mine is not None and _group(one) not in mine:
                continue
            if time.monotonic() >= ends_s:
                left.append(one.id)
                continue
            measure_one(one, predictions[one.id], worker, args.results, ENOUGH if leads else TIMED)
    print(f"left: {', '.join(left) or 'none'}")


def _runs(one: Configuration, prediction: dict[str, Any]) -> bool:
    return bool(one.choice or prediction["risky"])


def _group(one: Configuration) -> str:
    """Return the name of the group that one GPU measures."""
    return one.choice or one.id


def _costs(every: list[Configuration], predictions: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the approximate seconds of each group."""
    costs: dict[str, float] = {}
    for one in every:
        spent_s = START_S + (WARM + TIMED) * (predictions[one.id]["step_s"] or 0.0)
        costs[_group(one)] = costs.get(_group(one), 0.0) + spent_s
    return costs


def measure_one(
    one: Configuration, prediction: dict[str, Any], worker: Worker, results: Path, steps: int
) -> dict[str, Any]:
    """Run one configuration, with `steps` timed steps if it is of a choice, and write its row."""
    began_s, plan = time.monotonic(), one.plan
    if receipts.sha256(plan.dump()) != prediction["plan_sha256"]:
        raise SystemExit(f"{one.id} is not the plan that was predicted: give it another name")
    warm, timed = (WARM, steps) if one.choice else BRIEF
    reading = worker.ask(fresh_steps, plan, limit_s=CHILD_S, warm=warm, timed=timed)
    full = reading.refusal is RefusalKind.MEMORY
    if reading.refused and not full:
        row = receipts.append(
            "plans",
            {},
            results=results,
            kind="outcome",
            id=one.id,
            risky=prediction["risky"],
            refused=reading.refused,
        )
    else:
        row = receipts.append(
            "plans",
            {},
            results=results,
            kind="outcome",
            id=one.id,
            risky=prediction["risky"],
            step_s=None if full or not one.choice else reading.seconds[0],
            allocated_bytes=None if full else reading.peak_bytes,
            reserved_bytes=None if full else reading.reserved_bytes,
            fits=not full,
            out_of_memory=reading.refused,
            choice=one.choice,
            shape=one.shape,
            warm=warm,
            timed=timed,
            n=timed,
            seeds=[plan.seed],
            techniques=sorted(plan.techniques),
            plan_sha256=prediction["plan_sha256"],
            evidence=reading.evidence,
        )
    print(one.id, *beside(prediction, reading), f"({time.monotonic() - began_s:.0f} s)", flush=True)
    return row


def fresh_steps(plan: Plan, *, warm: int, timed: int) -> Reading:
    """Return a reading of steps after freeing cuBLAS workspaces, so that it counts them anew."""
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        gc.collect()
        torch.cuda.empty_cache()
    return time_steps(plan, text=False, warm=warm, timed=timed)


def beside(prediction: dict[str, Any], reading: Reading) -> list[str]:
    """Return lines that say how far a prediction was off."""
    if reading.refused:
        return [f"said {prediction['says']}:", reading.refused[:120]]
    pairs = (
        ("step", prediction["step_s"], reading.seconds[0]),
        ("allocated", prediction["allocated_bytes"], reading.peak_bytes),
        ("reserved", prediction["reserved_bytes"], reading.reserved_bytes),
    )
    return [f"{name} {p / m - 1:+.1%}" for name, p, m in pairs if p and m]


# --- picks -----------------------------------------------------------------------------------


def picks(args: argparse.Namespace) -> None:
    """Write a row for each choice whose candidates are all measured, at every tier that has one."""
    rows, file = known(args.results), args.results / "picks.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    done = {(r["workload"], r.get("tier")) for r in map(json.loads, filter(None, lines))}
    came = {r["id"]: r for r in rows if r["kind"] == "outcome"}
    for tier in ("no_gpu", "after_probes", "after_20_steps"):
        predictions = {r["id"]: r for r in rows if r["kind"] == "prediction" and r["tier"] == tier}
        asked: dict[str, list[str]] = {}
        for one in configurations(args.list):
            if one.choice and one.id in predictions:
                asked.setdefault(one.choice, []).append(one.id)
        for choice, names in asked.items():
            pairs = [(n, predictions[n]["step_s"], came.get(n, {}).get("step_s")) for n in names]
            ran = [(n, p, m) for n, p, m in pairs if p and m]
            if (choice, tier) in done or any(n not in came for n in names) or len(ran) < 2:
                continue
            receipts.append(
                "picks",
                {},
                results=args.results,
                workload=choice,
                tier=tier,
                candidates=[{"id": n, "predicted_s": p, "measured_s": m} for n, p, m in ran],
                left_out=[n for n, p, m in pairs if not (p and m)],
            )
            print(f"{choice} {tier}: {len(ran)} candidates")


# --- the rest --------------------------------------------------------------------------------


def print_list(args: argparse.Namespace) -> None:
    """Print the list with its predictions without a GPU, and the device time that it would take."""
    planner, spent_s, runs = Planner(Machine.assumed(DEVICE)), 0.0, 0
    steps_s: dict[str, list[float]] = {}
    for one in configurations(args.list):
        prediction = planner.of(one)
        steps = WARM + TIMED if one.choice else sum(BRIEF)
        if one.choice or risky(prediction):
            runs += 1
            spent_s += START_S + steps * (prediction.time.step_s or 1.0) * (
                prediction.memory.fits != "no"
            )
        others = steps_s.setdefault(one.choice, []) if one.choice and prediction.time.step_s else []
        close = any(
            abs(math.log(prediction.time.step_s / s)) < CLOSE
            for s in others
            if prediction.time.step_s
        )
        others.append(prediction.time.step_s or math.nan)
        step = (
            "no time: " + prediction.time.unknown
            if prediction.time.step_s is None
            else f"{prediction.time.step_s:.3f} s"
        )
        print(
            f"{one.id:45} {step:10} {prediction.memory.peak_bytes / 2**30:7.1f} GiB "
            f"{(prediction.memory.reserved_bytes or math.nan) / 2**30:7.1f} reserved "
            f"{prediction.memory.fits:5} "
            f"{'risky ' if risky(prediction) else ''}{'close' if close else ''}"
        )
    print(f"{runs} to run, {spent_s:.0f} s of a GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    phases = {"list": print_list, "predict": write_predictions, "measure": measure, "picks": picks}
    parser.add_argument("phase", choices=phases)
    parser.add_argument("--list", type=Path, nargs="+", default=LISTS)
    parser.add_argument("--machine", type=Path, help="predict: what was probed")
    parser.add_argument(
        "--calibrated",
        action="store_true",
        help="predict: by the first candidates, which were measured",
    )
    parser.add_argument("--first", action="store_true", help="measure: them alone")
    parser.add_argument("--only", default="", help="measure: how names begin")
    parser.add_argument(
        "--part",
        type=parts.part,
        default=(1, 1),
        metavar="K/N",
        help="the K-th of N, which other GPUs measure",
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin none later")
    parser.add_argument(
        "--missing",
        type=Path,
        default=receipts.ROOT / "results",
        help="measure: where predictions stand, and some outcomes",
    )
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    phases[args.phase](args)


if __name__ == "__main__":
    main()
