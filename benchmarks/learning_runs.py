"""Train to a target on a clock that runs for training alone: what `learning.py` measures with.

A run takes the plan's own step, as `headrace train` does, without what a run's folder costs. The
clock stands still while torch compiles and while the model is evaluated. The target is looked at
every fortieth of the horizon from its half on, less often where the loss is far above it; the first
look that reaches it ends the run. A plan without a target is looked at as often, and trained to its
horizon.

Runs of one architecture and shape share what was compiled in this process: `torch_compile` begins
each build with a reset of the compiler, which is left out here. A few steps stand before the first
of them, and some of every other size of a step that its schedules come to, so that no run pays for
what the device does once. CUDA graphs hold the addresses of one build: there they stand before each
run, and what is recorded is off the clock like what is compiled. Then the run's state is again what
it was, and it begins.
"""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import receipts
import torch

from headrace.assemble.build import make_build
from headrace.assemble.context import check_supported, choose_device, make_context
from headrace.assemble.kept_states import KeptStates, live
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.core.progress import Progress
from headrace.data.ingest import prepare
from headrace.observe.compile_time import compile_seconds
from headrace.optim import compiled
from headrace.parallel.world import open_world
from headrace.plan.plan import Plan
from headrace.techniques.compile.cuda_graphs import counts
from headrace.train.evaluate import evaluate
from headrace.train.train import prepare_together, step

LOOKS = 40
"""Parts of the horizon at whose ends the target is looked at."""
FIRST_LOOK = 20
"""The first of these looks: a rate that still stands high reaches no target before."""
THROWAWAY_STEPS = 3
"""Steps of each size that stand before the first run of a shape: a graph is compiled in its first
step and recorded in the next."""
RECORDED = "cuda_graphs"
ENTRIES = 64
"""Graphs of one function that the compiler keeps: of each shape, of all its sizes of a step."""
MOST_SHAPES = 6
"""Shapes whose graphs are kept side by side: one has up to eight of a function."""
FASTEST = 0.04
"""Bits per byte that a loss may fall by from one look to the next: as long as it is further above
the target, looks are left out, which would cost more than the steps between them."""
_shared_graph = cache(compiled._own_graph)
OUTSIDE = ("optim", "schedule", "stability")
"""Rooms whose techniques leave the model's compiled graphs as they are."""
DECAY = "warmup_stable_decay"


@dataclass(frozen=True)
class Point:
    """Hold what the search turns: where a side stands in it.

    Args:
        factor: all learning rates of the side's plan are multiplied by it.
        rows: sequences of a batch.
        epochs: the schedule's horizon, in passes over the training text.
        decay: last share of the horizon in which the rate falls evenly; 0 is a cosine.
        final: share of the rate that is left at the horizon.
    """

    factor: float
    rows: int
    epochs: float
    decay: float
    final: float = 0.0


@dataclass(frozen=True)
class Side:
    """Hold one side of the comparison.

    Args:
        plan: file of its plan under plans/.
        start: where its search begins: its best known point.
        warmup: share of the horizon in which the rate rises.
    """

    plan: str
    start: Point
    warmup: float


SIDES = {
    "adamw": Side("learning_adamw", Point(0.71, 32, 2.4, 0.0), 0.04),
    "ours": Side("learning", Point(1.0, 32, 0.55, 0.8, 0.1), 0.02),
}
"""Side -> its plan and its start: for AdamW the best of its search on an H100."""


@dataclass(frozen=True)
class Reading:
    """Hold what one run gave.

    Args:
        seconds: on the clock, until the target or until the run ended without it.
        reached: whether the target was reached.
        bits_per_byte: validation loss of the last look.
        steps: optimizer steps that were taken.
        tokens: tokens that these steps read.
        apart_s: seconds off the clock, of compiling and evaluating.
        curve: (tokens, bits per byte) of each look.
        plan: the whole plan, as data.
        techniques: names of its techniques.
    """

    seconds: float
    reached: bool
    bits_per_byte: float
    steps: int
    tokens: int
    apart_s: float
    curve: list[tuple[int, float]]
    plan: dict[str, Any] = field(repr=False)
    techniques: list[str]

    @property
    def to_target(self) -> float:
        """Return the seconds to the target; infinite where it was not reached."""
        return self.seconds if self.reached else math.inf

    @property
    def fingerprint(self) -> str:
        """Return the plan's fingerprint."""
        return fingerprint(self.plan)


PLACES = ("directory", "sources", "validation")


def fingerprint(plan: dict[str, Any]) -> str:
    """Return the fingerprint of a plan as data, whatever its seed and wherever its files lie."""
    kept = {k: v for k, v in plan.items() if k not in ("directory", "name", "seed")}
    data = {k: v for k, v in plan["data"].items() if k not in PLACES}
    return receipts.sha256({**kept, "data": data})


