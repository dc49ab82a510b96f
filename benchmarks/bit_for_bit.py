"""Train five small plans, and compare what they computed with what an earlier commit computed.

    python benchmarks/bit_for_bit.py --write FILE    # on the earlier commit
    python benchmarks/bit_for_bit.py --check FILE    # on the later one, on the same machine

The plans are the demo, packed rows with a chunked loss, Muon, LoRA and two ranks of FSDP, all
small. Compared are the digests of the weights and the optimizer's state, the digest of the order
of tokens, loss, gradient norm and learning rate of each step, and every number of report.json
that no clock decides. Numbers of two machines differ in their last digits.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

SMALL = (
    "model.dim=64 model.layers=2 model.heads=2 data.vocab=448 data.sequence_length=64 "
    "batch.tokens=512 goal.steps=12 eval.every_steps=6 eval.tokens=512 checkpoint.every_steps=12 "
    "device=cpu"
)
"""Sizes that train in seconds on a CPU, as words of a command."""
PLANS = {
    "demo": "",
    "packing and chunked loss": "--with document_packing --with chunked_cross_entropy "
    "techniques.chunked_cross_entropy.chunk_tokens=200",
    "muon": "--with muon",
    "lora": "--with lora model.pretrained={base}",
    "fsdp on two ranks": "--with fsdp mesh.data=2",
}
"""Words that follow `headrace train demo` and the sizes."""
STEPS = ("loss", "grad_norm", "lr", "tokens", "wasted_tokens", "val_loss_nats")
"""Fields of metrics.jsonl that no clock decides."""
REPORT = """
status outcome steps tokens memory_lines wasted_token_fraction data stream_sha256 seed parameters
tokenizer skipped_steps sample
"""
"""Fields of report.json that no clock decides."""


def write_text(path: Path) -> None:
    """Write documents of random words, the same ones on every commit."""
    draw = random.Random(0)
    words = ["".join(draw.choices("aeilmnorst", k=draw.randint(2, 8))) for _ in range(300)]
    with path.open("w") as file:
        for _ in range(400):
            text = " ".join(draw.choices(words, k=draw.randint(5, 200)))
            print(json.dumps({"text": text}), file=file)


def train(name: str, words: str, folder: Path) -> dict[str, Any]:
    """Train a plan by the command line and return what of it is compared."""
    ranks = 2 if "fsdp" in words else 1
    own = ["data.sources=text.jsonl", f"name={name}", *words.split()]
    run("train", "demo", *SMALL.split(), *own, folder=folder, ranks=ranks)
    return outcome(folder / "runs" / name)


def run(*words: str, folder: Path, ranks: int = 1) -> None:
    """Run a verb of the command line; end with what it printed where it failed."""
    launcher = ["torch.distributed.run", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    argv = [sys.executable, "-m", *launcher, "headrace", *words]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}: {done.stdout}{done.stderr}")


def outcome(run: Path) -> dict[str, Any]:
    """Return what a run computed, without what a clock decides."""
    report = json.loads((run / "report.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validation = [{k: v for k, v in row.items() if k != "wall_s"} for row in report["val"]]
    return {
        "state": {
            f"{file.name} {name}": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            for file in sorted((run / "checkpoints" / "step-12").glob("*.safetensors"))
            for name, tensor in sorted(load_file(file).items())
        },
        "steps": [{key: row[key] for key in STEPS if key in row} for row in steps],
        "report": {key: report[key] for key in REPORT.split()},
        "val": validation,
        "predicted_bytes": report["peak_memory_bytes"]["predicted"],
    }


def main() -> int:
    """Write what the plans computed, or compare it and return 1 where something differs."""
    parser = argparse.ArgumentParser(description="Compare what five plans compute.")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path)
    group.add_argument("--check", type=Path)
    args = parser.parse_args()
    computed: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_text(folder / "text.jsonl")
        for plan, words in PLANS.items():
            base = folder / "base"
            if "{base}" in words and not base.exists():
                run("export", "runs/demo", "--to", "hf", "--output", "base", folder=folder)
            computed[plan] = train(plan.replace(" ", "-"), words.format(base="base"), folder)
            print(plan, computed[plan]["report"]["stream_sha256"][:12], flush=True)
    if args.write:
        args.write.write_text(json.dumps(computed, indent=1) + "\n")
        return 0
    earlier = json.loads(args.check.read_text())
    computed = json.loads(json.dumps(computed))
    differing = [
        f"{plan}: {part}: {earlier[plan][part]} became {computed[plan][part]}"
        for plan in PLANS
        for part in earlier[plan]
        if earlier[plan][part] != computed[plan][part]
    ]
    print("\n".join(differing) or "All five plans computed the same, bit for bit.")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
