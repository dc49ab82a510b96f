"""What the signals cost a step: the same steps with and without them, alternating in one process.

    python benchmarks/signals.py --plan benchmarks/plans/160m.toml --rounds 7

Both sides call `train.step` on the same rows on the device. One side marks phases, copies the
step's numbers and drains rows as a run does; the other does nothing. A round times a block of steps
of each side by the wall clock, in turn, and gives one ratio.
"""

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import receipts
import torch

from headrace import train
from headrace.build import make_build
from headrace.cli import catalogue
from headrace.context import choose_device
from headrace.core.plan import Plan
from headrace.core.technique import Stage
from headrace.data.ingest import Prepared
from headrace.data.loader import Micro
from headrace.parallel.world import World
from headrace.signals import Signals
from headrace.sockets import Build

BLOCK = 20


class Silent:
    """Phases that nobody times."""

    def mark(self, phase: str) -> None:
        """Nothing."""


def open_build(plan: Plan) -> tuple[Build, list[Micro]]:
    """A build without data, and one batch of random tokens."""
    tokenizer: Any = SimpleNamespace(vocab=plan.model.vocab)
    nothing: Any = None
    prepared = Prepared(Path(), tokenizer, train=(), validation=nothing, fingerprint={})
    build = make_build(plan, prepared, World(), choose_device(plan), until=Stage.SCHEDULE)
    shape = (plan.rows_per_step, plan.data.sequence_length + 1)
    x = torch.randint(0, plan.model.vocab, shape, generator=torch.Generator().manual_seed(0))
    return build, [Micro(x[:, :-1].contiguous(), x[:, 1:].contiguous())]


def block(build: Build, micros: list[Micro], signals: Signals | None) -> float:
    """Seconds of `BLOCK` steps."""
    build.phases = signals or Silent()
    _wait(build)
    begin = time.perf_counter()
    for index in range(BLOCK):
        if signals:
            signals.mark("input")
        numbers = train.step(build, micros, index)
        if signals:
            signals.end_step(index, numbers, {})
            signals.drain(keep=1)
    _wait(build)
    if signals:
        signals.drain(keep=0)
    return time.perf_counter() - begin


def _wait(build: Build) -> None:
    if build.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    plan = Plan.read(args.plan.read_text(), catalogue(), overrides=args.set, without=args.without)
    build, micros = open_build(plan)
    signals = Signals(build.device)
    for side in (None, signals):
        block(build, micros, side)
    ratios, seconds = [], []
    for index in range(args.rounds):
        order = (None, signals) if index % 2 else (signals, None)
        spent = {side is not None: block(build, micros, side) for side in order}
        ratios.append(spent[True] / spent[False])
        seconds.append(spent[True] / BLOCK)
    metrics = {
        "time_ratio": receipts.spread(ratios, "x"),
        "step_s": receipts.spread(seconds, "s"),
    }
    row = receipts.append(
        "signals", metrics, results=args.results, shape=plan.name, n=args.rounds, seeds=[0],
        technique="signals", techniques=sorted(plan.techniques),
        plan_sha256=receipts.sha256(plan.dump()),
    )  # fmt: skip
    print(row["metrics"])


if __name__ == "__main__":
    main()
