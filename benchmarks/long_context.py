"""Extend a model that is trained here to 4x longer rows, and say what short ones lost.

    python benchmarks/long_context.py --data FOLDER --more FOLDER --validation FOLDER --work FOLDER

A decoder of the shape of the recipe 124m, in a form that `transformers` describes, is trained on
rows of 2,048 tokens; `headrace extend` then trains it on rows of 8,192 tokens, all weights and
adapters alone, each from the same weights. One row of results/finetune.jsonl is written for each:
the loss at both lengths before and after, the change at 2,048 tokens in percent, and the share of
needles found in the longest rows. `--more` is text that the base has not read, for the extension;
it and the validation text must hold documents of 8,192 tokens. `--tiny` trains a model that a CPU
trains in a minute, from 64 to 256 tokens, on a text that it writes.

A base that knows its text by heart loses by every further step on it: after 5.7 epochs of 13.7M
tokens (a training loss of 2.7 nats beside 4.1 of validation) both methods lost 2% and 3% on short
rows. So `--steps` stays below two epochs of the text. The defaults take four minutes of one H100.
`--methods lora`, then `full` with the same `--work`, makes it two calls.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import receipts

NOT_DESCRIBED = ("relu_squared", "rms_norm", "embedding_norm", "embedding_residual")
"""Techniques of the recipe whose models `transformers` has no class for."""
BASE_TOKENS, LONG_TOKENS = 2048, 8192
TINY = (
    *("device=cpu", "model.dim=32", "model.layers=2", "model.heads=2", "data.vocab=300"),
    *("batch.micro_sequences=0", "eval.tokens=2048", "checkpoint.every_steps=60"),
    "techniques.muon.momentum_warmup_steps=20",
    "techniques.warmup.steps=10",
)
TINY_BASE_TOKENS, TINY_LONG_TOKENS = 64, 256
METHODS = {"lora": (), "full": ("--full",)}
"""What learns on longer rows -> the options of `headrace extend`."""


def headrace(work: Path, *words: str) -> dict[str, Any]:
    """Run a verb with --json in the folder `work`, and return its document."""
    command = [sys.executable, "-m", "headrace", *words, "--json"]
    ended = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, text=True, check=False)
    document = json.loads(ended.stdout)
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)}: {document['error']}; try: {document['remedy']}")
    return document


def write_text(folder: Path) -> Path:
    """Write a text of long documents in a few words for `--tiny`, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = "the a mill wheel river stone grain sluice gate turns grinds flows by of 17 42 305"
    for number in range(16):
        lines = (" ".join(draw.choices(words.split(), k=12)) + ".\n" for _ in range(100))
        (folder / f"{number:02}.txt").write_text("".join(lines))
    return folder


def measure(args: argparse.Namespace, *words: str) -> None:
    """Extend the model of the run `base` once; append a row and print it."""
    method = "full" if "--full" in words else "lora"
    to = TINY_LONG_TOKENS if args.tiny else LONG_TOKENS
    steps = 20 if args.tiny else args.extend_steps
    report = headrace(
        args.work,
        *("extend", "base", "--to", str(to), f"name=base-{method}", f"seed={args.seed}"),
        *(f"goal.steps={steps}", f"schedule.steps={steps}", "--questions", str(args.questions)),
        *([f"data.sources={args.more.resolve()}"] if args.more else []),
        *([f"data.validation={args.validation.resolve()}"] if args.validation else []),
        *words,
    )
    extension = report["extension"]
    before, after = extension["before"], extension["after"]

    def needle_share(reading: dict[str, Any]) -> float:
        cells = [cell for cell in reading["needles"] if cell["length"] == to]
        return sum(cell["right"] for cell in cells) / sum(cell["questions"] for cell in cells)

    readings = {
        "short_before": (before["losses"][0]["loss_nats"], "nats"),
        "short_after": (after["losses"][0]["loss_nats"], "nats"),
        "short_change": (extension["change_percent"], "%"),
        "long_before": (before["losses"][-1]["loss_nats"], "nats"),
        "long_after": (after["losses"][-1]["loss_nats"], "nats"),
        "needles_before": (needle_share(before), "share"),
        "needles_after": (needle_share(after), "share"),
    }
    receipts.append(
        "finetune",
        {name: receipts.spread([value], unit) for name, (value, unit) in readings.items()},
        results=args.results,
        kind="long_context",
        shape=f"{'tiny' if args.tiny else '124m'} T{extension['trained_length']} to T{to}",
        technique="yarn",
        techniques=sorted(report["techniques"]),
        method=method,
        n=1,
        seeds=[args.seed],
        extension=extension,
    )
    print(method, {name: round(value, 4) for name, (value, _) in readings.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a text of long documents")
    parser.add_argument("--more", type=Path, help="long documents that the base has not read")
    parser.add_argument("--validation", type=Path, help="a text of long documents")
    parser.add_argument("--work", type=Path, required=True, help="where runs go")
    parser.add_argument("--tiny", action="store_true", help="a minute on a CPU")
    parser.add_argument("--steps", type=int, default=350, help="of the base")
    parser.add_argument("--extend-steps", type=int, default=100)
    parser.add_argument("--questions", type=int, default=16, help="needles of a cell")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    if args.data is None and not args.tiny:
        parser.error("--data FOLDER names the text; --tiny writes one")
    began_s = time.monotonic()
    data = None if args.data is None else str(args.data.resolve())
    held_out = str(args.validation.resolve()) if args.validation else None
    known = {"text": data, "validation": held_out, "tiny": args.tiny}
    receipts.claim(args.work, **known, steps=args.steps, seed=args.seed)
    text = (args.data or write_text(args.work / "text")).resolve()
    if not (args.work / "runs" / "base").exists():
        length, rows = (TINY_BASE_TOKENS, 8) if args.tiny else (BASE_TOKENS, 32)
        steps = 60 if args.tiny else args.steps
        dropped = (w for name in NOT_DESCRIBED for w in ("--without", name))
        headrace(
            args.work,
            *("train", "124m", "name=base", f"data.sources={text}", f"seed={args.seed}"),
            f"data.validation={held_out or (0.2 if args.tiny else 0.01)}",
            *(f"data.sequence_length={length}", f"batch.tokens={rows * length}"),
            *("batch.micro_sequences=0", f"goal.steps={steps}", f"schedule.steps={steps}"),
            *(TINY if args.tiny else ()),
            *dropped,
            *(("--without", "torch_compile") if args.tiny else ()),
        )
        print(f"the base is trained after {time.monotonic() - began_s:.0f} s", flush=True)
    for method in args.methods:
        words = ("device=cpu",) if args.tiny else ("--with", "varlen_attention")
        measure(args, *METHODS[method], *words)
        print(f"{method} is measured after {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