class Runs:
    """Train plans of both sides on one text.

    Args:
        data: folder with `train` and `val`.
        work: where shards are kept.
        overrides: further overrides of every plan.
        without: techniques that no plan has here.
        plans: side -> the file of its plan, where it is another than the side's own.
    """

    def __init__(
        self,
        data: Path,
        work: Path,
        overrides: Sequence[str] = (),
        without: Sequence[str] = (),
        plans: dict[str, Path] | None = None,
    ) -> None:
        self.plans = plans or {}
        self.without = [*without]
        self.overrides = [
            f"data.sources='{data / 'train'}'",
            f"data.validation='{data / 'val'}'",
            f"data.directory='{work / 'data'}'",
            "guard=false",
            *overrides,
        ]
        self._shapes: set[str] = set()
        first = self.plan("ours", SIDES["ours"].start, text_tokens=10**9)
        self.text_tokens = sum(shards.tokens for shards in prepare(first).train)

    def plan(
        self,
        side: str,
        point: Point,
        *,
        seed: int = 0,
        words: Sequence[str] = (),
        text_tokens: int | None = None,
    ) -> Plan:
        """Return the plan of a side at a point, with changes: `+name`, `-name`, `key=value`.

        Raises:
            ConfigError: the changes do not fit the plan.
        """
        text = self.plans.get(side, receipts.plan_file(SIDES[side].plan)).read_text()
        known, off = catalogue(), [w[1:] for w in words if w[0] == "-"]
        plain = Plan.read(text, known, overrides=[*self.overrides, "goal.steps=1000000"])
        length = plain.data.sequence_length
        tokens = point.epochs * (text_tokens or self.text_tokens)
        steps = max(2, round(tokens / point.rows / length))
        rates = {"optimizer.lr": plain.optimizer.lr}
        for name, technique in plain.techniques.items():
            if "routes" in technique.composes and name not in off:
                rates[f"techniques.{name}.lr"] = technique.model_dump()["lr"]
        own = [f"{key}={rate * point.factor:.6g}" for key, rate in rates.items()]
        own += [f"batch.tokens={point.rows * length}", f"seed={seed}"]
        own += [f"goal.tokens={steps * point.rows * length}"]
        with_, without = [w[1:] for w in words if w[0] == "+"], [*self.without, *off]
        if "warmup" not in without:
            own.append(f"techniques.warmup.steps={max(1, round(SIDES[side].warmup * steps))}")
        if not point.decay or DECAY in without:
            without.append(DECAY)
            # Of a cosine, where nothing else is asked for.
            key = "techniques.cosine" if "cosine" in with_ else "schedule"
            own.append(f"{key}.final_fraction={point.final:g}")
        else:
            with_.append(DECAY)
            own += [f"techniques.{DECAY}.decay_fraction={point.decay:g}"]
            own += [f"techniques.{DECAY}.final_fraction={point.final:g}"]
        muon = plain.techniques.get("muon")  # whose warmup may be longer than a short horizon
        if muon is not None and "muon" not in off:
            warm = muon.model_dump()["momentum_warmup_steps"]
            own.append(f"techniques.muon.momentum_warmup_steps={min(warm, steps)}")
        more = [w for w in words if w[0] not in "+-"]
        overrides = [*self.overrides, *own, *more]
        return Plan.read(text, known, overrides=overrides, with_=with_, without=without)

    def run(
        self, plan: Plan, *, limit_s: float = math.inf, first_look: int = FIRST_LOOK
    ) -> Reading:
        """Train a plan until its target, its horizon or `limit_s` on the clock.

        The first look is at the end of that part of the horizon, of LOOKS parts.
        """
        shape = _shape(plan)
        if shape not in self._shapes and len(self._shapes) == MOST_SHAPES:
            torch.compiler.reset()
            self._shapes.clear()
        with _one_compiler(), _opened(plan) as build:
            if shape not in self._shapes or RECORDED in plan.techniques:
                _warm_up(plan, build)
            self._shapes.add(shape)
            return _trained(plan, build, limit_s, first_look)


def _warm_up(plan: Plan, build: Build) -> None:
    """Take steps of every size, and evaluate; then the state is again what it was."""
    kept = KeptStates(1, "")
    kept.take(build, 0, 0)
    before = {name for name, _ in live(build) if name.startswith("technique/")}
    recorded = _recorded(build)
    with torch.random.fork_rng([build.device] if build.device.type == "cuda" else []):
        for index in _thrown_away(plan, build):
            for _ in range(THROWAWAY_STEPS):
                step(build, build.loader.step(index).micros, index)
        evaluate(build, plan.eval.tokens)
    kept.restore(build, kept.states[0])
    if left := {name for name, _ in live(build) if name.startswith("technique/")} - before:
        raise HeadraceError(f"a state came up in the warm-up: {', '.join(sorted(left))}")
    if RECORDED in plan.techniques and _recorded(build) == recorded:
        raise HeadraceError(f"{RECORDED} has recorded nothing")


