"""Measure Muon's share of a step, and its peak memory beside AdamW's, in one process.

    python benchmarks/optimizer_step.py                      # d512, 160m and 1b on one GPU
    python benchmarks/optimizer_step.py --shapes 160m --set techniques.muon.normalize_rows=true

One build trains with either optimizer in turn, in blocks of steps, A B B A: A is AdamW for all
parameters, B the plan's Muon with AdamW for the rest. Model, gradients, clipping and batch are the
same, and so are the weights, which both move. Blocks are timed by the wall clock, between two waits
for the device; the optimizers' own time is read from events around each `step`, as the device sees
it. A row has

    muon_share      time inside of Muon's own `step`, of B's step
    update_share    time inside of all optimizers' steps, of B's step; adamw_share is A's
    extra_share     what B's step takes beyond A's, of B's: paired
    peak_ratio      peak memory of B's steps over A's, each without the other side's states
    first_s         seconds of B's first step beyond a steady one: what compiling takes

Plans that keep bf16 weights refuse Muon, so `bf16_parameters` is left out on both sides. The 1b
shape runs in micro-batches of 4 sequences, so that both sides' states fit beside its activations.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import receipts
import torch

from headrace.assemble.sockets import Build, Optimizer
from headrace.cli.catalogue import catalogue
from headrace.core.statistics import order_abba, paired_ratio
from headrace.data.loader import Micro
from headrace.observe.signals import TrackedMemory
from headrace.optim.adamw import make_adamw
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.tuner.readings import opened, wait

SHAPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "d512": ("novels", ("goal.steps=500", "batch.tokens=32768", "model.vocab=16384")),
    "160m": ("160m", ()),
    "1b": ("1b", ("batch.micro_sequences=4",)),
}
"""Name of a shape -> its plan in plans/, and keys that are set over the plan's."""
GENTLE = ("techniques.muon.lr=1e-4", "optimizer.lr=1e-5", "schedule.kind=constant")
"""Rates at which weights that two optimizers move in turn stay finite."""
LEFT_OUT = "bf16_parameters"
WARM = 3


