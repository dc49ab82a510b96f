"""Make faults that take time: of the loader, the host, the compiler, and the ranks.

Time is scaled to the step of a healthy run. What a GPU's step needs of a fault is found on the
device, in the run's second step, as fault_doses.py describes.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Any

import torch
from fault_doses import Dose
from fault_hooks import MARGIN, Case, Facts, after_blocks, before_steps, patched
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.data.loader import Loader, Micro, StepBatch
from headrace.model.decoder import Block
from headrace.parallel.world import World

STALLED = 5
"""A stalling loader stalls once in this many steps."""
REACHABLE = 0.8
"""Part of the largest share of a step for which ranks can wait for one stage that a fault wants."""
NOTES = {f"blocks.{n}.mean": n / 7 for n in range(48)}
"""Values that a hook in Python keeps beside each small operation."""
NUMBERS = count(2)
"""Numbers for a compiled function; none comes twice, since it would not be compiled again."""
RECOMPILED_AT = (0.1, 0.17, 0.25, 0.7, 0.8, 0.92)
"""Shares of a GPU's run at which something recompiles: before its trace is recorded and after."""


# --- the loader ------------------------------------------------------------------------------


def _sleeping(seconds: Callable[[int], float]) -> AbstractContextManager[None]:
    """Let the loader sleep before its n-th batch."""
    number = 0

    def make(step: Any) -> Any:
        def slept(loader: Loader, *given: Any) -> StepBatch:
            nonlocal number
            time.sleep(seconds(number))
            number += 1
            return step(loader, *given)

        return slept

    return patched(Loader, "step", make)


@contextmanager
def slow_loader(case: Case) -> Iterator[Facts]:
    """Let the loader sleep before each batch."""
    dose = Dose(case)
    with _sleeping(lambda n: dose.seconds), dose.calibrated(time.sleep):
        yield dose.facts
        dose.facts["sleep_s"] = dose.seconds


@contextmanager
def stalling_loader(case: Case) -> Iterator[Facts]:
    """Let the loader sleep in a few steps, and longer."""
    dose = Dose(case)

    def seconds(n: int) -> float:
        return STALLED * case.extra_s + dose.lead_s if n % STALLED == STALLED - 1 else 0.0

    with _sleeping(seconds), dose.led():
        yield dose.facts
        dose.facts |= {"sleep_s": seconds(STALLED - 1), "every": STALLED}


# --- the host --------------------------------------------------------------------------------


def tiny(out: Tensor) -> Tensor:
    """Run an operation on one token whose result nobody reads."""
    return out.detach()[0, :1] + 1.0


def gathered(out: Tensor) -> None:
    """Run that operation with a hook in Python that records what it keeps."""
    tiny(out)
    json.dumps(NOTES)


def _small(dose: Dose) -> Callable[[Tensor], Any]:
    """Return the operation to repeat; a longer one on a GPU, so that traces stay small."""
    return gathered if dose.on_gpu else tiny


@contextmanager
def tiny_kernels(case: Case) -> Iterator[Facts]:
    """Launch many kernels that do next to nothing."""
    dose = Dose(case)
    with after_blocks(dose.spending(_small(dose))), dose.calibrated():
        yield dose.facts


@contextmanager
def items(case: Case) -> Iterator[Facts]:
    """Read numbers from the device in the middle of a step, so that the host waits for each."""
    dose = Dose(case)
    with after_blocks(dose.spending(lambda out: out.detach()[0, 0, 0].item())), dose.calibrated():
        yield dose.facts


# --- the compiler ----------------------------------------------------------------------------


def recompilation(case: Case) -> AbstractContextManager[Facts]:
    """Compile something in every few steps: the model on a CPU, a function beside it on a GPU.

    A GPU's model takes seconds to compile, which is more than the share that is wanted of a run of
    seconds.
    """
    return new_numbers(case) if case.plan().device == "cuda" else new_lengths(case)


