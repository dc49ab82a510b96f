"""Measure the data path on a CPU: tokens per second with the stream hash, a start, a resume.

python benchmarks/data_path.py [--source stdlib] [--shards 10000]

With `--shards`, a set of that many files is measured in the place of the source, each of 2,048
random tokens: how long a start takes from the folder to the first batch, a resume, and the tokens
per second where nearly every row stands in another file.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import receipts

from headrace.cli.catalogue import catalogue
from headrace.data.ingest import prepare
from headrace.data.loader import Loader
from headrace.data.rows import Cut
from headrace.data.shards import Shards, ShardWriter
from headrace.plan.plan import Plan

LENGTH, ROWS, STEPS = 1024, 32, 200
VOCAB, SHARD_TOKENS = 4096, 2048


def open_loader(shards: tuple, workers: int) -> Loader:
    """Return one process's loader over the prepared shards."""
    packer = Cut(shards, LENGTH)
    return Loader(packer, seed=0, rows_per_step=ROWS, micro_rows=ROWS, workers=workers)


def rate(shards: tuple, workers: int) -> float:
    """Return tokens per second over STEPS steps."""
    with open_loader(shards, workers) as loader:
        loader.step(0)
        begin = time.perf_counter()
        for _ in range(STEPS):
            loader.step()
        return STEPS * ROWS * LENGTH / (time.perf_counter() - begin)


def resume(shards: tuple, step: int) -> float:
    """Return milliseconds from a saved state to the first batch."""
    with open_loader(shards, 1) as loader:
        loader.seek(step)
        state = loader.state()
    with open_loader(shards, 1) as loader:
        begin = time.perf_counter()
        loader.load_state(state)
        loader.step()
        return (time.perf_counter() - begin) * 1e3


def many_shards(folder: Path, count: int) -> Shards:
    """Write a set of `count` files."""
    writer = ShardWriter(folder, VOCAB, document_token=0, shard_tokens=SHARD_TOKENS)
    random = np.random.RandomState(0)
    while writer.tokens <= SHARD_TOKENS * (count - 1):
        writer.add(random.randint(1, VOCAB, 499), text_bytes=2000)
    writer.close()
    return Shards.open(folder)


def start(folder: Path) -> float:
    """Return milliseconds from the folder of a set to the first batch."""
    begin = time.perf_counter()
    with open_loader((Shards.open(folder),), 1) as loader:
        loader.step()
        return (time.perf_counter() - begin) * 1e3


def from_source(source: str, scratch: str) -> tuple[Shards, ...]:
    """Return the prepared shards of a source."""
    plan = Plan.read(
        "",
        catalogue(),
        overrides=[
            f"data.sources={source}",
            f"data.directory='{scratch}'",
            f"data.vocab={VOCAB}",
            "goal.steps=1",
        ],
    )
    return prepare(plan).train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="stdlib")
    parser.add_argument("--shards", type=int, default=0, help="files of a set that is made up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        metrics, shards = {}, ()
        if args.shards:
            shards = (many_shards(Path(scratch) / "set", args.shards),)
            took = [start(Path(scratch) / "set") for _ in range(args.rounds)]
            metrics["start"] = receipts.spread(took, "ms")
        else:
            shards = from_source(args.source, scratch)
        for workers in (0, 1, 2):
            rates = [rate(shards, workers) for _ in range(args.rounds)]
            metrics[f"tokens_per_s_workers_{workers}"] = receipts.spread(rates, "tokens/s")
        for step in (0, 10**6):
            took = [resume(shards, step) for _ in range(args.rounds)]
            metrics[f"resume_at_step_{step}"] = receipts.spread(took, "ms")
    row = receipts.append(
        "data_path",
        metrics,
        results=args.results,
        n=args.rounds,
        seeds=[0],
        shape=f"T{LENGTH} rows{ROWS}" + (f" shards{args.shards}" if args.shards else ""),
        source=f"{args.shards} shards" if args.shards else args.source,
    )
    print(row["metrics"])


if __name__ == "__main__":
    main()
