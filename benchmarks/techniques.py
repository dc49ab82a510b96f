"""What each technique buys and costs at a shape: step time, peak memory, and the loss it comes to.

    python benchmarks/techniques.py fused_swiglu selective_checkpoint --shapes 160m 1b

A technique is measured twice: added to the eager trunk, and put into (or left out of) the compiled
recipe that `plans/` has for the shape. Rounds go over all sides in turn, base first, so each round
gives one ratio to the base that was timed beside it. A reading is the median step of a fresh build
on random tokens; the peak is that of those steps. With `--loss-steps` every side also trains on
real text from the same seed, and a row tells how far the mean loss of the last tenth is from the
base's. What cannot run gets a row with the reason.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import receipts
import torch
from signals import open_build

from headrace import train
from headrace.build import make_build, make_context
from headrace.cli import catalogue
from headrace.context import check_supported, choose_device
from headrace.core.errors import HeadraceError
from headrace.core.plan import Plan
from headrace.data.ingest import prepare
from headrace.filled import check_active
from headrace.parallel.world import World

PLANS = Path(__file__).parent / "plans"
WARM_STEPS, TIMED_STEPS = 3, 10


@dataclass
class Side:
    """A plan under test and its readings."""

    name: str
    plan: Plan
    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evidence: str = ""
    refused: str = ""


def sides(path: Path, names: list[str], overrides: list[str]) -> dict[str, list[Side]]:
    """(trunk, recipe) -> the base and a side for each technique, `name` or `name:key=value,...`."""
    text = path.read_text()
    recipe = Plan.read(text, catalogue(), overrides=overrides)
    found: dict[str, list[Side]] = {}
    for base, without in (("trunk", list(recipe.techniques)), ("recipe", [])):
        found[base] = [Side("", _read(text, overrides, [], without))]
        for asked in names:
            name, _, knobs = asked.partition(":")
            knob = [f"techniques.{name}.{k}" for k in knobs.split(",") if k]
            inside = base == "recipe" and name in recipe.techniques and not knob
            try:
                plan = _read(
                    text, overrides + knob, [] if inside else [name],
                    [*(w for w in without if w != name), *([name] if inside else [])],
                )  # fmt: skip
            except HeadraceError as error:
                found[base].append(Side(asked, recipe, refused=str(error)))
                continue
            found[base].append(Side(asked, plan))
    return found


def _read(text: str, overrides: list[str], more: list[str], without: list[str]) -> Plan:
    return Plan.read(text, catalogue(), overrides=overrides, with_=more, without=without)


def attempt(side: Side, what: Callable[[Side], None]) -> None:
    """Measure, or note why not; memory is given back either way."""
    if side.refused:
        return
    began_s = time.monotonic()
    try:
        plan = side.plan
        check_supported(list(plan.techniques.values()), make_context(plan, choose_device(plan)))
        what(side)
    except HeadraceError as error:
        side.refused = str(error)
    except torch.OutOfMemoryError as error:
        side.refused = f"out of memory: {str(error).splitlines()[0]}"
    except Exception as error:
        side.refused = f"{type(error).__name__}: {str(error)[:300]}"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    told = side.refused or f"{median(side.seconds) * 1e3:.2f} ms" if side.seconds else side.refused
    print(f"  {side.name or 'base'}: {told} ({time.monotonic() - began_s:.0f} s)", flush=True)


def time_steps(side: Side) -> None:
    """One reading of the step's seconds and the peak in bytes; the host never waits in between."""
    torch._dynamo.reset()
    build, micros = open_build(side.plan)
    clock = Clock(build.device)
    for flags in build.runtime:
        flags().__enter__()
    for index in range(WARM_STEPS + TIMED_STEPS):
        if index == 1:
            told = check_active(build)
            name = side.name.partition(":")[0]
            side.evidence = told[name].detail if name in told else ""
        if index == WARM_STEPS:
            clock.start()
        train.step(build, micros, index)
        clock.mark()
    side.seconds.append(median(clock.seconds()[-TIMED_STEPS:]))
    if build.device.type == "cuda":
        side.peaks.append(float(torch.cuda.max_memory_allocated()))


