"""Measure the data path on a CPU: tokens per second with the stream hash, and a resume's time.

python benchmarks/data_path.py [--source stdlib]
"""

import argparse
import tempfile
import time
from pathlib import Path

import receipts

from headrace.cli.catalogue import catalogue
from headrace.data.ingest import prepare
from headrace.data.loader import Loader
from headrace.data.rows import Cut
from headrace.plan.plan import Plan

LENGTH, ROWS, STEPS = 1024, 32, 200


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="stdlib")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plan = Plan.read(
            "",
            catalogue(),
            overrides=[
                f"data.sources={args.source}",
                f"data.directory='{scratch}'",
                "data.vocab=4096",
                "goal.steps=1",
            ],
        )
        shards = prepare(plan).train
        metrics = {}
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
        shape=f"T{LENGTH} rows{ROWS}",
        source=args.source,
    )
    print(row["metrics"])


if __name__ == "__main__":
    main()
