"""How far the planner is off over all receipts that can be planned again: its intervals' widths.

    python benchmarks/residuals.py
    python benchmarks/residuals.py --machine MACHINE.json

A receipt of a step becomes its plan again, by the rule that wrote it, and is predicted with the
rates of the datasheet, or with those that `headrace probe` kept. The widths that it prints stand in
headrace/intervals.py. Those without a GPU hold for a shape that was left out: quantiles of the
other shapes' rows, both ends moved out until 80% of what was left out lies inside, every shape
counted alike. Those after 20 steps come of pairs of rows of different shapes: one sets the model,
the other is predicted. Reserved memory is compared where a row has it.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from headrace.cli import catalogue
from headrace.context import elsewhere, make_context
from headrace.core.errors import UnsupportedError
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.core.technique import Context
from headrace.planner import foresee

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "benchmarks" / "plans"
DEVICE = "NVIDIA H200"
COMMITS = ("0841e19", "09386a9")
"""Whose rows have the batches that the plans have today. Reserved memory is in the latter's."""
LEVEL = 0.8
OTHERS = {
    ("limits", "mfu: selective_rows2"): "+selective_checkpoint "
    "techniques.selective_checkpoint.wide_every=1 batch.micro_sequences=2",
}  # fmt: skip
"""(topic, recipe) -> the changes of its shape's plan that rows of it had"""


@dataclass(frozen=True)
class Row:
    """A receipt beside what is predicted of its plan.

    Args:
        shape: name of the plan.
        what: the rest that names it.
        ratio: of measured to predicted seconds of a step; None where none is predicted.
        allocated, reserved: of measured to predicted bytes, None where not measured. Reserved
            bytes below the allocated ones count as not measured: the reading used segments that an
            earlier one of its process had left.
        fits: "yes", "tight" or "no", as the planner says of what ran.
    """

    shape: str
    what: str
    ratio: float | None
    allocated: float | None
    reserved: float | None
    fits: str


