"""Faults that are planted into a run from outside, and the process that trains with one.

A fault is a context manager around `headrace.train.run`: it replaces a function for as long as it
is entered, and the run knows nothing of it. It yields what it did, which the row then tells. Time
is scaled to the step of a healthy run; on a GPU the host first uses up the lead that it has.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fault_hooks import Case, Facts, Fault, after_blocks, before_steps, built, patched
from torch import Tensor

from headrace import train
from headrace.core.errors import HeadraceError
from headrace.core.plan import Plan
from headrace.data.loader import Loader, Micro, StepBatch
from headrace.model.attention import Sdpa
from headrace.model.decoder import Block
from headrace.model.head import IGNORED
from headrace.model.mask import MaskSpec
from headrace.parallel.world import World
from headrace.progress import Progress
from headrace.sockets import Build

FROM_STEP = 44
"""Where faults begin that need healthy steps before them."""
CLOCKED = 100
"""Tiny operations by which one is timed."""
MIB = 2**20


# --- time ------------------------------------------------------------------------------------


@contextmanager
def _plan_alone(case: Case) -> Iterator[Facts]:
    """The plan says it all."""
    yield {}


@contextmanager
def _slow_loader(case: Case) -> Iterator[Facts]:
    """The loader sleeps."""
    sleep_s = case.lead_s + case.extra_s

    def make(step: Any) -> Any:
        def slept(loader: Loader, *given: Any) -> StepBatch:
            time.sleep(sleep_s)
            return step(loader, *given)

        return slept

    with patched(Loader, "step", make):
        yield {"sleep_s": sleep_s}


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


def _tiny_kernels(case: Case) -> AbstractContextManager[Facts]:
    """Many kernels that do next to nothing."""
    return _many(case, case.lead_s + case.extra_s, tiny)


def _items(case: Case) -> AbstractContextManager[Facts]:
    """Numbers read from the device in the middle of a step."""
    return _many(case, case.extra_s, lambda out: out.detach()[0, 0, 0].item())


@contextmanager
def _new_lengths(case: Case) -> Iterator[Facts]:
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
def _graph_breaks(case: Case) -> Iterator[Facts]:
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


@contextmanager
def _fp32_products(case: Case) -> Iterator[Facts]:
    """The MLPs of some blocks multiply in fp32."""
    facts: Facts = {}

    def widen(build: Build) -> None:
        blocks = list(build.model.blocks.values())
        facts["blocks"] = count = max(1, round(len(blocks) * case.extra_s / case.step_s / 4))
        for block in blocks[:count]:
            block.mlp.forward = _wide(block.mlp.forward)  # type: ignore[union-attr]

    with built(widen):
        yield facts


def _wide(forward: Any) -> Any:
    def wide(x_BTD: Tensor, *given: Any) -> Tensor:
        with torch.autocast(x_BTD.device.type, enabled=False):
            return forward(x_BTD.float(), *given).to(x_BTD.dtype)

    return wide


@contextmanager
def _throttled_rank(case: Case) -> Iterator[Facts]:
    """The last rank works more slowly than the others."""
    sleep_s = case.extra_s / case.block_calls()
    last = torch.distributed.get_rank if case.ranks > 1 else lambda: -1
    with after_blocks(lambda out: time.sleep(sleep_s if last() == case.ranks - 1 else 0.0)):
        yield {"sleep_s": case.extra_s}


@contextmanager
def _slow_collective(case: Case) -> Iterator[Facts]:
    """Every sum of gradients takes longer, on every rank."""

    def make(reduce: Any) -> Any:
        def slept(world: World, tensors: list[Tensor], axis: str = "shard") -> None:
            reduce(world, tensors, axis)
            if axis == "shard":
                time.sleep(case.extra_s)

        return slept

    with patched(World, "sum_gradients_", make):
        yield {"sleep_s": case.extra_s}


# --- tokens and learning ---------------------------------------------------------------------


@contextmanager
def _padded(case: Case) -> Iterator[Facts]:
    """The end of every row has no target."""

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        padded = []
        for micro in micros:
            targets = micro.targets_BT.clone()
            targets[:, int(targets.size(1) * (1 - case.severity)) :] = IGNORED
            padded.append(replace(micro, targets_BT=targets))
        return padded

    with before_steps(change):
        yield {}


@contextmanager
def _spikes(case: Case) -> Iterator[Facts]:
    """A share of the steps, from FROM_STEP on, learns noise."""
    steps = case.plan().goal.steps or 0
    every = max(2, round(1 / case.severity))
    bad = set(range(FROM_STEP, steps, every))

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        if index not in bad:
            return micros
        draw = torch.Generator().manual_seed(index)
        noise = [torch.randint(build.config.vocab, m.targets_BT.shape, generator=draw)
                 for m in micros]  # fmt: skip
        return [replace(m, targets_BT=n) for m, n in zip(micros, noise, strict=True)]

    with before_steps(change):
        yield {"share": len(bad) / max(1, steps - FROM_STEP), "steps": sorted(bad)}


def _too_high(severity: float) -> tuple[str, ...]:
    """A learning rate many times as high; `change_of` multiplies."""
    return (f"optimizer.lr*{30 if severity <= 0.1 else 100 if severity <= 0.2 else 300}",)


@contextmanager
def _lost_evidence(case: Case) -> Iterator[Facts]:
    """A technique that was in force is not any more, for the last share of the steps."""
    steps = case.plan().goal.steps or 0
    first = max(2, round(steps * (1 - case.severity)))

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        if index == first:
            lose(build)
        return micros

    with before_steps(change):
        yield {"share": (steps - first) / steps, "from_step": first}


def lose(build: Build) -> None:
    """Take out cuDNN's attention, or the mask of documents."""
    if "cudnn_attention" in build.plan.techniques:
        build.model.attend = plain = Sdpa()
        for block in build.model.blocks.values():
            block.mixer.attend = plain  # type: ignore[union-attr]
    else:
        build.model.mask = MaskSpec()


