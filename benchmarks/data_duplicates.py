"""Measure what deduplication buys where three tenths of the documents are copies.

    python benchmarks/data_duplicates.py --data NOVELS --seeds 3

NOVELS holds `train` and `val` of the 100 English novels (computationalstylistics/
100_english_novels, public-domain texts). The training text is cut into passages of whole lines, one
a document, and copies of `--originals` of them are planted until they are `--planted` of all, as
templates and quotations are in a crawl. Of each seed the plan is trained as it is and with
`deduplication`, in turn, until it reaches `--target` bits per byte on the other novels, for
`--steps` steps, or for its part of `--minutes`, of which preparing has a tenth. The clock is the
run's wall clock without compiling and evaluating; what a first preparation takes, with and without
deduplication, is a metric of its own. The row of results/data.jsonl has both sides, and the ratio
of their seconds by seed: below 1 deduplication is faster. A side that misses the target in a seed
is told in `reached`, and no ratio is made of it.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import receipts
from data_curriculum import passages

from headrace.cli.catalogue import catalogue
from headrace.data.ingest import prepare
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.train.run_folder import RunFolder

MODEL = ("model.dim=128", "model.layers=2", "model.heads=4", "model.ffn=344", "data.vocab=2048")
SIDES = ("plain", "deduplication")


def plant(text: Path, into: Path, originals: float, planted: float) -> tuple[int, int]:
    """Write rows with copies of some of them among the others; return how many, and of how many."""
    chance = random.Random(0)
    rows = text.read_text().splitlines(keepends=True)
    copied = chance.sample(rows, max(1, round(originals * len(rows))))
    copies = chance.choices(copied, k=round(len(rows) * planted / (1 - planted)))
    every = rows + copies
    chance.shuffle(every)
    into.write_text("".join(every))
    return len(every), len(copies)


def plan_of(args: argparse.Namespace, side: str, seed: int, scratch: Path) -> Plan:
    """Return the plan of a side's run."""
    words = [
        "device=cpu",
        f"data.sources={json.dumps(str(scratch / 'planted.jsonl'))}",
        f"data.validation={json.dumps(str(args.data / 'val'))}",
        f"data.directory={json.dumps(str(scratch / 'data'))}",
        f"directory={json.dumps(str(scratch / 'runs'))}",
        "data.sequence_length=128",
        "batch.tokens=2048",
        f"goal.bits_per_byte={args.target}",
        f"goal.steps={args.steps}",
        f"goal.minutes={0.9 * args.minutes / (len(SIDES) * args.seeds)}",
        f"schedule.steps={args.steps}",
        f"schedule.warmup_steps={args.steps // 20}",
        f"eval.every_steps={max(1, args.steps // 40)}",
        "eval.tokens=32768",
        "checkpoint.every_steps=1000000",
        f"name={side}-{seed}",
        f"seed={seed}",
        *MODEL,
        *args.set,
    ]
    with_ = [] if side == "plain" else ["deduplication"]
    return Plan.read("", catalogue(), overrides=words, with_=with_)


def measure(plan: Plan) -> dict[str, Any]:
    """Train a plan until it reaches the target or its last step."""
    report = RunFolder(train.run(plan).folder).read_report()
    apart = report["phase_s"]["compile"] + report["phase_s"]["eval"]
    return {
        "seconds": report["wall_s"] - apart,
        "steps": report["steps"],
        "bits_per_byte": report["val"][-1]["bits_per_byte"],
        "reached": report["val"][-1]["bits_per_byte"] <= plan.goal.bits_per_byte,
        "tokens": report["tokens"],
        "curve": [(v["tokens"], round(v["bits_per_byte"], 4)) for v in report["val"]],
        "techniques": sorted(report["techniques"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train and val")
    parser.add_argument("--megabytes", type=float, default=4.0, help="text before copies")
    parser.add_argument("--planted", type=float, default=0.3, help="share of copies in the end")
    parser.add_argument("--originals", type=float, default=0.01, help="share that is copied")
    parser.add_argument("--target", type=float, default=2.5, help="bits per byte")
    parser.add_argument("--steps", type=int, default=600, help="most steps of a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=15.0, help="most time of everything")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the plan")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    readings: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        passages(args.data / "train", scratch / "text.jsonl", int(args.megabytes * 1e6))
        documents, copies = plant(
            scratch / "text.jsonl", scratch / "planted.jsonl", args.originals, args.planted
        )
        print(f"{documents:,} passages, {copies:,} of them planted copies", flush=True)
        metrics: dict[str, Any] = {}
        for side in SIDES:
            begin = time.perf_counter()
            prepare(plan_of(args, side, 0, scratch))
            took = time.perf_counter() - begin
            metrics[f"prepare_{side}"] = receipts.spread([took], "s")
        for seed in range(args.seeds):
            for side in SIDES:
                reading = measure(plan_of(args, side, seed, scratch))
                readings[side].append(reading)
                print(seed, side, json.dumps({**reading, "curve": None}), flush=True)
    for side, runs in readings.items():
        metrics[f"seconds_{side}"] = receipts.spread([run["seconds"] for run in runs], "s")
        metrics[f"steps_{side}"] = receipts.spread([run["steps"] for run in runs], "steps")
        bits = [run["bits_per_byte"] for run in runs]
        metrics[f"bits_per_byte_{side}"] = receipts.spread(bits, "bits/byte")
    pairs = list(zip(readings["deduplication"], readings["plain"], strict=True))
    reached = [(ours, plain) for ours, plain in pairs if ours["reached"] and plain["reached"]]
    if reached:
        ratios = [ours["seconds"] / plain["seconds"] for ours, plain in reached]
        metrics["seconds_ratio"] = receipts.spread(ratios, "x")
    receipts.append(
        "data",
        metrics,
        results=args.results,
        kind="duplicates",
        shape="d128 L2",
        target_bits_per_byte=args.target,
        documents=documents,
        copies=copies,
        originals=args.originals,
        reached={side: [run["reached"] for run in runs] for side, runs in readings.items()},
        curves={side: [run["curve"] for run in runs] for side, runs in readings.items()},
        n=args.seeds,
        seeds=[*range(args.seeds)],
        techniques={side: runs[0]["techniques"] for side, runs in readings.items()},
    )
    print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main()
