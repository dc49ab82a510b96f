"""Compute how far the planner is off over all receipts, and so the widths of its intervals.

    python benchmarks/residuals.py
    python benchmarks/residuals.py --machine MACHINE.json

A receipt of a step becomes its plan again, by the rule that wrote it, and is predicted with the
rates of the datasheet, or with those that `headrace probe` kept. With the datasheet's rates, the
outcomes of the lists that were written down before (`lists.py`) are predicted, too: each of their
choices is a shape, all of it measured on one GPU. The widths that it prints stand in
headrace/predict/intervals.py, and hold for a shape that was left out: those constants of
costs/work.py that are from steps are fitted anew to the other shapes' rows, and so are quantiles of
their errors; both ends are moved out until 80% of what was left out lies inside, every shape
counted alike. The widths after 20 steps come from pairs of rows of different shapes: one sets the
model, the other is predicted. The widths of the same workload come from the lists, and hold 88%:
the first candidate of a choice sets the model for its others. Reserved memory is compared where a
row has it.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from lists import configurations, firsts

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import UnsupportedError
from headrace.costs.machine import Machine
from headrace.costs.step import step_time
from headrace.costs.work import (
    ATTENTION_IN_STEP,
    EDGE_S,
    MATMUL_IN_STEP,
    SKIPPING,
    UNFUSED,
    UNHURRIED,
    Attention,
    Matmul,
    Stream,
    Work,
)
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.predict.prediction import NoInterval, predict

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "benchmarks" / "plans"
DEVICE = "NVIDIA H200"
COMMITS = ("0841e19", "09386a9")
"""Commits whose rows have the batches of today's plans; the latter's have reserved memory."""
LEVEL = 0.8
MENDED_ON = 0.88
"""The share that is asked for of one workload's plans: what is left out of the fit had its part
when the model was mended, and 80% is promised of what had none."""
OTHERS = {
    ("limits", "mfu: selective_rows2"): "+selective_checkpoint "
    "techniques.selective_checkpoint.wide_every=1 batch.micro_sequences=2",
}
"""(topic, recipe) -> the changes of its shape's plan that rows of it had"""


CONSTANTS = np.array([MATMUL_IN_STEP, ATTENTION_IN_STEP, UNFUSED])
"""Constants of costs/work.py that were fitted to measured steps."""
NEUTRAL = np.array([1.0, 1.0, 1.0])
"""The values of `CONSTANTS` before anything was measured."""


@dataclass(frozen=True)
class Parts:
    """Hold a step's predicted parts before `CONSTANTS`, and the measured step, in seconds."""

    matmuls_s: float
    attention_s: float
    loose_s: float
    """Seconds of streams that are not fused."""
    rest_s: float
    host_s: float
    measured_s: float

    @classmethod
    def of(cls, plan: Plan, context: Context, machine: Machine, measured_s: float) -> "Parts":
        """Return the parts of a plan."""
        ledger = make_ledger(plan, context)
        micro = ledger.sizes["micro_batches"]
        time = step_time(ledger.work, machine, micro)

        def spent(pieces: Sequence[Work]) -> float:
            times = (1.0 if p.phase == "optimizer" else micro for p in pieces)
            return sum(n * p.seconds(machine) for n, p in zip(times, pieces, strict=True))

        every = list(ledger.work.values())
        mixing = [
            p
            for p in every
            if isinstance(p, Attention) and SKIPPING.get(p.kernel, p.kernel) not in UNHURRIED
        ]
        eager = [p for p in every if isinstance(p, Stream) and p.fused is not None]
        loose = spent([p for p in eager if p.loose == UNFUSED])
        attention, matmuls = spent(mixing), spent([p for p in every if isinstance(p, Matmul)])
        rest = sum(time.device_s.values()) - time.of("product") - attention - loose
        return cls(
            matmuls / MATMUL_IN_STEP,
            attention / ATTENTION_IN_STEP,
            loose / UNFUSED,
            rest,
            time.host_s,
            measured_s,
        )


@dataclass(frozen=True)
class Row:
    """Hold a receipt beside the prediction of its plan.

    Args:
        shape: name of the plan.
        what: the rest that names it.
        ratio: of measured to predicted seconds of a step; None where none is predicted.
        allocated, reserved: of measured to predicted bytes, None where not measured. Reserved
            bytes below the allocated ones count as not measured: the reading used segments that an
            earlier one of its process had left.
        fits: "yes", "tight" or "no", as the planner says of what ran.
        parts: what the prediction of its step is made of, where there is one.
        first: whether it sets the model for the rows of its shape that come after it: they are of
            one workload, and steps of one GPU.
        probed: of measured to predicted seconds, as predicted from its GPU's own probes before it
            ran.
    """

    shape: str
    what: str
    ratio: float | None
    allocated: float | None
    reserved: float | None
    fits: str
    parts: Parts | None = None
    first: bool = False
    probed: float | None = None