@dataclass
class Side:
    """Hold one side's optimizers, and how long each step of theirs took."""

    build: Build
    optimizers: dict[str, Optimizer]
    routed: dict[str, dict[str, torch.nn.Parameter]]
    events: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
    blocks: list[float] = field(default_factory=list)
    """seconds of a step, one a block"""
    inside: dict[str, list[float]] = field(default_factory=dict)
    """optimizer -> its seconds of a step, one a block"""
    peak_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.step = self._timed(name, optimizer.step)  # type: ignore[method-assign]
            for group in optimizer.param_groups:
                group["initial_lr"], group["lr_factor"] = group["lr"], 1.0

    def _timed(self, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> None:
            begin = self._now()
            call()
            self.events.setdefault(name, []).append((begin, self._now()))

        return step

    def _now(self) -> Any:
        """Return an event on a GPU, the clock's seconds elsewhere."""
        if self.build.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run(self, micros: Callable[[int], list[Micro]], first: int, steps: int) -> float:
        """Take steps with this side's optimizers, and return the seconds of one."""
        build = self.build
        build.optimizers, build.routed, self.events = self.optimizers, self.routed, {}
        wait(build)
        begin = time.perf_counter()
        for index in range(first, first + steps):
            train.step(build, micros(index), index)
        wait(build)
        return (time.perf_counter() - begin) / steps

    def block(self, micros: Callable[[int], list[Micro]], first: int, steps: int) -> None:
        """Run a block, and keep its times."""
        self.blocks.append(self.run(micros, first, steps))
        for name, pairs in self.events.items():
            took = [self._between(*pair) for pair in pairs]
            self.inside.setdefault(name, []).append(sum(took) / steps)

    @staticmethod
    def _between(begin: Any, end: Any) -> float:
        """Return the seconds between two moments."""
        return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3

    def state_bytes(self) -> int:
        """Return the bytes of what its optimizers keep."""
        states = [s for optimizer in self.optimizers.values() for s in optimizer.state.values()]
        return sum(t.nbytes for s in states for t in s.values() if torch.is_tensor(t))

    def read_peak(self, micros: Callable[[int], list[Micro]], other: "Side") -> None:
        """Read the peak memory of two steps, without the states of the other side."""
        if self.build.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.run(micros, 0, 2)
            self.peak_bytes = torch.cuda.max_memory_allocated() - other.state_bytes()
            return
        tracked = TrackedMemory(self.build.model, list(self.optimizers.values()))
        self.build.model.zero_grad()
        with tracked:
            self.run(micros, 0, 1)
        self.peak_bytes = tracked.peak_bytes()["Total"]

    def shares(self, *names: str) -> dict[str, Any]:
        """Return the share of a step that these optimizers take, or all of them."""
        taken = [self.inside[n] for n in names or self.inside]
        each = [sum(x) / step for *x, step in zip(*taken, self.blocks, strict=True)]
        return receipts.spread(each, "of a step")


def sides_of(build: Build) -> tuple[Side, Side]:
    """Return AdamW for all parameters, and the build's own optimizers."""
    everything = {n: p for n, p in build.model.named_parameters() if p.requires_grad}
    adamw = make_adamw(build.plan.optimizer, everything)
    plain = Side(build, {"adamw": adamw}, {"adamw": everything})  # type: ignore[dict-item]
    return plain, Side(build, build.optimizers, build.routed)


def measure(plan: Plan, rounds: int, block_s: float) -> tuple[dict[str, Any], int, str]:
    """Return the metrics of a row, how many pairs of blocks they are of, and Muon's evidence."""
    with opened(plan) as (build, micros):
        plain, muon = sides_of(build)
        plain.run(micros, 0, WARM)
        first_s = muon.run(micros, 0, 1)
        evidence = build.plan.techniques["muon"].active(build)
        if not evidence.active:
            raise RuntimeError(f"Muon is not in force: {evidence.detail}")
        muon.run(micros, 1, WARM)
        step_s = plain.run(micros, 0, WARM)
        steps, index = max(2, round(block_s / step_s)), 2 * WARM
        for side in order_abba(rounds):
            (plain if side == "A" else muon).block(micros, index, steps)
            index += steps
        for one, other in ((plain, muon), (muon, plain)):
            one.read_peak(micros, other)
    ratio = paired_ratio(muon.blocks, plain.blocks)
    extra = {"low": 1 - 1 / ratio.low if ratio.low else None, "high": 1 - 1 / ratio.high}
    peaks = plain.peak_bytes or 0.0, muon.peak_bytes or 0.0
    metrics = {
        "muon_share": muon.shares("muon"),
        "update_share": muon.shares(),
        "adamw_share": plain.shares(),
        "extra_share": {"value": 1 - 1 / ratio.value, **extra, "unit": "of a step"},
        "muon_step_s": receipts.spread(muon.blocks, "s"),
        "adamw_step_s": receipts.spread(plain.blocks, "s"),
        "first_s": receipts.spread([first_s - median(muon.blocks)], "s"),
        "muon_peak_bytes": receipts.spread([peaks[1]], "bytes"),
        "adamw_peak_bytes": receipts.spread([peaks[0]], "bytes"),
        "peak_ratio": receipts.spread([peaks[1] / peaks[0]], "times"),
    }
    return metrics, ratio.n, evidence.detail


def plan_of(shape: str, words: list[str]) -> Plan:
    """Return the plan of a shape by its name, or of a file, with Muon and gentle rates."""
    name, keys = SHAPES.get(shape, (shape, ()))
    text = receipts.plan_file(name).read_text()
    return Plan.read(
        text,
        catalogue(),
        overrides=[*GENTLE, *keys, *words],
        with_=["muon"],
        without=[LEFT_OUT] if f"[techniques.{LEFT_OUT}]" in text else [],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="names, or plan files")
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A, two pairs each")
    parser.add_argument("--block_s", type=float, default=1.0, help="seconds of a block, about")
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    for shape in args.shapes:
        plan = plan_of(shape, args.set)
        metrics, n, evidence = measure(plan, args.rounds, args.block_s)
        row = receipts.append(
            "learning",
            metrics,
            results=args.results,
            kind="optimizer_share",
            n=n,
            shape=plan.name if shape not in SHAPES else shape,
            seeds=[plan.seed],
            technique="muon",
            techniques=sorted(plan.techniques),
            knobs=plan.techniques["muon"].model_dump(),
            evidence=evidence,
            overrides=args.set,
            plan_sha256=receipts.sha256(plan.dump()),
        )
        line = ", ".join(f"{k} {m['value']:.4g}" for k, m in row["metrics"].items())
        print(f"{row['shape']}: {line}; {evidence}", flush=True)


if __name__ == "__main__":
    main()
