"""Measure which attention backend is fastest at a shape, as `attention = "measured"` does in a run.

    python benchmarks/attention.py 160m --without cudnn_attention --set data.sources=DATA
    python benchmarks/attention.py 1b --without cudnn_attention --with document_packing \
        --set data.sources=DATA

One row: what every backend takes for a micro-batch of that text (the mask once, forward and
backward for every layer), who cannot run and why, which one the run would take, and the kernels
that it launches. A result that an earlier run of the same machine kept is marked `cached`.
"""

from pathlib import Path
from typing import Any

import receipts
from kernel_gaps import parser, plan_from

from headrace.assemble.autotune import ROUNDS, choose_attention, format_result
from headrace.assemble.context import choose_device
from headrace.cli.catalogue import catalogue
from headrace.core.progress import Progress
from headrace.data.ingest import prepare
from headrace.parallel.world import World


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = words.parse_args()
    args.set = [*args.set, "attention=measured"]
    plan = plan_from(args)
    chosen, times = choose_attention(
        plan, catalogue(), prepare(plan), World(), choose_device(plan), Progress()
    )
    assert times is not None
    asked = [item for item in args.set if not item.startswith(("data.", "attention="))]
    metrics: dict[str, Any] = {
        name: {"value": ms["median"], "low": ms["low"], "high": ms["high"], "unit": "ms"}
        for name, ms in times["milliseconds"].items()
    }
    receipts.append(
        "attention",
        metrics,
        results=args.results,
        shape=args.shape,
        seeds=[plan.seed],
        n=ROUNDS if metrics else 0,
        chosen=times["chosen"],
        kernels=times["kernels"],
        cannot=times["refused"],
        recipe=" ".join(["recipe", *args.with_, *(f"-{n}" for n in args.without), *asked]),
        cached=times["cached"],
        at=times["at"],
        techniques=sorted(chosen.techniques),
        plan_sha256=receipts.sha256(plan.dump()),
    )
    print(format_result(times))


if __name__ == "__main__":
    main()
