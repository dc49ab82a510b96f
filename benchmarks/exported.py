"""Say whether exported files compute what was evaluated, by families and by prompts.

    python benchmarks/exported.py logits --work FOLDER [--data FOLDER]
    python benchmarks/exported.py prompts --work FOLDER [--data FOLDER]

Small models are trained here on a CPU, on the Python standard library or on `--data`. Rows of
results/compress.jsonl are of one seed, since nothing is compared but two computations of one model.

- `logits` trains a model of each family and writes it in every format that the family has. A row
  has the largest difference of a logit to the fake-quantized model, and the share of tokens after
  which it is at most 1e-4. Where matmuls read codes of 8 bits, a sum that differs in its last bit
  may get the next code; so that share is told. About 15 minutes on two quiet cores (estimated from
  shorter runs), most of it ExecuTorch's lowering.
- `prompts` continues 20 prompts with a GGUF file by llama.cpp and with the run by Headrace, both
  by the likeliest token. All texts are to be identical. About 5 minutes on two quiet cores
  (estimated).
"""

import argparse
from pathlib import Path
from typing import Any

import receipts
from compress import headrace

FAMILIES = {
    "llama": ("model.family=llama3-1b", "model.kv_heads=1"),
    "gpt2": ("model.family=gpt2", "model.context=64"),
    "gemma3": (
        *("model.family=gemma3-1b", "model.head_dim=32", "model.kv_heads=1"),
        *("model.window=32", "model.window_between=1", "model.embedding_scale=8"),
    ),
}
"""Words by which the recipe demo has another family's blocks."""
SIZES = (
    *("model.dim=64", "model.layers=2", "model.heads=2", "model.ffn=128", "model.vocab=512"),
    *("data.vocab=512", "data.sequence_length=64"),
    *("data.tokenizer_pattern=gpt4", "model.head_init=normal"),
)
FILES = (
    ("onnx", "int8"),
    ("onnx", "int4"),
    ("executorch", "fp32"),
    ("executorch", "8da4w"),
    ("vllm", "int8"),
    ("vllm", "int4"),
)
"""Formats, and how each stores matrices."""
EQUAL = 1e-4
"""Difference of logits up to which a file computes what was evaluated."""
PROMPTS = (
    *("def main(", "import os", "class Node:", "for name in ", "if not isinstance(", "return "),
    *("    self.", "try:\n", "with open(", "raise ValueError(", "# The ", '"""Return ', "while "),
    *("lambda ", "print(", "assert ", "from typing import ", "x = [", "async def ", "elif "),
)
"""What is continued: beginnings of lines of Python."""
NEW_TOKENS = 32
"""Tokens that each prompt is continued by."""


def trained(args: argparse.Namespace, name: str, *words: str) -> str:
    """Train a small model unless that run is there, and return its name."""
    if not (args.work / "runs" / name).exists():
        text = [] if args.data is None else [f"data.sources={args.data.resolve()}"]
        headrace(
            args.work,
            *("train", "demo", "device=cpu", f"name={name}", *text, *SIZES, *words),
            *(f"goal.steps={args.steps}", f"schedule.steps={args.steps}", "goal.minutes=1000"),
            *("goal.bits_per_byte=0.01", f"eval.every_steps={args.steps}", "--without", "muon"),
            f"schedule.warmup_steps={min(20, args.steps)}",
        )
    return name


def logits(args: argparse.Namespace) -> None:
    """Export every family to every format, and write how far each file's logits are."""
    for family, words in FAMILIES.items():
        name = trained(args, family, *words)
        drifts: dict[str, float | None] = {}
        equal: dict[str, float | None] = {}
        for to, preset in FILES:
            if to == "vllm" and family == "gpt2":  # its matrices are no linears there
                continue
            kind, out = f"{to} {preset}", f"{family}-{to}-{preset}"
            if (args.work / out).exists():
                raise SystemExit(f"{args.work / out} is there: give another folder --work")
            words = ("--to", to, "--quantize", preset, "--output", out)
            made = headrace(args.work, "export", name, *words)
            drifts[kind], equal[kind] = made["drift"], made.get("equal")
            print(family, kind, drifts[kind], equal[kind], flush=True)
        known = [drift for drift in drifts.values() if drift is not None]
        exact = [d for kind, d in drifts.items() if d is not None and "8da4w" not in kind]
        receipts.append(
            "compress",
            {"drift": receipts.spread(known, "logits")},
            results=args.results,
            kind="logits",
            shape=f"{family}, {' '.join(SIZES[:5])}",
            files=drifts,
            equal=equal,
            n=1,
            steps=args.steps,
            met=max(exact) <= EQUAL,
        )


def prompts(args: argparse.Namespace) -> None:
    """Continue every prompt by llama.cpp and by Headrace, and write how many texts are the same."""
    name = trained(args, "spoken")
    file = args.work / "spoken.gguf"
    if not file.exists():
        words = ("--to", "gguf", "--quantize", "f32", "--output", file.name)
        headrace(args.work, "export", name, *words)
    different: list[str] = []
    for prompt in PROMPTS:
        ask = ("--prompt", prompt)
        theirs = headrace(args.work, "run", file.name, *ask, "--max-tokens", str(NEW_TOKENS))
        greedy = ("--temperature", "0", "--tokens", str(NEW_TOKENS))
        ours = headrace(args.work, "sample", name, *ask, *greedy)
        if theirs["text"] != ours["text"]:
            different.append(prompt)
        print(repr(prompt), theirs["text"] == ours["text"], flush=True)
    same = 1 - len(different) / len(PROMPTS)
    receipts.append(
        "compress",
        {"same": receipts.spread([same], "of the prompts")},
        results=args.results,
        kind="prompts",
        shape=" ".join(SIZES[:5]),
        different=different,
        n=len(PROMPTS),
        tokens=NEW_TOKENS,
        steps=args.steps,
        met=not different,
    )
    print(f"{same:.0%} of {len(PROMPTS)} prompts are continued identically, met: {not different}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    programs: dict[str, Any] = {"logits": logits, "prompts": prompts}
    parser.add_argument("what", choices=programs)
    parser.add_argument("--work", type=Path, required=True, help="where runs go")
    parser.add_argument("--data", type=Path, help="a text; the standard library without it")
    parser.add_argument("--steps", type=int, default=600, help="of every training")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    text = None if args.data is None else str(args.data.resolve())
    receipts.claim(args.work, text=text, steps=args.steps)
    programs[args.what](args)


if __name__ == "__main__":
    main()
