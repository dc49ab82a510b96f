"""Measure whether a curriculum helps: the validation loss with and without it, at equal tokens.

    python benchmarks/data_curriculum.py --data NOVELS --seeds 5 --steps 400

A small decoder is trained from the same seeds on the same tokens' worth of text with each side:
rows in the plain order, and rows by a score and a pacing. Text of `--data` (a folder of .txt files)
is cut into passages of whole lines, one a document, since a novel is one document whose rows
would all have one score; without it the text is the demo's, the Python standard library. The side
`loss` is scored by the first seed's plain run. Of each side the row of results/data.jsonl has its
losses, and the paired difference to the plain order over seeds with its 95% interval by Student's
t: below 0 the curriculum is better. An interval that holds 0 shows neither.
"""

import argparse
import json
import tempfile
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import receipts

from headrace.cli.catalogue import catalogue
from headrace.core.statistics import t_two_sided
from headrace.plan.plan import Plan
from headrace.train import train

PASSAGE_CHARACTERS = (500, 1000, 2000, 4000)
"""Least characters of a passage, by turns: documents of unequal length, as on the web."""
MODEL = ("model.dim=128", "model.layers=2", "model.heads=4", "model.ffn=344", "data.vocab=2048")
SIDES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "compression": (),
    "compression, hard first": ("first=hard",),
    "compression, sorted": ("pacing=sorted", "until=1.0"),
    "length": ("score=length",),
    "loss": (),
}
"""Maps each side to its knobs of the curriculum."""


def passages(folder: Path, file: Path, most_bytes: int) -> int:
    """Write the texts of a folder as passages of whole lines, one a row; return their number."""
    count = written = 0
    with file.open("w") as out:
        for path in sorted(folder.glob("**/*.txt")):
            piece = ""
            for line in path.read_text().splitlines(keepends=True):
                piece += line
                if len(piece) >= PASSAGE_CHARACTERS[count % len(PASSAGE_CHARACTERS)]:
                    out.write(json.dumps({"text": piece}) + "\n")
                    written += len(piece.encode())
                    count, piece = count + 1, ""
                if written >= most_bytes:
                    return count
    return count


def difference(ours: list[float], plain: list[float]) -> dict[str, Any]:
    """Return the mean paired difference over seeds as a metric, with its 95% interval."""
    pairs = [a - b for a, b in zip(ours, plain, strict=True)]
    half = t_two_sided(0.95, len(pairs) - 1) * stdev(pairs) / sqrt(len(pairs))
    mean = fmean(pairs)
    return {"value": mean, "low": mean - half, "high": mean + half, "unit": "nats/token"}


def common(args: argparse.Namespace, scratch: Path) -> list[str]:
    """Return the keys of the plan that all sides share; text is cut where `--data` names some."""
    text = []
    if args.data:
        count = passages(args.data, file := scratch / "text.jsonl", int(args.megabytes * 1e6))
        print(f"{count:,} passages of {args.data}", flush=True)
        text = [f"data.sources={json.dumps(str(file))}"]
    return [
        "device=cpu",
        "guard=false",
        f"goal.steps={args.steps}",
        "batch.tokens=2048",
        "data.sequence_length=128",
        f"schedule.warmup_steps={args.steps // 20}",
        f"eval.every_steps={args.steps}",
        "checkpoint.every_steps=1000000",
        f"directory={json.dumps(str(scratch / 'runs'))}",
        f"data.directory={json.dumps(str(scratch / 'data'))}",
        *MODEL,
        *text,
        *args.set,
    ]


def plan_of(side: str, seed: int, keys: list[str], scratch: Path) -> Plan:
    """Return the plan of a side's run."""
    knobs = list(SIDES[side])
    if side == "loss":
        knobs.append(f"score=loss:{scratch}/runs/plain-0")
    name = f"{side.replace(', ', '-').replace(' ', '-')}-{seed}"
    words = [*keys, f"name={name}", f"seed={seed}"]
    words += [f"techniques.curriculum.{knob}" for knob in knobs]
    on = [] if side == "plain" else ["curriculum"]
    return Plan.read("", catalogue(), overrides=words, with_=on)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of .txt files; the demo's text without")
    parser.add_argument("--megabytes", type=float, default=16.0, help="most text of --data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sides", nargs="*", default=[*SIDES], choices=[*SIDES])
    parser.add_argument("--set", nargs="*", default=[], help="keys of the plan")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    if args.seeds < 3:
        parser.error("--seeds must be 3 at least: of fewer an interval says nothing")
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        keys = common(args, scratch := Path(folder))
        for side in ["plain", *(one for one in args.sides if one != "plain")]:
            plans = [plan_of(side, seed, keys, scratch) for seed in range(args.seeds)]
            reports = []
            for plan in plans:
                run = train.run(plan, catalogue=catalogue()).folder
                reports.append(json.loads((run / "report.json").read_text()))
            losses[side] = [report["val"][-1]["loss_nats"] for report in reports]
            metrics = {"loss": receipts.spread(losses[side], "nats/token")}
            if side != "plain":
                metrics["difference"] = difference(losses[side], losses["plain"])
            receipts.append(
                "data",
                metrics,
                results=args.results,
                kind="curriculum",
                side=side,
                shape="d128 L2",
                text=args.data.name if args.data else "stdlib",
                steps=args.steps,
                tokens=reports[0]["tokens"],
                n=args.seeds,
                seeds=[*range(args.seeds)],
                losses=losses[side],
                curriculum=reports[0]["techniques"].get("curriculum", {}).get("numbers"),
                plan_sha256=receipts.sha256(plans[0].dump()),
                techniques=sorted(plans[0].techniques),
            )
            print(side, metrics, flush=True)


if __name__ == "__main__":
    main()
