"""Run a recipe of `headrace compress` whole, and say what each of its hops cost.

    python benchmarks/compress_chain.py --recipe edge --work FOLDER [--data FOLDER] [--seeds 3]
    python benchmarks/compress_chain.py --recipe inference-speed --work FOLDER [--data FOLDER]

A model is trained once a seed on a CPU, on the Python standard library or on `--data`, and the
recipe goes from that run to a file: `edge` to a `.pte` in 4 bits by a student that is pruned and
trained with rounding, `inference-speed` to an `.onnx` in 8 bits by a student whose layer norms
become RMSNorm. `--shape 14m` is a model of 13.8 million weights, `tiny` is for tests.

A row of results/compress.jsonl (kind `chain`) has of every hop bits per byte, bytes, the largest
difference of a logit to the hop before, tokens/s and seconds; of the file as its own runtime
computes it. The file is to have the bits per byte of the codes that it was made of, within 0.1%.

A run or a chain that is there already is read again, so a command that was stopped goes on. Of a
chain that was stopped delete the folder of its recipe and the runs of its seed first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import compress
import receipts

MOST_MOVED = 1e-3
"""Share by which the bits per byte of a file may differ from those of the codes in it."""
SHAPES = {
    "14m": (
        *("model.dim=384", "model.layers=6", "model.heads=6", "model.ffn=1024"),
        *("data.vocab=4096", "data.sequence_length=256"),
    ),
    "tiny": (
        *("model.dim=64", "model.layers=2", "model.heads=4", "model.ffn=128"),
        *("data.vocab=320", "data.sequence_length=32", "batch.tokens=64"),
    ),
}
"""Models that a chain begins with, by the words of their training."""
FAMILY = {
    "edge": (),
    "inference-speed": ("model.family=gpt2", "model.tied_embeddings=false", "model.vocab=0"),
}
"""What a recipe's first model has, so that every hop has something to do."""
MEASURED = (
    *("bits_per_byte", "bytes", "logits_from_before", "tokens_per_s", "seconds"),
    "before_bits_per_byte",
)
"""What a row keeps of each hop."""
UNITS = {
    "kept": "of the run's bits per byte, of the codes in the file",
    "moved": "of the bits per byte of its codes, over entries that stand for tokens",
    "size": "of the run in fp32",
    "decoding": "of the run in eager torch",
    "drift": "largest difference of a logit to its codes",
    "minutes": "minutes of all hops",
}
"""Measures of a file -> unit."""


def followed(args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Return the hops of a seed's chain, which is run unless it is there."""
    shape = (*SHAPES[args.shape], *FAMILY[args.recipe])
    run = compress.trained(args, f"{args.recipe}-{seed}", seed, args.steps, *shape)
    out = args.work / f"{args.recipe}-{seed}"
    if not out.exists():
        warm = min(compress.WARMUP, args.more)
        steps = (f"goal.steps={args.more}", f"schedule.steps={args.more}")
        compress.headrace(
            args.work,
            *("compress", run, "--recipe", args.recipe, "--by", args.by, "--output", out.name),
            *(*steps, f"schedule.warmup_steps={warm}", f"eval.every_steps={args.more}"),
            *("--tokens", str(args.tokens)),
        )
    hops = json.loads((out / "hops.json").read_text())
    if hops[-1]["name"] != "export":
        raise SystemExit(
            f"{out} ends with the hop {hops[-1]['name']}; try: rm -r {out} "
            f"{args.work / 'runs' / run}-*"
        )
    return hops


def measures(hops: list[dict[str, Any]]) -> dict[str, float]:
    """Return what a chain came to, by the names of `UNITS`."""
    run, codes, file = hops[0], hops[-2], hops[-1]
    return {
        "kept": codes["bits_per_byte"] / run["bits_per_byte"],
        "moved": abs(file["bits_per_byte"] / file["before_bits_per_byte"] - 1),
        "size": file["bytes"] / run["bytes"],
        "decoding": file["tokens_per_s"] / run["tokens_per_s"],
        "drift": file["logits_from_before"],
        "minutes": sum(hop["seconds"] for hop in hops) / 60,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=FAMILY, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="14m", help="the first model")
    parser.add_argument("--work", type=Path, required=True, help="where runs go")
    parser.add_argument("--data", type=Path, help="a text; the standard library without it")
    parser.add_argument("--steps", type=int, default=300, help="of the first training")
    parser.add_argument("--more", type=int, default=300, help="of each training of the recipe")
    parser.add_argument("--by", default="20%", help="share of the student's weights that is pruned")
    parser.add_argument("--tokens", type=int, default=65_536, help="most of the validation text")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    text = None if args.data is None else str(args.data.resolve())
    facts = {"steps": args.steps, "more": args.more, "by": args.by, "tokens": args.tokens}
    receipts.claim(args.work, text=text, shape=args.shape, **facts)
    chains = [followed(args, seed) for seed in range(args.seeds)]
    reached = [measures(hops) for hops in chains]
    met = max(one["moved"] for one in reached) <= MOST_MOVED
    receipts.append(
        "compress",
        {
            name: receipts.spread([one[name] for one in reached], unit)
            for name, unit in UNITS.items()
        },
        results=args.results,
        kind="chain",
        recipe=args.recipe,
        shape=f"{args.shape}, {chains[0][0]['bytes'] // 4:,} weights",
        hops=[{hop["name"]: {k: hop.get(k) for k in MEASURED} for hop in hops} for hops in chains],
        peak_bytes=[hops[-1]["peak_bytes"] for hops in chains],
        n=len(chains),
        seeds=[*range(args.seeds)],
        steps=[args.steps, args.more],
        met=met,
    )
    print(f"{args.recipe}: {reached}, met: {met}")


if __name__ == "__main__":
    main()
