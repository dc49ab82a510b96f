"""Measure whether techniques that round otherwise learn the same, over shapes and seeds.

    python benchmarks/equal_learning.py measure --shapes 160m 330m --data NOVELS --minutes 9
    python benchmarks/equal_learning.py planted --steps 500 --seeds 0 1 2 3

`measure`: of each shape a compiled bf16 plan is trained for 1,000 steps with each technique and
without it, of the same seed and rows. A pair has a row in equal_learning.jsonl: by how many nats
its last quarter of the steps is off. Trainings are kept in `--folder`, so that a call which was cut
off goes on.

`planted`: a tiny plan is trained on a CPU with an error in each step, whose size is known: linears
that keep few bits, gradients with noise, gradients without some of their numbers. A row has what
the tuner's judge says of it after few steps (tuner/equality.py) and by stretches of a training that
begin with the same state, where it asks for them, and the nats that it loses in the end. In fp32
and at this size two trainings do not drift apart, so the loss is the error's alone.
"""

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import receipts
import torch
from scoring.numbers import LOSER_STEPS
from torch import Tensor, nn
from tuner_trials import kept_losses

from headrace.assemble.context import choose_device, make_context
from headrace.assemble.kept_states import take_over
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.statistics import no_worse
from headrace.data.ingest import prepare
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.train.guard import ALL, MEAN, inspects
from headrace.tuner.brief_training import of_length
from headrace.tuner.equality import (
    BATCHES,
    BRIEF_STEPS,
    LEAST_STEPS,
    NATS,
    STRETCH,
    WANTED_STEPS,
    added_noise,
    equality,
)
from headrace.tuner.judge import Rules, WorthMoreSteps
from headrace.tuner.paired_blocks import SampleSize, train_on
from headrace.tuner.pairs import SAME, loss_with
from headrace.tuner.readings import Reading, opened
from headrace.tuner.store import fingerprint
from headrace.tuner.worker import Worker

TOPIC = "equal_learning"
BASE = "batch.tokens=16384 optimizer.lr=1e-3 schedule.warmup_steps=50"
"""Changes of every shape's plan, beside that nothing rounds otherwise: steps that end in time."""
CHANGES = {
    "float8_linear": "+float8_linear techniques.float8_linear.min_size={dim}",
    "bf16_parameters": "+bf16_parameters techniques.bf16_parameters.rounding=stochastic",
}
"""Technique -> the change that adds it to a plan of so many features."""
KNOBS = {"float8_linear": ("recipe",), "bf16_parameters": ("rounding",)}
"""Technique -> the knobs of which its rounding depends; a receipt holds for their values."""
TAIL = 4
"""A pair is compared over its last steps, one in so many of all."""
PLANTED: tuple[tuple[str, float], ...] = (
    *(("bits", 3), ("bits", 2), ("bits", 1)),
    *(("relative", 0.05), ("relative", 0.3), ("relative", 1.0)),
    *(("noise", 0.05), ("noise", 0.2)),
    *(("drop", 0.02), ("drop", 0.1), ("drop", 0.3)),
)
"""Kind and size of each planted error; e4m3 has 3 bits."""
PLANTED_PLAN = (
    "model.dim=64 model.layers=2 model.heads=2 model.ffn=128 model.precision=fp32 device=cpu "
    "data.sequence_length=64 data.vocab=1024 batch.tokens=512 optimizer.lr=2e-3 "
    "schedule.warmup_steps=20"
)
JUDGED = (BRIEF_STEPS, LEAST_STEPS, WANTED_STEPS)
"""Steps after which the judge is asked about a planted error."""
READY_S = 60.0
"""Seconds to allow for building and compiling a plan."""


def plan_of(shape: str, seed: int, words: str, args: argparse.Namespace) -> Plan:
    """Return a shape's plan with a seed and changes."""
    known = catalogue()
    plan = Plan.read(receipts.plan_file(shape).read_text(), known)
    dropped = [
        f"-{name}" for name in CHANGES if name in plan.techniques and f"+{name}" not in words
    ]
    data = [f"data.directory={args.folder / 'data'}"]
    if args.data:
        data.append(f"data.sources={json.dumps([str(path) for path in args.data])}")
    goal = [f"goal.steps={args.steps}", f"seed={seed}"]
    added = words.format(dim=plan.model.dim).split()
    added = [word for word in added if word[:1] != "+" or word[1:] not in plan.techniques]
    return changed(plan, [*dropped, *BASE.split(), *data, *goal, *args.set, *added], known)