def _recorded(build: Build) -> int:
    """Return the CUDA graphs that inductor has recorded in this process."""
    if build.device.type != "cuda":
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    return counts(get_manager(torch.cuda.current_device(), create_if_none_exists=False))[2]


def _thrown_away(plan: Plan, build: Build) -> list[int]:
    """Return the steps to warm up with: the first, and each that is cut otherwise than before.

    Schedules cut a step: into other rows, or into another number of them.
    """
    assert plan.goal_steps is not None
    length = build.values.get("sequence_length", lambda index: 0.0)
    cuts = [(plan.batches.at(index), length(index)) for index in range(plan.goal_steps)]
    return [index for index, own in enumerate(cuts) if not index or own != cuts[index - 1]]


def _trained(plan: Plan, build: Build, limit_s: float, first_look: int) -> Reading:
    """Train on the clock."""
    horizon, target = plan.goal_steps, plan.goal.bits_per_byte or 0.0
    assert horizon is not None
    curve, tokens, seconds, apart_s, loss = list[tuple[int, float]](), 0, 0.0, 0.0, math.inf
    steps, look = 0, first_look
    began, compiled = _now(build), compile_seconds()
    for index in range(horizon):
        step(build, build.loader.step(index).micros, index)
        steps, tokens = index + 1, tokens + plan.batches.at(index)
        if steps < math.ceil(horizon * look / LOOKS):
            continue
        stopped = _now(build)
        own_s = compile_seconds() - compiled
        seconds += stopped - began - own_s
        loss = evaluate(build, plan.eval.tokens).bits_per_byte
        curve.append((tokens, round(loss, 5)))
        began, compiled = _now(build), compile_seconds()
        apart_s += began - stopped + own_s
        if loss <= target or not math.isfinite(loss) or seconds > limit_s:
            break
        look = min(LOOKS, look + 1 + (int((loss - target) / FASTEST) if target else 0))
    return Reading(
        seconds,
        loss <= target,
        loss,
        steps,
        tokens,
        apart_s,
        curve,
        plan.dump(),
        sorted(plan.techniques),
    )


@contextmanager
def _opened(plan: Plan) -> Iterator[Build]:
    """Make the build of a plan, and drop it in the end."""
    device = choose_device(plan)
    with ExitStack() as stack:
        world = stack.enter_context(open_world(plan.mesh, device))
        checked = check_supported(list(plan.techniques.values()), make_context(plan, device))
        prepared = prepare_together(plan, world, Progress())
        torch.manual_seed(plan.seed)
        build = make_build(plan, prepared, world, device, checked=checked)
        stack.callback(gc.collect)
        stack.callback(build.loader.close)
        for flags in build.runtime:
            stack.enter_context(flags())
        yield build


@contextmanager
def _one_compiler() -> Iterator[None]:
    """Keep what was compiled: a build's resets of the compiler do nothing inside.

    Optimizers share their compiled updates. Torch's guards still decide whether a graph fits what
    it is called with, and what was recorded with other addresses is recorded anew.
    """
    own_graph, compiled._own_graph = compiled._own_graph, _shared_graph
    reset, torch.compiler.reset = torch.compiler.reset, lambda: None
    trees: Any = None
    if torch.cuda.is_available():
        from torch._inductor import cudagraph_trees as trees

        forget, trees.reset_cudagraph_trees = trees.reset_cudagraph_trees, lambda: None
    limits = {"recompile_limit": ENTRIES, "accumulated_recompile_limit": 8 * ENTRIES}
    try:
        with torch._dynamo.config.patch(limits):
            yield
    finally:
        torch.compiler.reset, compiled._own_graph = reset, own_graph
        if trees is not None:
            trees.reset_cudagraph_trees = forget


def _shape(plan: Plan) -> str:
    """Return what makes torch compile the model anew: its keys, its rows, and techniques of it."""
    knobs = {
        name: technique.model_dump(mode="json")
        for name, technique in plan.techniques.items()
        if technique.room not in OUTSIDE or "recut" in technique.composes
    }
    sizes = [plan.rows_per_step, plan.batch.micro_sequences, plan.data.sequence_length]
    return receipts.sha256([plan.model.model_dump(mode="json"), sizes, knobs])


def _now(build: Build) -> float:
    """Return the time in seconds once the device has done what it was given."""
    if build.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
