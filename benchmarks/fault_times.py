"""Faults that take time: of the loader, the host, the compiler, the products, and the ranks.

Time is scaled to the step of a healthy run; on a GPU the host first uses up the lead that it has.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from fault_hooks import Case, Facts, after_blocks, before_steps, built, patched
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.data.loader import Loader, Micro, StepBatch
from headrace.model.decoder import Block
from headrace.parallel.world import World
from headrace.sockets import Build

CLOCKED = 100
"""Tiny operations by which one is timed."""
STALLED = 5
"""Of so many steps a loader that stalls does it in one."""


# --- the loader ------------------------------------------------------------------------------


def _sleeping(seconds: Callable[[int], float]) -> AbstractContextManager[None]:
    """The loader sleeps before its n-th batch."""
    count = 0

    def make(step: Any) -> Any:
        def slept(loader: Loader, *given: Any) -> StepBatch:
            nonlocal count
            time.sleep(seconds(count))
            count += 1
            return step(loader, *given)

        return slept

    return patched(Loader, "step", make)


@contextmanager
def slow_loader(case: Case) -> Iterator[Facts]:
    """The loader sleeps."""
    sleep_s = case.lead_s + case.extra_s
    with _sleeping(lambda n: sleep_s):
        yield {"sleep_s": sleep_s}


@contextmanager
def stalling_loader(case: Case) -> Iterator[Facts]:
    """The loader sleeps now and then, and so much longer."""
    sleep_s = STALLED * case.extra_s + case.lead_s
    with _sleeping(lambda n: sleep_s if n % STALLED == STALLED - 1 else 0.0):
        yield {"sleep_s": sleep_s, "every": STALLED}


# --- the host --------------------------------------------------------------------------------


@contextmanager
def _many(case: Case, spend_s: float, act: Callable[[Tensor], Any]) -> Iterator[Facts]:
    """After each block `act` so often that a step's calls take `spend_s`."""
    do, facts = _spending(act, spend_s / case.block_calls())
    with after_blocks(do):
        yield facts


def _spending(
    act: Callable[[Tensor], Any], spend_s: float
) -> tuple[Callable[[Tensor], None], Facts]:
    """A function that acts so often that it takes `spend_s`; one act is timed at the first call."""
    facts: Facts = {}

    def do(out: Tensor) -> None:
        if not facts:
            facts["unit_s"] = unit_s = _timed(act, out)
            facts["times"] = max(1, round(spend_s / unit_s))
        for _ in range(facts["times"]):
            act(out)

    return do, facts


def _timed(act: Callable[[Tensor], Any], out: Tensor) -> float:
    """Seconds of one `act`, on a device that has nothing else to do."""
    wait = torch.cuda.synchronize if out.is_cuda else lambda: None
    act(out)
    wait()
    begin = time.perf_counter()
    for _ in range(CLOCKED):
        act(out)
    wait()
    return (time.perf_counter() - begin) / CLOCKED


def tiny(out: Tensor) -> Tensor:
    """An operation on one token, of which nobody reads the result."""
    return out.detach()[0, :1] + 1.0


def tiny_kernels(case: Case) -> AbstractContextManager[Facts]:
    """Many kernels that do next to nothing."""
    return _many(case, case.lead_s + case.extra_s, tiny)


def items(case: Case) -> AbstractContextManager[Facts]:
    """Numbers read from the device in the middle of a step."""
    return _many(case, case.extra_s, lambda out: out.detach()[0, 0, 0].item())


# --- the compiler ----------------------------------------------------------------------------


@contextmanager
def new_lengths(case: Case) -> Iterator[Facts]:
    """Rows cut to another length every few steps: as many tokens, another shape."""
    shapes = {0.1: 3, 0.2: 4}.get(case.severity, 6)
    every = max(2, ((case.plan().goal.steps or 0) - 4) // shapes)
    factors = (2, 4, 8, 16, 32, 0.5)

    def cut(tensor: Tensor | None, factor: float) -> Tensor | None:
        return None if tensor is None else tensor.reshape(-1, int(tensor.size(1) / factor))

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        turn = index // every
        factor = factors[(turn - 1) % len(factors)] if 0 < turn <= shapes else 1
        if factor == 1:
            return micros
        names = ("ids_BT", "targets_BT", "segments_BT", "positions_BT")
        return [replace(m, **{n: cut(getattr(m, n), factor) for n in names}) for m in micros]

    with before_steps(change):
        yield {"shapes": shapes}


@contextmanager
def graph_breaks(case: Case) -> Iterator[Facts]:
    """Before and behind each block stands what the compiler may not see, operation by operation."""
    do, facts = _spending(tiny, (case.lead_s + case.extra_s) / case.block_calls() / 2)

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

    with patched(Block, "forward", make):
        yield facts


# --- products --------------------------------------------------------------------------------


@contextmanager
def wide_products(case: Case) -> Iterator[Facts]:
    """Some blocks multiply in a wider dtype: on a GPU their MLPs in fp32, on a CPU all in fp64.

    So wide is a constant of numpy's that came into a model whose plan says bf16 or fp32.
    """
    facts: Facts = {}

    def widen(build: Build) -> None:
        blocks = list(build.model.blocks.values())
        if build.device.type == "cuda":
            count = max(1, round(len(blocks) * case.extra_s / case.step_s / 4))
        else:
            count = math.ceil(len(blocks) * {0.1: 0.3, 0.2: 0.6}.get(case.severity, 1.0))
        facts["blocks"] = count
        for block in blocks[:count]:
            part: Any = block.mlp if build.device.type == "cuda" else block
            part.forward = _wide(part.forward)

    with built(widen):
        yield facts


class Doubled(TorchFunctionMode):
    """Products are computed in fp64 and give what they were given."""

    NAMES = ("linear", "matmul", "mm", "bmm", "__matmul__", "_grouped_mm", "grouped_mm")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any function of torch's."""
        if getattr(func, "__name__", "") not in self.NAMES:
            return func(*args, **(kwargs or {}))
        wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        return func(*wide, **(kwargs or {})).to(args[0].dtype)


def _wide(forward: Any) -> Any:
    """A forward pass in a dtype that is wider than the plan's; weights are fp32 already."""

    def wide(x_BTD: Tensor, *given: Any) -> Tensor:
        if not x_BTD.is_cuda:
            with Doubled():
                return forward(x_BTD, *given)
        with torch.autocast(x_BTD.device.type, enabled=False):
            return forward(x_BTD.float(), *given).to(x_BTD.dtype)

    return wide


# --- ranks -----------------------------------------------------------------------------------


def _slow_rank(case: Case, who: Callable[[int], int]) -> AbstractContextManager[None]:
    """In step n rank `who(n)` sleeps between its blocks."""
    sleep_s, now = case.extra_s / case.block_calls(), [0]
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
    """The last rank works more slowly than the others."""
    with _slow_rank(case, lambda step: case.ranks - 1):
        yield {"sleep_s": case.extra_s}


@contextmanager
def changing_straggler(case: Case) -> Iterator[Facts]:
    """In each step another rank works more slowly."""
    with _slow_rank(case, lambda step: step % case.ranks):
        yield {"sleep_s": case.extra_s}


@contextmanager
def slow_collective(case: Case) -> Iterator[Facts]:
    """Every sum of gradients takes longer, on every rank."""

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
    """Gradients are summed in many small pieces behind the backward pass: nothing hides them.

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
