"""Measure the seconds on one GPU until a run reaches 1.54 bits per byte on held-out novels.

    python benchmarks/time_to_quality.py tune  --data DIR     # learning rate x batch x epochs
    python benchmarks/time_to_quality.py final --data DIR --lr 1e-3 --rows 32 --epochs 2

DIR holds `train` and `val` of the 100 English novels (computationalstylistics/100_english_novels,
public-domain texts): 77 and 6 files of UTF-8. The clock is the run's wall clock without compiling
and evaluating; it stops at the first evaluation that reaches the target. `--with NAME` and
`--set KEY=VALUE` measure another recipe with the same program.
"""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import receipts

from headrace.cli.catalogue import catalogue
from headrace.data.ingest import prepare
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.train.run_folder import RunFolder

PLAN = Path(__file__).parent / "plans" / "novels.toml"
LENGTH = 1024
GRID = {"lr": (3e-4, 5e-4, 1e-3, 2e-3), "rows": (16, 32, 64), "epochs": (1.0, 1.5, 2.0, 3.0)}


def plan_of(args: argparse.Namespace, overrides: list[str]) -> Plan:
    """Return the benchmark's plan on the data that was given."""
    places = [
        f"data.sources='{args.data / 'train'}'",
        f"data.validation='{args.data / 'val'}'",
        f"data.directory='{args.work / 'data'}'",
        f"directory='{args.work / 'runs'}'",
    ]
    return Plan.read(
        PLAN.read_text(),
        catalogue(),
        overrides=[*places, *overrides, *args.set],
        with_=args.with_,
        without=args.without,
    )


def measure(
    args: argparse.Namespace, lr: float, rows: int, epochs: float, seed: int, stop: bool
) -> dict[str, Any]:
    """Train one configuration.

    Args:
        args: data, techniques, overrides, scratch folder.
        lr: AdamW's learning rate.
        rows: sequences of 1,024 tokens in a batch.
        epochs: the schedule's horizon, in passes over the training text.
        seed: of weights and order.
        stop: end at the target; else go to the horizon.
    """
    steps = round(epochs * args.train_tokens / (rows * LENGTH))
    overrides = [
        f"batch.tokens={rows * LENGTH}",
        f"optimizer.lr={lr}",
        f"seed={seed}",
        f"goal.steps={steps}",
        f"eval.every_steps={max(1, steps // args.evaluations)}",
    ]
    if not stop:
        overrides += ["goal.bits_per_byte=0.01"]
    plan = plan_of(args, overrides)
    folder = train.run(plan).folder
    report = RunFolder(folder).read_report()
    apart = report["phase_s"]["compile"] + report["phase_s"]["eval"]
    rate = report["steady_tokens_per_s"]
    return {
        "lr": lr,
        "rows": rows,
        "epochs": epochs,
        "seed": seed,
        "steps": report["steps"],
        "bits_per_byte": report["val"][-1]["bits_per_byte"],
        "seconds": report["wall_s"] - apart,
        "tokens": report["tokens"],
        "tokens_per_s": rate,
        "reached": report["goal"]["reached"],
        "curve": [(v["tokens"], round(v["bits_per_byte"], 4)) for v in report["val"]],
        "techniques": sorted(report["techniques"]),
        "plan": plan.dump(),
    }


def tune(args: argparse.Namespace) -> None:
    """Run every point of the grid once, seed 0, to its horizon; write one row for each."""
    grid = product(args.lr or GRID["lr"], args.rows or GRID["rows"], args.epochs or GRID["epochs"])
    for lr, rows, epochs in grid:
        reading = measure(args, lr, rows, epochs, 0, stop=False)
        write(args, "tune", [reading])


def final(args: argparse.Namespace) -> None:
    """Run one configuration over all seeds, stopped at the target; write one row."""
    lr, rows, epochs = args.lr[0], args.rows[0], args.epochs[0]
    readings = [measure(args, lr, rows, epochs, seed, stop=True) for seed in range(args.seeds)]
    write(args, "final", readings)


def write(args: argparse.Namespace, kind: str, readings: list[dict[str, Any]]) -> None:
    """Write one receipt of runs that differ in their seed alone."""
    first = readings[0]
    metrics = {
        "seconds": receipts.spread([f["seconds"] for f in readings], "s"),
        "bits_per_byte": receipts.spread([f["bits_per_byte"] for f in readings], "bits/byte"),
        "tokens": receipts.spread([f["tokens"] for f in readings], "tokens"),
        "tokens_per_s": receipts.spread([f["tokens_per_s"] for f in readings], "tokens/s"),
    }
    plan = {k: v for k, v in first["plan"].items() if k not in ("directory", "name", "seed")}
    receipts.append(
        "time_to_quality",
        metrics,
        results=args.results,
        kind=kind,
        recipe=args.name,
        shape="d512 L8 h8 V16384 T1024",
        target_bits_per_byte=1.54,
        lr=first["lr"],
        rows=first["rows"],
        epochs=first["epochs"],
        reached=[f["reached"] for f in readings] if kind == "final" else None,
        seeds=[f["seed"] for f in readings],
        n=len(readings),
        techniques=first["techniques"],
        plan_sha256=receipts.sha256(plan),
        curve=first["curve"],
    )
    keys = ("lr", "rows", "epochs", "seed", "bits_per_byte", "seconds", "reached")
    for row in readings:
        print(json.dumps({"recipe": args.name, **{k: row[k] for k in keys}}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["tune", "final"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--name", default="adamw", help="what this recipe is called")
    parser.add_argument("--lr", type=float, nargs="*")
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--epochs", type=float, nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=20, help="over the horizon")
    parser.add_argument("--with", dest="with_", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--work", type=Path, help="keep runs and shards here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        args.work = args.work or Path(scratch)
        plan = plan_of(args, ["goal.steps=1000000"])
        args.train_tokens = sum(shards.tokens for shards in prepare(plan).train)
        (tune if args.what == "tune" else final)(args)


if __name__ == "__main__":
    main()