def measure(args: argparse.Namespace) -> None:
    """Train pairs, one seed of all shapes and techniques after the other, until time is up."""
    ends_s = time.monotonic() + 60 * args.minutes
    args.folder.mkdir(parents=True, exist_ok=True)
    for shape in args.shapes:
        prepare(plan_of(shape, 0, "", args))
    taken = [(s, shape, name) for s in args.seeds for shape in args.shapes for name in args.only]
    with Worker(here=args.here, log=args.folder / "worker.log") as worker:
        for seed, shape, name in taken:
            first, second = (plan_of(shape, seed, w, args) for w in ("", CHANGES[name]))
            trained = [
                kept_losses(
                    plan,
                    args.steps,
                    args.folder / f"trainings-{plan.name}.jsonl",
                    worker,
                    left_s=ends_s - time.monotonic(),
                    needed_s=READY_S,
                )
                for plan in (first, second)
            ]
            why = next((why for _, why in trained if why), "")
            if why:
                print(f"left: {shape} seed {seed} {name}: {why}", flush=True)
                continue
            write_pair(args, shape, seed, name, (first, second), [t[0] for t in trained])


def write_pair(
    args: argparse.Namespace,
    shape: str,
    seed: int,
    name: str,
    plans: tuple[Plan, Plan],
    losses: list[list[float]],
) -> None:
    """Write the row of a pair, and print it."""
    tail = max(BATCHES, len(losses[0]) // TAIL)
    apart = [b - a for a, b in zip(*(side[-tail:] for side in losses), strict=True)]
    test = no_worse(apart, NATS, batches=BATCHES)
    technique: Any = plans[1].techniques[name]
    metrics = {
        "nats": {
            "value": test.mean,
            "low": test.mean - test.half,
            "high": test.mean + test.half,
            "unit": "nats",
        }
    }
    facts = {
        "technique": name,
        "knobs": {knob: getattr(technique, knob) for knob in KNOBS[name]},
        "precision": make_context(plans[1], choose_device(plans[1])).precision,
        "dim": plans[1].model.dim,
        "shape": shape,
        "seeds": [seed],
        "steps": args.steps,
        "tail": tail,
        "loss": fmean(losses[0][-tail:]),
        "baseline_sha256": fingerprint(plans[0]),
        "plan_sha256": fingerprint(plans[1]),
        "n": 1,
    }
    receipts.append(TOPIC, metrics, results=args.results, **facts)
    print(f"{shape} seed {seed} {name}: {test.mean:+.4f} +- {test.half:.4f} nats", flush=True)


# --- planted errors --------------------------------------------------------------------------


class RoundedMatmul(torch.autograd.Function):
    """Multiply as a linear whose operands keep few bits of mantissas, and gradients one less."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bits: int) -> Tensor:  # type: ignore[override]
        """Multiply what is left of both."""
        x, weight = rounded(x, bits), rounded(weight, bits)
        ctx.save_for_backward(x, weight)
        ctx.bits = bits
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """Multiply the rounded gradient by what was left of both."""
        x, weight = ctx.saved_tensors
        grad = rounded(grad, max(1, ctx.bits - 1))
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


def rounded(x: Tensor, bits: int) -> Tensor:
    """Return numbers rounded to so many bits behind the first of their mantissas."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)


def plant(build: Build, kind: str, size: float) -> None:
    """Put an error into each step of a build.

    Args:
        build: it is ready to train.
        kind: "bits": blocks' linears keep so many bits; "relative": each number of a gradient gets
            noise of that share of itself; "noise": all get alike noise, of that share of the norm;
            "drop": that share of a gradient's numbers is 0, always the same.
        size: how large.
    """
    draw = torch.Generator().manual_seed(7)
    if kind == "bits":
        for name, module in build.model.named_modules():
            if isinstance(module, nn.Linear) and name.startswith("blocks."):
                multiply: Any = partial(_multiply, module, int(size))
                module.forward = multiply
        return
    for parameter in build.model.parameters():
        if kind == "relative":
            parameter.register_hook(partial(_relative, size, draw))
        elif kind == "noise":
            parameter.register_hook(partial(_noisy, size, draw))
        else:
            keep = (torch.rand(parameter.shape, generator=draw) > size).float()
            parameter.register_hook(keep.mul)


def _multiply(module: nn.Linear, bits: int, x: Tensor) -> Tensor:
    return RoundedMatmul.apply(x, module.weight, bits)


def _relative(share: float, draw: torch.Generator, grad: Tensor) -> Tensor:
    return grad * (1 + share * torch.randn(grad.shape, generator=draw))


def _noisy(share: float, draw: torch.Generator, grad: Tensor) -> Tensor:
    spread = share * grad.norm() / grad.numel() ** 0.5
    return grad + spread * torch.randn(grad.shape, generator=draw)


class Planted:
    """Hold a build with an error in each step, which begins as the tuner's pairs do.

    Args:
        stack: closes it.
        plan: without the error.
        kind: of the error, or "" for none.
        size: how large it is.
        step_s: the seconds that a step is said to take.
    """

    def __init__(
        self, stack: ExitStack, plan: Plan, kind: str = "", size: float = 0.0, step_s: float = 1.0
    ) -> None:
        limits: dict[str, float] = dict.fromkeys((MEAN, ALL, ""), 1.0)  # a guard's are left out
        self.reading, self.step_s = Reading([step_s] * 4, limits=limits), step_s
        self.build, self.micros = stack.enter_context(opened(plan, text=True))
        if kind:
            plant(self.build, kind, size)
        rate = self.build.values["lr"]
        self.build.values["lr"] = lambda index: 0.0 if index < SAME else rate(index - SAME)

    def run(self, blocks: int, steps: int) -> None:
        """Time nothing: it is no faster than without the error."""

    def train_to(self, steps: int) -> None:
        """Train until there were so many steps in all."""
        for index in range(len(self.reading.losses), steps):
            inspect = inspects(self.reading.firsts.append) if index < SAME else None
            numbers = train.step(self.build, self.micros(index), index, inspect)
            self.reading.losses.append(float(numbers[0]))
            self.reading.norms.append(float(numbers[1]))

    def take_over(self, other: "Planted") -> None:
        """Go on from another's state."""
        take_over(self.build, other.build)

    def loss_with(self, other: "Planted") -> float:
        """Return the next batch's loss with another's weights, by a step that is taken back."""
        index = len(self.reading.losses)
        return loss_with(self.build, other.build, self.micros(index), index)


def planted_reading(plan: Plan, kind: str, size: float, steps: int) -> Reading:
    """Return a training with an error in each step."""
    with ExitStack() as stack:
        planted = Planted(stack, of_length(plan, steps), kind, size)
        planted.train_to(steps)
    return planted.reading


def judged_in_stretches(
    plan: Plan, kind: str, size: float, steps: int
) -> tuple[str, dict[str, float]]:
    """Return the judge's verdict on an error by stretches, with what it adds and its lag in nats.

    It is asked as of a change that halves a step, and trains on for so many steps at most.
    """
    worth = WorthMoreSteps("approximate", Rules(rounding="operands"))
    with ExitStack() as stack:
        one = Planted(stack, of_length(plan, steps))
        two = Planted(stack, of_length(plan, steps), kind, size, step_s=0.5)
        two.reading.beside, two.reading.shares_state = one.reading, True
        for side in (one, two):
            side.train_to(2 * SAME)
        pair_s, losses = one.step_s + two.step_s, two.reading.losses
        asked = SampleSize(worth=worth)
        train_on(one, two, asked, lambda: pair_s * (steps - len(losses)), pair_s * steps)
    if not (lags := two.reading.lags):
        return "not asked", {}
    taken = len(two.reading.losses)
    sides = (r.losses[taken - STRETCH * len(lags) : taken] for r in (one.reading, two.reading))
    verdict = equality(one.reading, two.reading, "approximate", "operands").verdict
    added = fmean(b - a for a, b in zip(*sides, strict=True))
    return verdict, {"added": added, "lag": fmean(lags)}


def verdict_after(steps: int, one: Reading, two: Reading) -> str:
    """Return what the tuner's judge says of two trainings of which it sees so many steps."""
    first, second = (replace(r, losses=r.losses[:steps], norms=r.norms[:steps]) for r in (one, two))
    return equality(first, second, "approximate", "operands").verdict


def judge_planted(args: argparse.Namespace) -> None:
    """Write a row for each planted error: the judge's verdicts on few steps, and the nats lost."""
    known = catalogue()
    words = [*PLANTED_PLAN.split(), f"data.directory={args.folder / 'data'}", *args.set]
    for seed in args.seeds:
        text = receipts.plan_file("tiny").read_text()
        plan = changed(Plan.read(text, known), [*words, f"seed={seed}"], known)
        base = planted_reading(plan, "", 0.0, args.steps)
        for kind, size in PLANTED:
            second = planted_reading(plan, kind, size, args.steps)
            tail = args.steps // TAIL
            nats = fmean(second.losses[-tail:]) - fmean(base.losses[-tail:])
            verdicts = {str(n): verdict_after(n, base, second) for n in JUDGED}
            verdicts["stretches"], nats_of = judged_in_stretches(plan, kind, size, args.steps)
            noise = added_noise(base, second)
            facts = {"kind": "planted", "planted": kind, "size": size, "seeds": [seed], "n": 1}
            facts |= {"steps": args.steps, "verdicts": verdicts, "added_noise": noise}
            nats_of["nats"] = nats
            metrics = {name: receipts.spread([own], "nats") for name, own in nats_of.items()}
            receipts.append(TOPIC, metrics, results=args.results, **facts)
            print(f"seed {seed} {kind} {size:g}: {nats:+.4f} nats, {verdicts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "planted"))
    parser.add_argument("--shapes", nargs="+", default=["160m", "330m"])
    parser.add_argument("--only", nargs="+", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=LOSER_STEPS)
    parser.add_argument("--data", nargs="+", type=Path, help="text; the plans' own without it")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing begins later")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "equal-learning")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="changes of every plan, in words")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    {"measure": measure, "planted": judge_planted}[args.what](args)


if __name__ == "__main__":
    main()