def standing(topic: str, results: Path, *, full: bool = True) -> Iterator[dict[str, Any]]:
    """Yield rows that no later row retracts; with `full` only those that have metrics."""
    lines = (results / f"{topic}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    retracted = {row.get("retracts") for row in rows}
    for number, row in enumerate(rows, 1):
        if number not in retracted and "retracts" not in row and (row.get("metrics") or not full):
            yield row


def known(folder: Path) -> list[dict[str, Any]]:
    """Return rows of plans.jsonl that stand; an outcome that a program refused is none."""
    if not (folder / "plans.jsonl").is_file():
        return []
    return [row for row in standing("plans", folder, full=False) if "refused" not in row]


def plans(results: Path) -> Iterator[tuple[str, dict[str, Any], Plan]]:
    """Yield the name of a receipt, the receipt and its plan."""
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
        text,
        catalogue(),
        overrides=[w for w in words if w[0] not in "+-"],
        with_=[w[1:] for w in words if w[0] == "+"],
        without=[w[1:] for w in words if w[0] == "-"],
    )


def plan_of(row: dict[str, Any]) -> Plan:
    """Return the plan as benchmarks/techniques.py made it."""
    had, on = _changed(row["shape"], []).techniques, row["techniques"]
    keys = [k for k in row["knobs"].split(",") if k]
    keys = [k if "." in k.partition("=")[0] else f"techniques.{row['technique']}.{k}" for k in keys]
    sets = [change for change in row["overrides"] if change[0] not in "+-"]
    sets = [c for c in sets if not c.startswith("techniques.") or c.split(".")[1] in on]
    return _changed(
        row["shape"],
        [
            *sets,
            *keys,
            *(f"+{n}" for n in on if n not in had),
            *(f"-{n}" for n in had if n not in on),
        ],
    )


def on_device(plan: Plan, device_name: str = DEVICE) -> Context:
    """Return the context of a plan on a device that is not here."""
    return elsewhere(make_context(plan, torch.device("cpu")), device_name)


def rows(results: Path = ROOT / "results", machine: Machine | None = None) -> list[Row]:
    """Return every receipt beside its prediction, by assumed rates where no machine's are given."""
    compared, machine = [], machine or Machine.assumed(DEVICE)
    for what, row, plan in plans(results):
        context = on_device(plan)
        try:
            seen = predict(plan, context, machine)
        except UnsupportedError:  # a package that is not installed here
            continue
        values = {name: m["value"] for name, m in row["metrics"].items()}
        rate, reserved = values.get("tokens_per_s"), values.get("reserved_memory")
        unsure = seen.time.no_interval in (NoInterval.FEW, NoInterval.FP32)
        timed = seen.time.step_s and not unsure
        step_s = plan.batch.tokens / rate if rate and timed else None
        compared.append(
            Row(
                row["shape"],
                what,
                step_s / seen.time.step_s if step_s and seen.time.step_s else None,
                values["peak_memory"] / seen.memory.peak_bytes if "peak_memory" in values else None,
                reserved / seen.memory.reserved_bytes
                if reserved
                and seen.memory.reserved_bytes
                and reserved >= values.get("peak_memory", 0)
                else None,
                seen.memory.fits,
                Parts.of(plan, context, machine, step_s) if step_s else None,
            )
        )
    return compared


def outcomes(results: Path = ROOT / "results") -> Iterator[Row]:
    """Yield the outcomes of the lists' choices where steps were timed, by assumed rates."""
    machine, leads = Machine.assumed(DEVICE), {one.id for one in firsts().values()}
    timed = [r for r in known(results) if r.get("step_s")]
    came = {r["id"]: r["step_s"] for r in timed if r["kind"] == "outcome"}
    predicted = {r["id"]: r["step_s"] for r in timed if r.get("tier") == "after_probes"}
    for one in configurations():
        if one.choice and one.id in came:
            parts = Parts.of(one.plan, on_device(one.plan), machine, came[one.id])
            ratio = math.exp(errors([parts], CONSTANTS)[0])
            probed = came[one.id] / predicted[one.id] if one.id in predicted else None
            leading = one.id in leads
            yield Row(one.choice, one.id, ratio, None, None, "yes", parts, leading, probed)


def quantiles(logs: list[float], level: float = LEVEL) -> tuple[float, float]:
    """Return the ends of the middle `level` of values, as if one more lay outside of each end."""
    ordered, share = sorted(logs), (1 - level) / 2
    skipped = max(0, math.floor(share * (len(ordered) + 1)) - 1)
    return ordered[skipped], ordered[-1 - skipped]


