"""Quantize a model that is trained here, and say what each way costs in loss and saves in size.

    python benchmarks/compress.py --work FOLDER [--data FOLDER] [--seeds 3]

The recipe demo is trained once a seed on a CPU, on the Python standard library or on `--data`, and
`headrace compress` tries every preset on its validation text. For each preset a row of
results/compress.jsonl is written, over the seeds: the rise of bits per byte in percent, the size of
the file as a share of fp32's, the largest difference of a logit to the plain reference, and how
fast it decodes as a share of fp32. INT8 weight-only is to rise by less than 0.2% at 0.30 times the
size.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import receipts

MOST_RISE_PERCENT, MOST_SIZE = 0.2, 0.30
"""What INT8 weight-only is to reach."""


def headrace(work: Path, *words: str) -> dict[str, Any]:
    """Run a verb with --json in the folder `work`, and return its document."""
    command = [sys.executable, "-m", "headrace", *words, "--json"]
    ended = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, text=True, check=False)
    document = json.loads(ended.stdout)
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)}: {document['error']}; try: {document['remedy']}")
    return document


def compressed(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train the model of a seed unless it is there, and return its report of compression."""
    name = f"base-{seed}"
    if not (args.work / "runs" / name).exists():
        text = [] if args.data is None else [f"data.sources={args.data.resolve()}"]
        headrace(
            args.work,
            *("train", "demo", "device=cpu", f"name={name}", f"seed={seed}", *text),
            *(f"goal.steps={args.steps}", f"schedule.steps={args.steps}", "goal.minutes=1000"),
        )
    report = args.work / "runs" / name / "compressed" / "report.json"
    if not report.is_file():
        headrace(args.work, "compress", name, "--tokens", str(args.tokens))
    return json.loads(report.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where runs go")
    parser.add_argument("--data", type=Path, help="a text; the standard library without it")
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--tokens", type=int, default=10**9, help="most of the validation text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    text = None if args.data is None else str(args.data.resolve())
    receipts.claim(args.work, text=text, steps=args.steps, tokens=args.tokens)
    reports = [compressed(args, seed) for seed in range(args.seeds)]
    for name in [point["name"] for point in reports[0]["points"]]:
        pairs = [
            (report["whole"], next(p for p in report["points"] if p["name"] == name))
            for report in reports
        ]
        readings = {
            "rise": ([100 * point["rise"] for _, point in pairs], "%"),
            "size": ([point["bytes"] / whole["bytes"] for whole, point in pairs], "of fp32"),
            "drift": ([point["logits_from_reference"] for _, point in pairs], "logits"),
            "decoding": (
                [point["tokens_per_s"] / whole["tokens_per_s"] for whole, point in pairs],
                "of fp32",
            ),
        }
        facts: dict[str, Any] = {}
        if name == "int8":
            rises, sizes = readings["rise"][0], readings["size"][0]
            facts["met"] = max(rises) < MOST_RISE_PERCENT and max(sizes) <= MOST_SIZE
        receipts.append(
            "compress",
            {key: receipts.spread(values, unit) for key, (values, unit) in readings.items()},
            results=args.results,
            kind="quantization",
            shape=f"demo, {reports[0]['whole']['bytes'] // 4:,} weights",
            preset=name,
            n=len(reports),
            seeds=[*range(args.seeds)],
            tokens=reports[0]["tokens"],
            bits_per_byte=[whole["bits_per_byte"] for whole, _ in pairs],
            **facts,
        )
        print(name, {key: values for key, (values, _) in readings.items()}, facts, flush=True)


if __name__ == "__main__":
    main()