def standing(topic: str, results: Path, *, full: bool = True) -> Iterator[dict[str, Any]]:
    """Rows that no later row retracts; with `full` only those that have metrics."""
    lines = (results / f"{topic}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    retracted = {row.get("retracts") for row in rows}
    for number, row in enumerate(rows, 1):
        if number not in retracted and "retracts" not in row and (row.get("metrics") or not full):
            yield row


def plans(results: Path) -> Iterator[tuple[str, dict[str, Any], Plan]]:
    """What a receipt is called, the receipt and its plan."""
    for row in standing("techniques", results):
        if row["commit"] in COMMITS:
            yield f"{row['base']} {row['technique']} {row['knobs']}", row, plan_of(row)
    for row in standing("limits", results):
        if (changes := OTHERS.get(("limits", row["recipe"]))) is not None:
            yield row["recipe"], row, _changed(row["shape"], changes.split())
    for row in standing("peers", results):
        plan = _changed(row["shape"], row.get("overrides", []))
        if row["peer"] == "headrace" and row["commit"] in COMMITS:
            yield "peers", row, plan


def _changed(shape: str, words: list[str]) -> Plan:
    text = (PLANS / f"{shape}.toml").read_text()
    return Plan.read(
        text, catalogue(), overrides=[w for w in words if w[0] not in "+-"],
        with_=[w[1:] for w in words if w[0] == "+"], without=[w[1:] for w in words if w[0] == "-"],
    )  # fmt: skip


def plan_of(row: dict[str, Any]) -> Plan:
    """As benchmarks/techniques.py made it: its techniques, knobs and the keys of every plan."""
    had, on = _changed(row["shape"], []).techniques, row["techniques"]
    keys = [k for k in row["knobs"].split(",") if k]
    keys = [k if "." in k.partition("=")[0] else f"techniques.{row['technique']}.{k}" for k in keys]
    sets = [change for change in row["overrides"] if change[0] not in "+-"]
    sets = [c for c in sets if not c.startswith("techniques.") or c.split(".")[1] in on]
    return _changed(row["shape"], [
        *sets, *keys, *(f"+{n}" for n in on if n not in had), *(f"-{n}" for n in had if n not in on)
    ])  # fmt: skip


def on_device(plan: Plan, device_name: str = DEVICE) -> Context:
    """Where a plan would run."""
    return elsewhere(make_context(plan, torch.device("cpu")), device_name)


def rows(results: Path = ROOT / "results", machine: Machine | None = None) -> list[Row]:
    """Every receipt beside its prediction, by assumed rates where no machine's are given."""
    found, machine = [], machine or Machine.assumed(DEVICE)
    for what, row, plan in plans(results):
        try:
            seen = foresee(plan, on_device(plan), machine)
        except UnsupportedError:  # a package that is not installed here
            continue
        told = {name: m["value"] for name, m in row["metrics"].items()}
        rate, held = told.get("tokens_per_s"), told.get("reserved_memory")
        found.append(Row(
            row["shape"], what,
            plan.batch.tokens / rate / seen.step_s if rate and seen.step_s else None,
            told["peak_memory"] / seen.peak_bytes if "peak_memory" in told else None,
            held / seen.reserved_bytes
            if held and seen.reserved_bytes and held >= told.get("peak_memory", 0) else None,
            seen.fits,
        ))  # fmt: skip
    return found


def quantiles(logs: list[float]) -> tuple[float, float]:
    """The ends of the middle 80%, each with one more row outside of it than there is."""
    ordered, share = sorted(logs), (1 - LEVEL) / 2
    skipped = max(0, math.floor(share * (len(ordered) + 1)) - 1)
    return ordered[skipped], ordered[-1 - skipped]


def left_out(by_shape: dict[str, list[float]], wider: float = 0.0) -> float:
    """The share of rows inside the interval of the other shapes' rows, `wider` at both ends.

    Every shape counts alike, however many rows it has: what is predicted has yet another shape.
    """
    shares = []
    for shape, logs in by_shape.items():
        low, high = quantiles([x for other in by_shape if other != shape for x in by_shape[other]])
        shares.append(fmean(low - wider <= x <= high + wider for x in logs))
    return fmean(shares)


def widths(found: list[Row]) -> dict[str, tuple[float, float, int]]:
    """Tier -> low, high, rows."""
    by_shape: dict[str, list[float]] = {}
    for row in found:
        if row.ratio is not None:
            by_shape.setdefault(row.shape, []).append(math.log(row.ratio))
    wider = next(w / 1e3 for w in range(1000) if left_out(by_shape, w / 1e3) >= LEVEL)
    every = [x for logs in by_shape.values() for x in logs]
    low, high = quantiles(every)
    pairs = [y - x for a, b in permutations(by_shape, 2) for x in by_shape[a] for y in by_shape[b]]
    after = quantiles(pairs)
    return {
        "no_gpu": (math.exp(low - wider), math.exp(high + wider), len(every)),
        "after_20_steps": (math.exp(after[0]), math.exp(after[1]), len(every)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", type=Path, help="what was probed")
    args = parser.parse_args()
    found = rows(machine=Machine.read(args.machine) if args.machine else None)
    for row in found:
        print(row)
    ratios = [row.ratio for row in found if row.ratio is not None]
    print(f"step: {len(ratios)} rows, mean error {fmean(abs(1 / r - 1) for r in ratios):.2%}")
    for name in ("allocated", "reserved"):
        off = [abs(1 / r - 1) for row in found if (r := getattr(row, name)) is not None]
        told = f"median {median(off):.2%}, worst {max(off):.2%}" if off else "none measured"
        print(f"{name}: {len(off)} rows, {told}")
    for tier, (low, high, n) in widths(found).items():
        tier = "after_probes" if args.machine and tier == "no_gpu" else tier
        print(f"{tier}: Width({low:.3f}, {high:.3f}, {n})")


if __name__ == "__main__":
    main()
