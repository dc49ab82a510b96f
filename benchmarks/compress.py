"""Quantize and prune models that are trained here, and say what each way costs and saves.

    python benchmarks/compress.py --work FOLDER [--data FOLDER] [--seeds 3]
    python benchmarks/compress.py qat --work FOLDER [--data FOLDER] [--seeds 3]
    python benchmarks/compress.py sparse --work FOLDER [--data FOLDER] [--seeds 3]
    python benchmarks/compress.py prune --work FOLDER [--data FOLDER] [--seeds 3]
    python benchmarks/compress.py forecast --work FOLDER [--data FOLDER]
    python benchmarks/compress.py files --work FOLDER [--data FOLDER]

A model is trained once a seed on a CPU, on the Python standard library or on `--data`: that of the
recipe demo for presets, else a smaller one for longer. Rows of results/compress.jsonl are over the
seeds.

Minutes on two quiet cores for three seeds, estimated from short runs: presets 15 and qat 20, both
with `--tokens 262144`; sparse 40, prune 20; forecast 10 and files 10, which have no seeds.

- Without a word, `headrace compress` tries every preset on its validation text, and a row a preset
  has the rise of bits per byte in percent, the size of the file as a share of fp32's, the largest
  difference of a logit to the plain reference, and how fast it decodes as a share of fp32. INT8
  weight-only is to rise by less than 0.2% at 0.30 times the size.
- `qat` trains the model on for `--more` steps twice, plainly and with rounding
  (`quantization_aware_training`), on the same tokens, and quantizes both in groups of `--group`.
  What rounding the plain one costs is the gap, of which the other is to recover half:
  1 - (rounded - plain) / (quantized - plain). The rate of both ends at zero, and the other rounds
  after the share `--start` of its steps.
- `sparse` prunes the model 2:4 (`weight_pruning`) by magnitude and by Wanda. Its bits per byte are
  told right after pruning, after `--more` steps of training on with the zeros held, and after as
  many on the words of the whole model too, beside those of a plain training on the same tokens.
- `prune` leaves out `--by` of the weights and trains what is left for `--more` steps on the words
  of the whole model. Its bits per byte are to be lower than those of a model of that very shape
  which is trained from nothing on as many tokens, with the recipe's own rate.
- `forecast` makes every preset of models of several widths and depths, which are hardly trained,
  and compares the decoding speed that was forecast before each point was made with what was
  measured. The median of the errors is to be within 20% over at least 20 points.
- `files` exports a model to every format and lets `headrace doctor` decode with each file. The
  fastest is to decode three times as fast as fp32 in eager torch with a cache.
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
LEAST_RECOVERED = 0.5
"""Share of the gap that training with rounding is to recover, in the median of the seeds."""
PRESET, QAT, SPARSE = "8da4w", "quantization_aware_training", "weight_pruning"
SMALL = (
    *("model.dim=64", "model.layers=2", "model.heads=4", "model.ffn=192"),
    *("data.vocab=512", "data.sequence_length=64"),
)
"""A model that two cores train in a minute until it has little more to learn: what rounding and
pruning cost is then more than some steps of training are worth."""
FILES = (
    ("onnx", "fp32"),
    ("onnx", "int8"),
    ("onnx", "int4"),
    ("executorch", "fp32"),
    ("executorch", "8da4w"),
    ("gguf", "q8_0"),
    ("gguf", "q4_0"),
)
"""Formats of exported files, and how each stores matrices."""
LEAST_SPEED = 3.0
"""How many times as fast as fp32 in eager torch with a cache the fastest file is to decode."""
MOST_ERROR, LEAST_POINTS = 0.2, 20
"""Median error of forecasts, as a share of what was measured, and over how many points."""
WIDTHS = ((64, 2), (128, 4), (256, 4), (512, 6))
"""Features and layers of the models whose points are forecast."""
STEPS = {"forecast": 2, "files": 2, "presets": 300, "qat": 1500, "sparse": 1500, "prune": 1500}
"""Steps of the first training."""
WARMUP = 20
"""Steps over which the rate of the recipe rises; a shorter training has fewer."""
TO_ZERO = "schedule.final_fraction=0"
"""The word with which a rate falls to zero. At a tenth of the rate, where the recipe ends, weights
still jump between codes in the last steps."""
SPOKEN = 4096
"""Tokens of validation text where speed is measured and no loss."""
SHAPE = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
}
"""Keys of a plan's model, and what config.json calls them."""


