"""Measure packing on a CPU: padding, crops, and tokens per second of the real loader with its hash.

    python benchmarks/data_packing.py --novels FOLDER --length 1024 2048

Two texts are packed. Web-like lengths are drawn from a log-normal distribution (median 600 tokens,
sigma 1.1, as nanochat's web text at 2,048 tokens has about 23% of its tokens beyond a row), a token
being a random id. Novels are cut at blank lines into passages of 1 to 60 paragraphs, drawn with the
seed, since a novel is one long document; their bytes are their tokens. For each text and length the
ledger counts every policy, and the loader reads the same number of tokens by the baseline's cut and
by best fit, one thread that reads ahead, in turn. Each is one row of results/data.jsonl, with the
seconds before the first row: what a start and a resume take.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import receipts

from headrace.data.loader import Loader
from headrace.data.packing.best_fit import BestFit
from headrace.data.packing.ledger import Policy, packing_ledger
from headrace.data.rows import Cut
from headrace.data.shards import Shards, ShardWriter

VOCAB, DOCUMENT_TOKEN = 50_000, 0
MEDIAN, SIGMA = 600, 1.1
ROW_TOKENS = 1 << 16
"""Tokens of a step."""


def web(documents: int, seed: int) -> Iterator[np.ndarray]:
    """Yield documents of random ids whose lengths are log-normal."""
    random = np.random.default_rng(seed)
    for size in random.lognormal(np.log(MEDIAN), SIGMA, documents).astype(int).tolist():
        yield random.integers(1, VOCAB, max(1, size))


def passages(folder: Path, seed: int) -> Iterator[np.ndarray]:
    """Yield passages of 1 to 60 paragraphs of the novels in a folder, a token a byte."""
    random = np.random.default_rng(seed)
    for file in sorted(folder.glob("*.txt")):
        paragraphs = [p for p in file.read_text(errors="replace").split("\n\n") if p.strip()]
        while paragraphs:
            count = int(random.integers(1, 61))
            text, paragraphs = "\n\n".join(paragraphs[:count]), paragraphs[count:]
            yield np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) + 1


def written(folder: Path, documents: Iterator[np.ndarray]) -> Shards:
    """Write documents as a shard set, and open it."""
    writer = ShardWriter(folder, VOCAB, document_token=DOCUMENT_TOKEN)
    for ids in documents:
        writer.add(ids)
    writer.close()
    return Shards.open(folder)


def read(
    kind: type[Cut] | type[BestFit], shards: Shards, length: int, steps: int
) -> dict[str, float]:
    """Return seconds to the first step, and tokens of the text per second after it."""
    begin = time.perf_counter()
    packer = kind([shards], length)
    options: dict[str, Any] = {"rows_per_step": max(1, ROW_TOKENS // length), "workers": 1}
    options["micro_rows"] = options["rows_per_step"]
    with Loader(packer, seed=0, **options, segments=kind is BestFit) as loader:
        loader.step()
        start_s, begin, useful = time.perf_counter() - begin, time.perf_counter(), 0
        for _ in range(steps):
            useful += sum(m.ids_BT.numel() - m.wasted for m in loader.step().micros)
        return {"start_s": start_s, "tokens_per_s": useful / (time.perf_counter() - begin)}


def measure(name: str, shards: Shards, length: int, args: argparse.Namespace) -> None:
    """Append a row of a text at a length, and print it."""
    begin = time.perf_counter()
    ledger = packing_ledger([shards], length)
    ledger_s = time.perf_counter() - begin
    packers: dict[str, type[Cut] | type[BestFit]] = {"cut": Cut, "best_fit": BestFit}
    runs = [
        {key: read(kind, shards, length, args.steps) for key, kind in packers.items()}
        for _ in range(args.rounds)
    ]
    best = ledger.policies[Policy.BEST_FIT_PACKING]
    metrics = {
        "ledger": receipts.spread([ledger_s], "s"),
        "utilisation": receipts.spread(
            [ledger.useful_share(Policy.BEST_FIT_PACKING)], "of the inputs"
        ),
        "cropped_that_fit": receipts.spread([best.needless_splits], "documents"),
        "cropped_that_fit_by_cut": receipts.spread(
            [ledger.policies[Policy.CUT].needless_splits], "documents"
        ),
    }
    for key in packers:
        metrics[f"{key}_rate"] = receipts.spread([r[key]["tokens_per_s"] for r in runs], "tokens/s")
        metrics[f"{key}_start"] = receipts.spread([r[key]["start_s"] for r in runs], "s")
    receipts.append(
        "data",
        metrics,
        results=args.results,
        kind="packing",
        shape=f"{name} T{length}",
        n=args.rounds,
        seeds=[args.seed],
        ledger=ledger.to_dict(1, 1),
    )
    print(name, length, {key: one["value"] for key, one in metrics.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--novels", type=Path, help="a folder of texts, one a novel")
    parser.add_argument("--documents", type=int, default=100_000, help="of the web-like text")
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        texts = {"web-like": web(args.documents, args.seed)}
        if args.novels:
            texts["novels"] = passages(args.novels, args.seed)
        for name, documents in texts.items():
            shards = written(Path(scratch) / name, documents)
            for length in args.length:
                measure(name, shards, length, args)


if __name__ == "__main__":
    main()