@contextmanager
def new_lengths(case: Case) -> Iterator[Facts]:
    """Cut sequences to another length every few steps; the number of tokens stays the same."""
    shapes = {0.1: 3, 0.2: 4}.get(case.severity, 6)
    every = max(2, ((case.plan().goal.steps or 0) - 4) // shapes)
    factors = (2, 4, 8, 16, 32, 0.5)

    def cut(tensor: Tensor | None, factor: float) -> Tensor | None:
        return None if tensor is None else tensor.reshape(-1, int(tensor.size(1) / factor))

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        place = index // every
        factor = factors[(place - 1) % len(factors)] if 0 < place <= shapes else 1
        if factor == 1:
            return micros
        names = ("ids_BT", "targets_BT", "segments_BT", "positions_BT")
        return [replace(m, **{n: cut(getattr(m, n), factor) for n in names}) for m in micros]

    with before_steps(change):
        yield {"shapes": shapes}


@contextmanager
def new_numbers(case: Case) -> Iterator[Facts]:
    """Give a compiled function a number in Python that changes, so that it is compiled for each.

    It is called in a few steps only, with so many new numbers that these steps take what the
    severity wants of all. torch would stop after eight, unless its limit is raised as it is here.
    """
    steps = case.plan().goal.steps or 0
    numbers = sorted({max(2, round(share * steps)) for share in RECOMPILED_AT})
    dose = Dose(case)
    scaled: Any = torch.compile(lambda x, n: (x * n).mean(), backend="eager", dynamic=False)

    def one_s(x: Tensor) -> float:
        began_s = time.perf_counter()
        scaled(x, next(NUMBERS))
        return time.perf_counter() - began_s

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        x = torch.ones(8, device=build.device)
        if index == 0:
            dose.facts["unit_s"] = median([one_s(x) for _ in range(5)])
        if index in numbers:
            spend_s = case.extra_s * (steps - 2) / len(numbers) + dose.lead_s
            for _ in range(times := max(1, round(spend_s / dose.facts["unit_s"]))):
                one_s(x)
            dose.facts |= {"steps": numbers, "times": times}
        return micros

    config: Any = torch._dynamo.config
    more = config.patch(recompile_limit=10**6, accumulated_recompile_limit=10**6)
    with more, dose.led(), before_steps(change):
        yield dose.facts


@contextmanager
def graph_breaks(case: Case) -> Iterator[Facts]:
    """Put an operation that the compiler may not see before and behind each block."""
    dose = Dose(case)
    do = dose.spending(_small(dose), calls=2 * case.block_calls())

    def eager(x_BTD: Tensor) -> None:
        if torch.is_grad_enabled():
            do(x_BTD)

    unseen: Any = torch.compiler.disable(eager)

    def make(forward: Any) -> Any:
        def broken(block: Any, x_BTD: Tensor, shared: Any) -> Tensor:
            unseen(x_BTD)
            x_BTD = forward(block, x_BTD, shared)
            unseen(x_BTD)
            return x_BTD

        return broken

    with patched(Block, "forward", make), dose.calibrated():
        yield dose.facts


# --- ranks -----------------------------------------------------------------------------------


def _slow_rank(
    case: Case, who: Callable[[int], int], block_s: float = 0.0
) -> AbstractContextManager[None]:
    """Let rank `who(n)` sleep after each of its blocks in step n, `block_s` or as `case` says."""
    sleep_s, now = block_s or case.extra_s / case.block_calls(), [0]
    mine = torch.distributed.get_rank if case.ranks > 1 else lambda: -1

    @contextmanager
    def slow() -> Iterator[None]:
        def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
            now[0] = index
            return micros

        with (
            before_steps(change),
            after_blocks(lambda out: time.sleep(sleep_s if mine() == who(now[0]) else 0.0)),
        ):
            yield

    return slow()


@contextmanager
def throttled_rank(case: Case) -> Iterator[Facts]:
    """Let the last rank work more slowly than the others."""
    with _slow_rank(case, lambda step: case.ranks - 1):
        yield {"sleep_s": case.extra_s}


@contextmanager
def changing_straggler(case: Case) -> Iterator[Facts]:
    """Let another rank work more slowly in each step."""
    with _slow_rank(case, lambda step: step % case.ranks):
        yield {"sleep_s": case.extra_s}


@contextmanager
def slow_stage(case: Case) -> Iterator[Facts]:
    """Let the last rank of a pipeline take longer, so that the others wait for the wanted share.

    Of what it takes longer they wait for the part above the mean of all, and in all micro-batches
    but one. Stages of the healthy run are taken for alike.
    """
    plan = case.plan()
    micro_batches, ranks = plan.rows_per_step / plan.micro_rows, plan.mesh.pipeline
    part = (1 - 1 / micro_batches) * (1 - 1 / ranks)
    share = min(MARGIN * case.severity, REACHABLE * part)
    sleep_s = share * case.step_s / (part - share)
    with _slow_rank(case, lambda step: ranks - 1, sleep_s * ranks / case.block_calls()):
        yield {"sleep_s": sleep_s, "share": share}


@contextmanager
def slow_collective(case: Case) -> Iterator[Facts]:
    """Let every sum of gradients take longer on every rank."""

    def make(reduce: Any) -> Any:
        def slept(world: World, tensors: list[Tensor], axis: str = "shard") -> None:
            reduce(world, tensors, axis)
            if axis == "shard":
                time.sleep(case.extra_s)

        return slept

    with patched(World, "sum_gradients_", make):
        yield {"sleep_s": case.extra_s}


@contextmanager
def no_overlap(case: Case) -> Iterator[Facts]:
    """Sum gradients in many small pieces after the backward pass, so that nothing hides them.

    The pieces are summed again, of copies, until that takes as long as the severity wants; how
    often is found in the first steps and is the same on every rank.
    """
    facts: Facts = {"rounds": 1.0}

    def make(reduce: Any) -> Any:
        def pieces(world: World, tensors: list[Tensor], axis: str = "shard") -> None:
            reduce(world, tensors, axis)
            if axis != "shard" or world.ranks == 1:
                return
            begin = time.perf_counter()
            for _ in range(round(facts["rounds"])):
                for tensor in tensors:
                    torch.distributed.all_reduce(tensor.clone(), group=world.group(axis))
            spent = torch.tensor(time.perf_counter() - begin)
            if facts.setdefault("steps", 0) < 4:
                facts["steps"] += 1
                torch.distributed.all_reduce(spent, group=world.group(axis))
                one_s = spent.item() / world.ranks / round(facts["rounds"])
                facts["rounds"] = max(1.0, case.extra_s / one_s)

        return pieces

    with patched(World, "sum_gradients_", make):
        yield facts