def headrace(work: Path, *words: str) -> dict[str, Any]:
    """Run a verb with --json in the folder `work`, and return its document."""
    command = [sys.executable, "-m", "headrace", *words, "--json"]
    ended = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, text=True, check=False)
    document = json.loads(ended.stdout)
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)}: {document['error']}; try: {document['remedy']}")
    return document


def headrace_rows(work: Path, *words: str) -> list[dict[str, Any]]:
    """Run a verb with --json that prints an array, and return it."""
    command = [sys.executable, "-m", "headrace", *words, "--json"]
    ended = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout)


def trained(args: argparse.Namespace, name: str, seed: int, steps: int, *words: str) -> str:
    """Train the recipe for some steps unless that run is there, and return its name."""
    if not (args.work / "runs" / name).exists():
        if not any(word.startswith("schedule.warmup_steps=") for word in words):
            words = (f"schedule.warmup_steps={min(WARMUP, steps)}", *words)
        text = [] if args.data is None else [f"data.sources={args.data.resolve()}"]
        headrace(
            args.work,
            *("train", "demo", "device=cpu", f"name={name}", f"seed={seed}", *text),
            *(f"goal.steps={steps}", f"schedule.steps={steps}", "goal.minutes=1000"),
            *("goal.bits_per_byte=0.01", "checkpoint.keep_best=false", f"eval.every_steps={steps}"),
            *words,
        )
    return name


def based(args: argparse.Namespace, seed: int) -> tuple[str, str]:
    """Return the model of a seed: its run, and the folder of its weights."""
    name = trained(args, f"small-{seed}", seed, args.steps, *SMALL)
    folder = f"weights-{seed}"
    if not (args.work / folder).exists():
        headrace(args.work, "export", name, "--to", "hf", "--output", folder)
    return name, folder


def on_from(args: argparse.Namespace, folder: str) -> list[str]:
    """Return the words with which a run trains on the weights of a folder, by AdamW.

    Muon reaches less from weights that are trained already, with rounding and without.
    """
    start = (f"model.pretrained={folder}", f"data.tokenizer={folder}", SMALL[-1])
    rates = (f"optimizer.lr={args.rate}", "optimizer.lr_factors.embeddings=1")
    return [*start, *rates, "schedule.warmup_steps=10", "--without", "muon"]


def taught_by(folder: str) -> tuple[str, ...]:
    """Return the words with which a run learns from what the model of a folder says."""
    return "--with", "distillation", f"techniques.distillation.teacher={folder}"


def report_of(
    args: argparse.Namespace, name: str, *words: str, tokens: int | None = None
) -> dict[str, Any]:
    """Return the report of compressing a run, of at most so many validation tokens."""
    report = args.work / "runs" / name / "compressed" / "report.json"
    most = min(args.tokens, tokens or args.tokens)
    if not report.is_file():
        headrace(args.work, "compress", name, "--tokens", str(most), *words)
    return json.loads(report.read_text())


def presets(args: argparse.Namespace) -> None:
    """Measure every preset on the model of each seed."""
    names = [trained(args, f"base-{seed}", seed, args.steps) for seed in range(args.seeds)]
    reports = [report_of(args, name) for name in names]
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


def qat(args: argparse.Namespace) -> None:
    """Measure what share of the gap of rounding each seed's training recovers."""
    recovered, gaps, costs = [], [], []
    for seed in range(args.seeds):
        _, folder = based(args, seed)
        on = [TO_ZERO, *on_from(args, folder)]
        knobs = (f"techniques.{QAT}.group={args.group}", f"techniques.{QAT}.start={args.start}")
        plain = trained(args, f"plain-{seed}", seed, args.more, *on)
        words = [*on, "--with", QAT, *knobs, *(taught_by(folder) if args.taught else ())]
        rounded = trained(args, f"rounded-{seed}", seed, args.more, *words)
        to = ("--to", PRESET, "--group", str(args.group))
        whole, stored = (report_of(args, name, *to) for name in (plain, rounded))
        least = whole["whole"]["bits_per_byte"]
        gaps.append(whole["points"][0]["bits_per_byte"] - least)
        costs.append(stored["points"][0]["bits_per_byte"] - least)
        recovered.append(1 - costs[-1] / gaps[-1])
        print(f"seed {seed}: gap {gaps[-1]:.5f}, left {costs[-1]:.5f}", flush=True)
    share = receipts.spread(recovered, "of the gap")
    met = share["value"] >= LEAST_RECOVERED
    receipts.append(
        "compress",
        {
            "recovered": share,
            "gap": receipts.spread(gaps, "bits per byte"),
            "left": receipts.spread(costs, "bits per byte"),
        },
        results=args.results,
        kind=QAT,
        shape=" ".join(SMALL),
        preset=PRESET,
        group=args.group,
        n=args.seeds,
        seeds=[*range(args.seeds)],
        steps=[args.steps, args.more],
        rate=args.rate,
        start=args.start,
        taught=args.taught,
        met=met,
    )
    print(f"{PRESET} recovers {recovered} of the gap, met: {met}", flush=True)