class Clock:
    """Moments between steps: events on a GPU, the wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.moments: list[Any] = []

    def start(self) -> None:
        """What came before does not count, its memory neither."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.moments.clear()
        self.mark()

    def mark(self) -> None:
        """A step ends now."""
        if not self.cuda:
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)

    def seconds(self) -> list[float]:
        """Of each step."""
        if self.cuda:
            torch.cuda.synchronize()
        pairs = pairwise(self.moments)
        return [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]


def train_steps(steps: int) -> Callable[[Side], None]:
    """Train on the plan's own text; keeps the mean loss of the last tenth."""

    def go(side: Side) -> None:
        torch._dynamo.reset()
        device = choose_device(side.plan)
        build = make_build(side.plan, prepare(side.plan), World(), device)
        for flags in build.runtime:
            flags().__enter__()
        losses = [
            train.step(build, build.loader.step(index).micros, index)[0] for index in range(steps)
        ]
        side.losses.append(float(torch.stack(losses[-max(1, steps // 10) :]).mean()))

    return go


def write(shape: str, base: str, side: Side, first: Side, results: Path, loss_steps: int) -> None:
    """One row: ratios to the base of the same round."""
    facts: dict[str, Any] = {
        "technique": side.name.partition(":")[0], "knobs": side.name.partition(":")[2],
        "base": base, "shape": shape, "seeds": [side.plan.seed], "n": len(side.seconds),
        "techniques": sorted(side.plan.techniques),
        "left_out": side.name in first.plan.techniques,
        "plan_sha256": receipts.sha256(side.plan.dump()),
        "baseline_sha256": receipts.sha256(first.plan.dump()),
    }  # fmt: skip
    metrics: dict[str, Any] = {}
    refused = side.refused or (first.refused and f"its base cannot run: {first.refused}")
    if refused:
        facts["refused"] = refused
    else:
        facts["evidence"] = side.evidence
        tokens = side.plan.batch.tokens
        ratios = [b / s for b, s in zip(first.seconds, side.seconds, strict=True)]
        metrics["speed_ratio"] = receipts.spread(ratios, "x")
        metrics["tokens_per_s"] = receipts.spread([tokens / s for s in side.seconds], "tokens/s")
        if side.peaks:
            shares = [s / b for b, s in zip(first.peaks, side.peaks, strict=True)]
            metrics["memory_ratio"] = receipts.spread(shares, "x")
            metrics["peak_memory"] = receipts.spread(side.peaks, "bytes")
        if side.losses and first.losses:
            facts["loss_steps"] = loss_steps
            off = [s - b for b, s in zip(first.losses, side.losses, strict=True)]
            metrics["loss_difference"] = receipts.spread(off, "nats")
    receipts.append("techniques", metrics, results=results, **facts)
    told = {n: round(m["value"], 4) for n, m in metrics.items()}
    print(json.dumps({"shape": shape, "base": base, "technique": side.name, **told,
                      "refused": facts.get("refused", "")}), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("techniques", nargs="+", help="name, or name:knob=value,knob=value")
    parser.add_argument("--shapes", nargs="+", default=["160m", "1b"])
    parser.add_argument("--bases", nargs="+", default=["trunk", "recipe"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loss-steps", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no round later")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every plan")
    args = parser.parse_args()
    began_s = time.monotonic()
    for shape in args.shapes:
        path = Path(shape) if shape.endswith(".toml") else PLANS / f"{shape}.toml"
        for base, found in sides(path, args.techniques, args.set).items():
            if base not in args.bases:
                continue
            for index in range(args.rounds):
                if index and time.monotonic() - began_s > args.limit_s:
                    break
                print(f"{path.stem} {base} round {index}", flush=True)
                for side in found:
                    attempt(side, time_steps)
            if args.loss_steps:
                for side in found:
                    attempt(side, train_steps(args.loss_steps))
            for side in found[1:]:
                write(path.stem, base, side, found[0], args.results, args.loss_steps)


if __name__ == "__main__":
    main()
