"""Measure after how many passes over a short text models of some sizes begin to learn it by heart.

    python benchmarks/repeated_text.py --data DIR --work DIR
    python benchmarks/repeated_text.py --data DIR --work DIR --cells 64x2:8,16 128x4:2,4,8

DIR holds `train` and `val` of the 100 English novels, as in time_to_quality.py; the first bytes of
each file are the text. A cell of `--cells` is WIDTHxLAYERS and its passes: for each number of them
one run of the recipe `124m`, with a schedule of its own, on a CPU. It has no table of token pairs,
but with `--pairs`. Cells are trained by `headrace train` under `--work`, and a cell that ended
there before is read again. A row (topic `learning`, kind "repeated_text") has the loss at the end,
the best on the way, and the pass of the best.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import receipts

BATCH, LENGTH, VOCAB = 4096, 256, 4096
EVALUATIONS, EVALUATED = 10, 65_536
STEPS_A_PASS = 62
"""Steps of BATCH tokens that are one pass over the text, nearly."""
CELLS = ("64x2:2,4,8,16", "128x4:2,4,8", "192x6:2,4,8", "256x8:2,3")


def text_of(args: argparse.Namespace) -> Path:
    """Return the folder of the brief text, `train` and `val`, which its own hash names."""
    parts = (("train", args.bytes), ("val", args.held_out_bytes))
    brief = {
        f"{part}/{file.name}": file.read_bytes()[:count].decode(errors="ignore")
        for part, count in parts
        for file in sorted((args.data / part).iterdir())
    }
    folder = args.work / f"text-{receipts.sha256(brief)[:12]}"
    for name, text in brief.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def trained(args: argparse.Namespace, width: int, layers: int, passes: int) -> dict[str, Any]:
    """Return the report of one run, which is trained where there is none."""
    steps, text = passes * STEPS_A_PASS, text_of(args)
    keys = {
        "data.sources": text / "train",
        "data.validation": text / "val",
        "data.directory": args.work / "shards",
        "data.vocab": VOCAB,
        "data.sequence_length": LENGTH,
        "model.dim": width,
        "model.layers": layers,
        "model.heads": max(1, width // 64),
        "batch.tokens": BATCH,
        "batch.micro_sequences": BATCH // LENGTH,
        "goal.minutes": 100_000,
        "goal.steps": steps,
        "schedule.steps": steps,
        "techniques.warmup.steps": steps // 50 + 1,
        "techniques.muon.momentum_warmup_steps": min(steps, 100),
        "eval.every_steps": max(25, steps // EVALUATIONS),
        "eval.tokens": EVALUATED,
        "checkpoint.every_steps": 0,
    }
    out = ["torch_compile", *(() if args.pairs else ("bigram_embeddings", "embedding_smear"))]
    words = [f"{key}={value}" for key, value in keys.items()] + args.set
    words += [word for name in out for word in ("--without", name)]
    folder = args.work / f"run-{receipts.sha256(words)[:12]}"
    report = folder / "124m" / "report.json"
    if not report.exists() or json.loads(report.read_text())["steps"] < steps:
        command = [sys.executable, "-m", "headrace", "train", "124m", *words]
        subprocess.run([*command, f"directory={folder}", "--with", "kept_memory"], check=True)
    return json.loads(report.read_text())


def measure(args: argparse.Namespace, width: int, layers: int, passes: int) -> None:
    """Train a cell, and write and print its row."""
    report = trained(args, width, layers, passes)
    (source,) = report["data"]["mixture"]["sources"]
    fresh = source["source_tokens"]
    curve = [(v["tokens"], v["bits_per_byte"]) for v in report["val"]]
    best = min(curve, key=lambda point: point[1])
    values = {
        "best_bits_per_byte": (best[1], "bits/byte"),
        "last_bits_per_byte": (curve[-1][1], "bits/byte"),
        "epochs": (report["tokens"] / fresh, "passes over the text"),
        "best_epoch": (best[0] / fresh, "passes over the text"),
        "parameters_per_token": (report["parameters"] / fresh, "parameters a fresh token"),
    }
    metrics = {name: receipts.spread([value], unit) for name, (value, unit) in values.items()}
    receipts.append(
        "learning",
        metrics,
        results=args.results,
        kind="repeated_text",
        shape=f"d{width} L{layers} V{VOCAB} T{LENGTH}",
        parameters=report["parameters"],
        fresh_tokens=fresh,
        n=1,
        seeds=[report["seed"]],
        techniques=sorted(report["techniques"]),
        overrides=args.set,
        curve=curve,
    )
    print(f"d{width} L{layers}", {k: round(v["value"], 4) for k, v in metrics.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train and val")
    parser.add_argument("--work", type=Path, required=True, help="keeps the text and the runs")
    parser.add_argument("--cells", nargs="+", default=[*CELLS], metavar="WIDTHxLAYERS:PASSES,...")
    parser.add_argument("--pairs", action="store_true", help="keep the table of token pairs")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of every cell")
    parser.add_argument("--bytes", type=int, default=12_400, help="of each file of train")
    parser.add_argument("--held-out-bytes", type=int, default=60_000, help="of each file of val")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    for cell in args.cells:
        shape, each = cell.split(":")
        width, layers = map(int, shape.split("x"))
        for passes in map(int, each.split(",")):
            measure(args, width, layers, passes)


if __name__ == "__main__":
    main()