def errors(rows_R: list[Parts], constants: Any) -> Any:
    """Return the logarithm of measured over predicted step time for each of R rows."""
    matmuls, attention, loose, rest, host, measured = np.array(
        [[p.matmuls_s, p.attention_s, p.loose_s, p.rest_s, p.host_s, p.measured_s] for p in rows_R]
    ).T
    beside, in_step, unfused = constants
    device = beside * matmuls + in_step * attention + unfused * loose + rest
    return np.log(measured / (np.maximum(device, host) + EDGE_S))


def fitted(rows_R: list[Parts]) -> Any:
    """Return the constants with the least mean error of rows, fitted one after the other."""
    best, stride = NEUTRAL.copy(), 0.2

    def off(constants: Any) -> float:
        return float(np.abs(errors(rows_R, constants)).mean())

    while stride > 1e-3:
        before = off(best)
        for at in range(len(best)):
            tried = [best + sign * stride * (np.arange(len(best)) == at) for sign in (-1, 1)]
            best = min((best, *(c for c in tried if (c >= 0).all())), key=off)
        if off(best) >= before:
            stride /= 2
    return best


def widened(
    pairs: list[tuple[list[float], list[float]]], level: float = LEVEL
) -> tuple[float, float]:
    """Return quantiles of known errors, moved out until `level` of the other errors lies inside.

    Every pair of known and other errors counts alike, however many rows it has, since what is
    predicted has another shape.
    """
    ends = [(*quantiles(known, level), left) for known, left in pairs]

    def inside(wider: float) -> float:
        return fmean(fmean([a - wider <= x <= b + wider for x in left]) for a, b, left in ends)

    wider = next(w / 1e3 for w in range(1000) if inside(w / 1e3) >= level)
    low, high = quantiles([x for known, _ in pairs for x in known], level)
    return math.exp(low - wider), math.exp(high + wider)


def widths(
    by_probe: list[Row], datasheet: list[Row] | None = None
) -> dict[str, tuple[float, float, int]]:
    """Return low, high and the number of rows by basis.

    Args:
        by_probe: rows by some machine's rates.
        datasheet: by the rates that the constants are fitted with; None where they are the same.
    """
    by_shape, fit = (_by_shape(each) for each in (by_probe, datasheet or by_probe))
    led, alone, after, beside = [row.shape for row in by_probe if row.first], [], [], []
    probed: dict[str, list[float]] = {}
    for row in by_probe:
        if row.probed:
            probed.setdefault(row.shape, []).append(math.log(row.probed))
    own: list[tuple[list[float], list[float]]] = []
    for shape in by_shape:
        others = [name for name in fit if name != shape]
        constants = fitted([p for name in others for p in fit[name]])
        logs = {name: list(errors(parts, constants)) for name, parts in by_shape.items()}
        alone.append(([x for name in others for x in logs[name]], logs[shape]))
        best = logs | probed
        own.append(([x for name in others for x in best[name]], best[shape]))
        for name in others:  # what sets the model is a row of it, and so is what else was known
            same = [y - x for x in logs[name] for y in logs[name]]
            after.append((same, [y - x for x in logs[name] for y in logs[shape]]))
        spread_of = {name: [y - logs[name][0] for y in logs[name][1:]] for name in led}
        if shape in led:
            beside.append(
                ([x for name in led if name != shape for x in spread_of[name]], spread_of[shape])
            )
    count = sum(map(len, by_shape.values()))
    wide = {"no_gpu": (*widened(alone), count), "after_20_steps": (*widened(after), count)}
    if probed:
        wide["after_probes"] = (*widened(own), count)
    if beside:
        n = sum(len(left) for _, left in beside)
        wide["same_workload"] = (*widened(beside, MENDED_ON), n)
    return wide


def _by_shape(compared: list[Row]) -> dict[str, list[Parts]]:
    by_shape: dict[str, list[Parts]] = {}
    for row in compared:
        if row.parts is not None:
            by_shape.setdefault(row.shape, []).append(row.parts)
    return by_shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", type=Path, help="what was probed")
    args = parser.parse_args()
    machine = Machine.read(args.machine) if args.machine else None
    compared = rows(machine=machine) if machine else [*rows(), *outcomes()]
    for row in compared:
        print(row)
    ratios = [row.ratio for row in compared if row.ratio is not None]
    print(f"step: {len(ratios)} rows, mean error {fmean(abs(1 / r - 1) for r in ratios):.2%}")
    for name in ("allocated", "reserved"):
        off = [abs(1 / r - 1) for row in compared if (r := getattr(row, name)) is not None]
        summary = f"median {median(off):.2%}, worst {max(off):.2%}" if off else "none measured"
        print(f"{name}: {len(off)} rows, {summary}")
    for basis, (low, high, n) in widths(compared, rows() if machine else None).items():
        basis = "after_probes" if machine and basis == "no_gpu" else basis
        print(f"{basis}: Width({low:.3f}, {high:.3f}, {n})")


if __name__ == "__main__":
    main()
