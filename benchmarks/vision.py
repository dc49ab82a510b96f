"""Say what a small network keeps of its teacher's accuracy on the way to a device.

    python benchmarks/vision.py --work FOLDER [--seeds 3]

Everything is drawn by the package and trained here on a CPU, once a seed: EfficientNet-B0 as the
teacher, and MobileNetV3 small as its student. Then `--by` of the student's hidden channels go, and
what is left learns from the teacher again while it rounds its weights to 8 bits. It is written for
ExecuTorch, where what convolutions read and give has 8 bits too, and for ONNX Runtime.

A row of results/compress.jsonl has the accuracy on all held-out images at each hop: of the last two
it is that of the file itself, run by its own runtime. The `.pte` is to keep 98% of the teacher's.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import receipts
from compress import headrace, headrace_rows

LEAST_KEPT = 0.98
"""Share of the teacher's accuracy that the file is to keep."""
TEACHER = ("vision.architecture=efficientnet_b0", "vision.stem_stride=2")
STUDENT = ("vision.architecture=mobilenet_v3_small", "vision.stem_stride=1")
QAT = "techniques.quantization_aware_training.to=int8"
FILES = (("executorch", "int8"), ("executorch", "fp32"), ("onnx", "int8"), ("onnx", "fp32"))


def trained(args: argparse.Namespace, name: str, seed: int, steps: int, *words: str) -> float:
    """Train a network unless that run is there, and return its accuracy on the held-out images."""
    if not (args.work / "runs" / name).exists():
        headrace(
            args.work,
            *("train", "vision-demo", "device=cpu", f"name={name}", f"seed={seed}"),
            *(f"goal.steps={steps}", f"eval.every_steps={steps}", f"batch.tokens={args.batch}"),
            *("checkpoint.keep_best=false", f"checkpoint.every_steps={steps}", *words),
        )
    report = json.loads((args.work / "runs" / name / "report.json").read_text())
    return report["val"][-1]["accuracy"]


def taught_by(folder: str) -> tuple[str, ...]:
    """Return the words with which a run learns from what the network of a folder says."""
    return "--with", "distillation", f"techniques.distillation.teacher={folder}"


def weights_of(args: argparse.Namespace, name: str) -> str:
    """Return the folder of a run's weights, which is written where it is not there."""
    if not (args.work / f"weights-{name}").exists():
        words = ("--to", "torchvision", "--output", f"weights-{name}")
        headrace(args.work, "export", name, *words)
    return f"weights-{name}"


def measured(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return what one seed's chain came to: accuracies by hop, and what its files are."""
    measures: dict[str, Any] = {}
    measures["teacher"] = trained(args, f"teacher-{seed}", seed, args.steps, *TEACHER)
    teacher = weights_of(args, f"teacher-{seed}")
    taught = (*STUDENT, *taught_by(teacher))
    measures["student"] = trained(args, f"student-{seed}", seed, args.steps, *taught)
    cut = args.work / f"cut-{seed}"
    if not cut.exists():
        words = ("prune", f"student-{seed}", "--by", args.by, "--output", cut.name)
        headrace(args.work, *words)
    made = json.loads((cut / "pruning.json").read_text())
    measures |= {"pruned": made["left_accuracy"], "weights": made["left"] / made["parameters"]}
    channels = f"vision.channels={made['channels']}".replace(" ", "")
    on = (f"vision.pretrained={cut.name}", channels, f"optimizer.lr={args.rate}", QAT)
    small = f"small-{seed}"
    measures["rounded"] = trained(args, small, seed, args.more, *taught, *on)
    for to, preset in FILES:
        out = args.work / f"{to}-{preset}-{seed}"
        if not out.exists():
            words = ("--to", to, "--quantize", preset, "--output", out.name)
            headrace(args.work, "export", small, *words)
        file = f"{out.name}/{'model.pte' if to == 'executorch' else 'model.onnx'}"
        ran = headrace(args.work, "run", file)
        record = json.loads((out / "headrace.json").read_text())
        (verdict,) = headrace_rows(args.work, "doctor", file)
        measures[f"{to} {preset}"] = ran["accuracy"]
        facts = {"bytes": ran["bytes"], "drift": record["drift"], "image_s": ran["image_s"]}
        measures.setdefault("files", {})[f"{to} {preset}"] = facts | {
            "binds": verdict["bottleneck"]
        }
    print(f"seed {seed}: {measures}", flush=True)
    return measures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where runs go")
    parser.add_argument("--steps", type=int, default=240, help="of the teacher and the student")
    parser.add_argument("--more", type=int, default=160, help="of the pruned and rounded student")
    parser.add_argument("--batch", type=int, default=64, help="images of a step")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="rate of the last training")
    parser.add_argument("--by", default="30%", help="share of the hidden channels that is pruned")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    facts = {"more": args.more, "rate": args.rate, "batch": args.batch, "by": args.by}
    receipts.claim(args.work, steps=args.steps, **facts)
    rows = [measured(args, seed) for seed in range(args.seeds)]
    hops = ["teacher", "student", "pruned", "rounded", *(" ".join(one) for one in FILES)]
    kept = [row["executorch int8"] / row["teacher"] for row in rows]
    receipts.append(
        "compress",
        {"kept": receipts.spread(kept, "of the teacher's accuracy")}
        | {hop: receipts.spread([row[hop] for row in rows], "accuracy") for hop in hops}
        | {"weights": receipts.spread([row["weights"] for row in rows], "of the student's")},
        results=args.results,
        kind="vision",
        shape="efficientnet_b0 to mobilenet_v3_small, digits of 32 x 32 pixels",
        by=args.by,
        n=len(rows),
        seeds=[*range(args.seeds)],
        steps=[args.steps, args.more],
        batch=args.batch,
        rate=args.rate,
        files=[row["files"] for row in rows],
        met=min(kept) >= LEAST_KEPT,
    )
    print(f"kept {kept} of the teacher's accuracy, met: {min(kept) >= LEAST_KEPT}")


if __name__ == "__main__":
    main()
