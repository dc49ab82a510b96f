"""Faults that are planted into a run from outside, and the process that trains with one.

A fault is a context manager around `headrace.train.run`: it replaces a function for as long as it
is entered, and the run knows nothing of it. It yields what it did, which the row then tells. Those
that take time are in fault_times.py, and the loop that is not ours in fault_foreign.py.

HELD_OUT were written beside the doctor's thresholds and never run to set one.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import fault_foreign
import fault_times as times
import torch
from fault_hooks import Case, Facts, Fault, before_steps
from torch import Tensor

from headrace import train
from headrace.core.errors import HeadraceError
from headrace.core.plan import Plan
from headrace.data.loader import Micro
from headrace.model.attention import Sdpa
from headrace.model.head import IGNORED
from headrace.model.mask import MaskSpec
from headrace.progress import Progress
from headrace.sockets import Build

FROM_STEP = 44
"""Where faults begin that need healthy steps before them."""
MIB = 2**20


@contextmanager
def _plan_alone(case: Case) -> Iterator[Facts]:
    """The plan says it all."""
    yield {}


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
def _empty_rows(case: Case) -> Iterator[Facts]:
    """Whole rows without a target: the last ones of each step."""

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        rows = sum(m.targets_BT.size(0) for m in micros)
        left, kept = round(rows * (1 - case.severity)), []
        for micro in micros:
            targets = micro.targets_BT.clone()
            targets[max(0, left) :] = IGNORED
            left -= targets.size(0)
            kept.append(replace(micro, targets_BT=targets))
        return kept

    with before_steps(change):
        yield {}


@contextmanager
def _overflows(case: Case) -> Iterator[Facts]:
    """In a share of the steps a gradient is infinite, and the update is left out."""
    every, bad = max(2, round(1 / case.severity)), []

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        if index % every == every - 1:
            bad.append(index)
            first = next(p for p in build.model.parameters() if p.requires_grad)

            def blow(gradient: Tensor) -> Tensor:
                handle.remove()
                return gradient + float("inf")

            handle = first.register_hook(blow)
        return micros

    with before_steps(change):
        facts: Facts = {"every": every}
        yield facts
        facts["share"] = len(bad) / max(1, case.plan().goal.steps or 0)


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
BOTH = ("batch.tokens=4096",)
"""Of two ranks, so that each has what one has alone."""
CARDS = ("cuda",)
DEVICES = "it takes two devices, and is planted on two ranks of a CPU"
EVERY = {0.1: 2}
"""Blocks of which one is checkpointed, by wanted severity; else all."""
ALONE = "a CPU has one rank's own memory and no allocator that tells of it"
HELD_OUT = ("stalling_loader", "empty_rows", "overflows", "changing_straggler")
FAULTS = {
    "slow_loader": Fault("input", times.slow_loader),
    "stalling_loader": Fault("input", times.stalling_loader),
    "empty_rows": Fault("wasted tokens", _empty_rows, counts="tokens"),
    "overflows": Fault("instability", _overflows, counts="steps"),
    "padded_batches": Fault("wasted tokens", _padded, counts="tokens"),
    "items": Fault("launch", times.items, devices=CARDS,
                   why_not="a CPU computes when it is told to: reading a number waits for none"),
    "tiny_kernels": Fault("launch", times.tiny_kernels),
    "recompilation": Fault("launch", times.new_lengths, setting=COMPILED),
    "graph_breaks": Fault("launch", times.graph_breaks, setting=COMPILED),
    "learning_rate": Fault(
        "instability", _plan_alone, counts="progress", setting=LONG, change=_too_high
    ),
    "spikes": Fault("instability", _spikes, counts="steps", setting=LONG),
    "lost_evidence": Fault("silent no-op", _lost_evidence, counts="steps",
                           setting=("techniques.document_packing={}",)),
    "foreign_no_op": Fault("silent no-op", fault_foreign.idle, counts="steps", foreign=True),
    "needless_checkpoint": Fault(
        "unused memory", _plan_alone,
        change=lambda s: (f"techniques.full_checkpoint={{every = {EVERY.get(s, 1)}}}",)),
    "fragments": Fault("fragmentation", _fragments, counts="memory", devices=CARDS, why_not=ALONE),
    "full_memory": Fault("memory capacity", _full, counts="memory", devices=CARDS, why_not=ALONE),
    "wide_products": Fault("kernel efficiency", times.wide_products),
    "throttled_rank": Fault("straggler", times.throttled_rank, ranks=2, setting=BOTH,
                            devices=("cpu",), why_not=DEVICES),
    "changing_straggler": Fault("straggler", times.changing_straggler, ranks=2, setting=BOTH,
                                devices=("cpu",), why_not=DEVICES),
    "slow_collective": Fault("interconnect", times.slow_collective, ranks=2, setting=BOTH,
                             devices=("cpu",), why_not=DEVICES),
    "no_overlap": Fault("interconnect", times.no_overlap, ranks=2, setting=BOTH,
                        devices=("cpu",), why_not=DEVICES),
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
            if case.foreign:
                fault_foreign.train(case)
            elif case.resumed:
                half = f"goal.steps={(plan.goal.steps or 2) // 2}"
                train.run(replace(case, overrides=(*case.overrides, half)).plan(),
                          progress=Progress())  # fmt: skip
                train.run(plan, progress=Progress(), resume=True)
            else:
                train.run(plan, progress=Progress())
        except HeadraceError as failed:
            error = failed.message
        except torch.OutOfMemoryError as failed:
            error = f"out of memory: {str(failed).partition('. ')[0]}"
    told.write_text(json.dumps({"facts": facts, "error": error}))