def sparse(args: argparse.Namespace) -> None:
    """Measure 2:4 by each metric: right after it, after training on, and on the whole one's words.

    A step at a rate of nothing shows what pruning alone does.
    """
    readings: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        name, folder = based(args, seed)
        on = [TO_ZERO, *on_from(args, folder)]
        runs = {"whole": name, "plain": trained(args, f"plain-{seed}", seed, args.more, *on)}
        for metric in ("magnitude", "wanda"):
            words = [*on, "--with", SPARSE, f"techniques.{SPARSE}.metric={metric}"]
            still = ("optimizer.lr=1e-30", f"schedule.steps={args.more}")
            for side, steps, more in (
                ("pruned", 1, still),
                ("recovered", args.more, ()),
                ("taught", args.more, taught_by(folder)),
            ):
                run = f"{metric}-{side}-{seed}"
                runs[f"{metric}_{side}"] = trained(args, run, seed, steps, *words, *more)
        for key, run in runs.items():
            loss = headrace(args.work, "eval", run, "--tokens", str(args.tokens))
            readings.setdefault(key, []).append(loss["bits_per_byte"])
        print(
            f"seed {seed}: { ({key: values[-1] for key, values in readings.items()}) }", flush=True
        )
    receipts.append(
        "compress",
        {key: receipts.spread(values, "bits per byte") for key, values in readings.items()},
        results=args.results,
        kind=SPARSE,
        shape=" ".join(SMALL),
        pattern="2:4",
        n=args.seeds,
        seeds=[*range(args.seeds)],
        steps=[args.steps, args.more],
        rate=args.rate,
    )


def prune(args: argparse.Namespace) -> None:
    """Measure a pruned model that learned from the whole one, and one of its shape from scratch."""
    readings: dict[str, list[float]] = {"whole": [], "cut": [], "distilled": [], "scratch": []}
    shape = ""
    for seed in range(args.seeds):
        name, folder = based(args, seed)
        cut = args.work / f"cut-{seed}"
        if not cut.exists():
            words = ("prune", name, "--by", args.by, "--tokens", str(args.tokens))
            headrace(args.work, *words, "--output", cut.name)
        made = json.loads((cut / "pruning.json").read_text())
        teacher = taught_by(folder)
        distilled = trained(
            args, f"distilled-{seed}", seed, args.more, *on_from(args, cut.name), *teacher
        )
        config = json.loads((cut / "config.json").read_text())
        sizes = [f"model.{ours}={config[theirs]}" for ours, theirs in SHAPE.items()]
        scratch = trained(
            args,
            f"scratch-{seed}",
            seed,
            args.more,
            *(f"data.tokenizer={folder}", SMALL[0], SMALL[-1]),
            *sizes,
        )
        readings["whole"].append(made["bits_per_byte"])
        readings["cut"].append(made["left_bits_per_byte"])
        for key, run in (("distilled", distilled), ("scratch", scratch)):
            loss = headrace(args.work, "eval", run, "--tokens", str(args.tokens))
            readings[key].append(loss["bits_per_byte"])
        shape = f"{made['left']:,} of {made['parameters']:,} weights"
        print(
            f"seed {seed}: { ({key: values[-1] for key, values in readings.items()}) }", flush=True
        )
    pairs = zip(readings["scratch"], readings["distilled"], strict=True)
    gains = [less - more for less, more in pairs]
    receipts.append(
        "compress",
        {key: receipts.spread(values, "bits per byte") for key, values in readings.items()}
        | {"gain": receipts.spread(gains, "bits per byte")},
        results=args.results,
        kind="pruning",
        shape=shape,
        by=args.by,
        n=args.seeds,
        seeds=[*range(args.seeds)],
        steps=[args.steps, args.more],
        rate=args.rate,
        met=min(gains) > 0,
    )
    print(f"better than from scratch by {gains} bits per byte, met: {min(gains) > 0}", flush=True)