# --- memory ----------------------------------------------------------------------------------


def _holding(case: Case, take: Callable[[int, list[Tensor]], None], each: bool) -> Any:
    """At the third step `take(bytes free, kept)`; afterwards again where `each`."""

    @contextmanager
    def hold() -> Iterator[Facts]:
        kept: list[Tensor] = []
        facts: Facts = {}

        def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
            if index == 3 or (each and index > 3):
                torch.cuda.synchronize()
                free, whole = torch.cuda.mem_get_info()
                take(free, kept)
                facts["share"] = sum(t.nbytes for t in kept) / whole
            return micros

        with before_steps(change):
            yield facts

    return hold()


def _full(case: Case) -> AbstractContextManager[Facts]:
    """Something else holds nearly all of the memory that the run leaves."""
    left = {0.1: 0.05, 0.2: 0.03}.get(case.severity, 0.015)

    def take(free: int, kept: list[Tensor]) -> None:
        spare = int(left * torch.cuda.mem_get_info()[1])
        kept.append(torch.empty(max(MIB, free - spare), dtype=torch.uint8, device="cuda"))

    return _holding(case, take, each=False)


def _fragments(case: Case) -> AbstractContextManager[Facts]:
    """Memory in segments of which half is held: a request that is larger begins anew."""

    def take(free: int, kept: list[Tensor]) -> None:
        if kept:  # more than the device has left: the allocator gives back its cache, and fails
            try:
                torch.empty(free + 64 * MIB, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                return
            return
        whole = torch.cuda.mem_get_info()[1]
        pairs = int(min(free - 0.1 * whole, (0.2 + case.severity) * whole) / (20 * MIB))
        both = [torch.empty(int(9.5 * MIB), dtype=torch.uint8, device="cuda")
                for _ in range(2 * pairs)]  # fmt: skip
        kept += both[::2]

    return _holding(case, take, each=True)


COMPILED = ('techniques.torch_compile={scope = "block", backend = "aot_eager", fullgraph = false}',)
"""Of a CPU, where no compiler is needed; `settings_of` says what a GPU has."""
LONG = ("goal.steps=120",)
CARDS = ("cuda",)
DEVICES = "it takes two devices, and is planted on two ranks of a CPU"
EVERY = {0.1: 4, 0.2: 2}
"""Blocks of which one is checkpointed, by wanted severity; else all."""
ALONE = "a CPU has one rank's own memory and no allocator that tells of it"
FAULTS = {
    "slow_loader": Fault("input", _slow_loader),
    "padded_batches": Fault("wasted tokens", _padded, counts="tokens"),
    "items": Fault("launch", _items, devices=CARDS,
                   why_not="a CPU computes when it is told to: reading a number waits for none"),
    "tiny_kernels": Fault("launch", _tiny_kernels),
    "recompilation": Fault("launch", _new_lengths, setting=COMPILED),
    "graph_breaks": Fault("launch", _graph_breaks, setting=COMPILED),
    "learning_rate": Fault(
        "instability", _plan_alone, counts="progress", setting=LONG, change=_too_high
    ),
    "spikes": Fault("instability", _spikes, counts="steps", setting=LONG),
    "lost_evidence": Fault("silent no-op", _lost_evidence, counts="steps",
                           setting=("techniques.document_packing={}",)),
    "needless_checkpoint": Fault(
        "unused memory", _plan_alone, devices=CARDS, why_not=ALONE,
        change=lambda s: (f"techniques.full_checkpoint={{every = {EVERY.get(s, 1)}}}",)),
    "fragments": Fault("fragmentation", _fragments, counts="memory", devices=CARDS, why_not=ALONE),
    "full_memory": Fault("memory capacity", _full, counts="memory", devices=CARDS, why_not=ALONE),
    "fp32_products": Fault("kernel efficiency", _fp32_products, devices=CARDS,
                           why_not="these workloads multiply in fp32 on a CPU already"),
    "throttled_rank": Fault("straggler", _throttled_rank, ranks=2, devices=("cpu",),
                            why_not=DEVICES),
    "slow_collective": Fault("interconnect", _slow_collective, ranks=2, devices=("cpu",),
                             why_not=DEVICES),
}  # fmt: skip
"""name -> fault."""


def settings_of(fault: Fault, device: str) -> tuple[str, ...]:
    """What the healthy run has too; a GPU compiles for real, and has its own technique to lose."""
    if device == "cpu" or fault.setting == LONG:
        return fault.setting
    on_gpu = ('techniques.torch_compile={scope = "block", fullgraph = false}',)
    return on_gpu if fault.setting == COMPILED else ()


def change_of(fault: Fault, severity: float, plan: Plan) -> tuple[str, ...]:
    """The faulty run's own overrides."""
    rate = plan.optimizer.lr
    told = (item.partition("*") for item in fault.change(severity))
    return tuple(f"{key}={rate * float(by):g}" if star else key for key, star, by in told)


def train_case(case: Case, told: Path) -> None:
    """Train in this process; what happened goes to `told` as JSON: folder, facts, error."""
    plan = case.plan()
    if plan.device == "cpu":
        torch.set_num_threads(1)  # steadier, and ranks do not share cores
    planting = FAULTS[case.fault].plant(case) if case.fault else nullcontext({})
    error = ""
    with planting as facts:
        try:
            train.run(plan, progress=Progress())
        except HeadraceError as failed:
            error = failed.message
        except torch.OutOfMemoryError as failed:
            error = f"out of memory: {str(failed).partition('. ')[0]}"
    told.write_text(json.dumps({"facts": facts, "error": error}))
