"""Measure how fast rows are dealt to sources, and how soon any row of a long run is known.

python benchmarks/data_mixture.py [--rounds 5]

Sizes are those of a web-scale mixture; no text is read. By size, by weights and by stages with
limits are timed beside each other in one process, in micro-batches as a loader asks for them.
"""

import argparse
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import receipts

from headrace.data.mixture import Mixture, deal
from headrace.data.order import MixtureOrder, Order, make_order

LENGTH, MICRO_ROWS, MICROS = 4096, 32, 400
UNITS = [40_000_000 // 3**n + 17 for n in range(10)]
FAR = 10**9
"""Number of the row that is asked for first: about 4T tokens into the run."""


def mixtures() -> dict[str, Mixture | None]:
    """Return what is timed, by name."""
    weights = [[Fraction(1 + (n * k) % 11) for n in range(len(UNITS))] for k in (3, 7, 5)]
    stages = [(0, weights[0]), (500_000_000, weights[1]), (900_000_000, weights[2])]
    limits = [None, *(4 * units for units in UNITS[1:])]
    return {
        "by_size": None,
        "by_weight": deal([(0, weights[0])], [None] * len(UNITS)),
        "by_stage": deal(stages, limits),
    }


def rows_per_s(order: Order, first: int) -> float:
    """Return rows per second of consecutive micro-batches."""
    begin = time.perf_counter()
    for micro in range(MICROS):
        order(first + micro * MICRO_ROWS, MICRO_ROWS)
    return MICROS * MICRO_ROWS / (time.perf_counter() - begin)


def took_ms(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    metrics = {}
    for name, mixture in mixtures().items():
        orders = [make_order(UNITS, seed=seed, mixture=mixture) for seed in range(args.rounds)]
        firsts = [took_ms(lambda order=order: order(FAR, MICRO_ROWS)) for order in orders]
        rates = [LENGTH * rows_per_s(order, FAR) for order in orders]
        metrics[f"{name}_first_micro_batch"] = receipts.spread(firsts, "ms")
        metrics[f"{name}_tokens_per_s"] = receipts.spread(rates, "tokens/s")
        if mixture is not None:
            fresh = [MixtureOrder(UNITS, mixture, seed=seed) for seed in range(args.rounds)]
            counts = [took_ms(lambda order=order: order.counts(FAR)) for order in fresh]
            metrics[f"{name}_count"] = receipts.spread(counts, "ms")
    row = receipts.append(
        "data",
        metrics,
        results=args.results,
        kind="mixture",
        n=args.rounds,
        seeds=list(range(args.rounds)),
        shape=f"T{LENGTH} rows{MICRO_ROWS} sources{len(UNITS)}",
    )
    print(row["metrics"])


if __name__ == "__main__":
    main()