def forecast(args: argparse.Namespace) -> None:
    """Compare the speeds that were forecast with those that were measured."""
    errors: list[float] = []
    by_point: dict[str, float] = {}
    for dim, layers in WIDTHS:
        words = (
            f"model.dim={dim}",
            f"model.layers={layers}",
            "model.heads=4",
            f"model.ffn={3 * dim}",
        )
        words = (*words, "schedule.warmup_steps=0", *SMALL[-2:])
        name = trained(args, f"wide-{dim}-{layers}", 0, args.steps, *words)
        for point in report_of(args, name, tokens=SPOKEN)["points"]:
            error = point["forecast_tokens_per_s"] / point["tokens_per_s"] - 1
            by_point[f"{dim}x{layers} {point['name']}"] = error
            errors.append(abs(error))
    row = receipts.spread(errors, "of what was measured")
    met = len(errors) >= LEAST_POINTS and row["value"] <= MOST_ERROR
    receipts.append(
        "compress",
        {"error": row},
        results=args.results,
        kind="forecast",
        shape=" ".join(f"{dim}x{layers}" for dim, layers in WIDTHS),
        points=by_point,
        n=len(errors),
        met=met,
    )
    print(f"median error {row['value']:.1%} of {len(errors)} points, met: {met}")


def files(args: argparse.Namespace) -> None:
    """Measure how fast every file decodes, and how far its logits are from the evaluated model."""
    words = ("schedule.warmup_steps=0", "data.tokenizer_pattern=gpt4")
    name = trained(args, "shipped", 0, args.steps, *words)
    whole = report_of(args, name, "--to", "int8", tokens=SPOKEN)["whole"]
    speeds: dict[str, float] = {}
    drifts: dict[str, float | None] = {}
    bound: dict[str, str] = {}
    for to, preset in FILES:
        out, kind = args.work / f"{to}-{preset}", f"{to} {preset}"
        file = f"{out.name}/model.gguf" if to == "gguf" else out.name
        made = {"file": file, "drift": None}
        if not out.exists():
            export = ("export", name, "--to", to, "--quantize", preset, "--output", file)
            made = headrace(args.work, *export)
        record = args.work / out.name / "headrace.json"
        known = json.loads(record.read_text()) if record.is_file() else {}
        end = {"onnx": "model.onnx", "executorch": "model.pte", "gguf": "model.gguf"}[to]
        (verdict,) = headrace_rows(args.work, "doctor", f"{out.name}/{end}")
        speeds[kind] = verdict["tokens_per_s"] / whole["tokens_per_s"]
        drifts[kind] = known.get("drift", made.get("drift"))
        bound[kind] = verdict["bottleneck"]
        print(kind, speeds[kind], drifts[kind], bound[kind], flush=True)
    best = max(speeds.values())
    receipts.append(
        "compress",
        {"decoding": receipts.spread([*speeds.values()], "of eager fp32 with a cache")},
        results=args.results,
        kind="file",
        shape=f"demo, {whole['bytes'] // 4:,} weights",
        files=speeds,
        drift=drifts,
        binds=bound,
        n=1,
        met=best >= LEAST_SPEED,
    )
    print(f"fastest {best:.2f} times eager fp32, met: {best >= LEAST_SPEED}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    programs = {
        "presets": presets,
        "qat": qat,
        "sparse": sparse,
        "prune": prune,
        "forecast": forecast,
        "files": files,
    }
    parser.add_argument("what", nargs="?", choices=programs, default="presets")
    parser.add_argument("--work", type=Path, required=True, help="where runs go")
    parser.add_argument("--data", type=Path, help="a text; the standard library without it")
    parser.add_argument("--steps", type=int, help="of the first training; 300, or 1500 for SMALL")
    parser.add_argument("--more", type=int, default=800, help="steps of a training after it")
    parser.add_argument("--rate", type=float, default=3e-3, help="largest rate of that one")
    parser.add_argument("--group", type=int, default=32, help="numbers under one scale")
    parser.add_argument("--start", type=float, default=0.3, help="share before qat rounds")
    parser.add_argument("--taught", action="store_true", help="qat learns from the first training")
    parser.add_argument("--by", default="30%", help="share of the weights that is pruned")
    parser.add_argument("--tokens", type=int, default=10**9, help="most of the validation text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    args.steps = args.steps or STEPS[args.what]
    text = None if args.data is None else str(args.data.resolve())
    facts = (
        {}
        if args.what in ("presets", "forecast", "files")
        else {"more": args.more, "rate": args.rate, "start": args.start, "taught": args.taught}
    )
    receipts.claim(args.work, text=text, steps=args.steps, tokens=args.tokens, **facts)
    programs[args.what](args)


if __name__ == "__main__":
    main()
