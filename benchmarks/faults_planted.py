"""Define the faults that are planted into a run from outside, and train a run with one.

A fault is a context manager around `headrace.train.train.run`: it replaces a function for as long
as it is entered, and the run knows nothing of it. It yields what it did, which the row then holds.
Those that take time are in fault_times.py and fault_products.py, how much of them a step is given
in fault_doses.py, and the loop that is not ours in fault_foreign.py.

UNSEEN_FAULTS were written beside the doctor's thresholds and never run to set one.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import fault_foreign
import fault_times as times
import torch
from fault_doses import SECOND
from fault_hooks import MARGIN, Case, Facts, Fault, before_steps
from fault_products import wide_matmuls
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import HeadraceError
from headrace.core.progress import Progress
from headrace.data.loader import Micro
from headrace.model.attention import Sdpa
from headrace.model.head import IGNORED
from headrace.model.mask import MaskSpec
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.tuner.readings import device_weights

FROM_STEP = {"cpu": 44, "cuda": 24}
"""The step from which a fault acts that needs healthy steps before it, by device.

A step on a GPU learns more, so fewer are needed there.
"""
MIB = 2**20
PIECE_BYTES, SEGMENT_BYTES = int(9.5 * MIB), 20 * MIB
"""Bytes of a request, and bytes that torch's allocator takes from the driver for it.

Two requests fit into what it takes. A fault keeps one of them, so that half of it stays free.
"""
SPARE = 0.08
"""Share of a device's memory that is left to a run when a fault takes the rest."""


@contextmanager
def _plan_alone(case: Case) -> Iterator[Facts]:
    """Do nothing: the plan alone describes the fault."""
    yield {}


# --- tokens and learning ---------------------------------------------------------------------


@contextmanager
def _padded(case: Case) -> Iterator[Facts]:
    """Remove the targets at the end of every sequence."""

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
    """Remove the targets of the last sequences of each step."""

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
    """Make a gradient infinite in a share of the steps, so that the update is left out."""
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
    """Train on noise in a share of the steps, from FROM_STEP on."""
    plan = case.plan()
    steps, first = plan.goal.steps or 0, FROM_STEP[plan.device]
    every = max(2, round(1 / case.severity))
    bad = set(range(first, steps, every))

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        if index not in bad:
            return micros
        draw = torch.Generator().manual_seed(index)
        noise = [
            torch.randint(build.config.vocab, m.targets_BT.shape, generator=draw) for m in micros
        ]
        return [replace(m, targets_BT=n) for m, n in zip(micros, noise, strict=True)]

    with before_steps(change):
        yield {"share": len(bad) / max(1, steps - first), "steps": sorted(bad)}


def _too_high(severity: float) -> tuple[str, ...]:
    """Return a learning rate that is many times too high; `change_of` multiplies."""
    return (f"optimizer.lr*{30 if severity <= 0.1 else 100 if severity <= 0.2 else 300}",)


def _too_low(severity: float) -> tuple[str, ...]:
    """Return a learning rate that is too low."""
    return (f"optimizer.lr*{0.65 if severity <= 0.1 else 0.5 if severity <= 0.2 else 0.3}",)


@contextmanager
def _lost_evidence(case: Case) -> Iterator[Facts]:
    """Switch a technique off that was in force, for the last share of the steps."""
    steps = case.plan().goal.steps or 0
    first = max(2, round(steps * (1 - case.severity)))

    def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
        if index == first:
            lose(build)
        return micros

    with before_steps(change):
        yield {"share": (steps - first) / steps, "from_step": first}


def lose(build: Build) -> None:
    """Take cuDNN's attention or the mask of documents out of the run."""
    if "cudnn_attention" in build.plan.techniques:
        build.model.attend = plain = Sdpa()
        for block in build.model.blocks.values():
            block.mixer.attend = plain  # type: ignore[union-attr]
    else:
        build.model.mask = MaskSpec()


# --- memory ----------------------------------------------------------------------------------


def _holding(
    case: Case, take: Callable[[int, int, list[Tensor]], float]
) -> AbstractContextManager[Facts]:
    """Call `take(bytes free, in all, kept)` before step two; `take` returns the share it took.

    Then a request that nothing holds makes the allocator give its cache back and begin anew. The
    doctor does not judge that step, and later ones find what they need where the cache was.
    """

    @contextmanager
    def hold() -> Iterator[Facts]:
        kept: list[Tensor] = []
        facts: Facts = {}

        def change(build: Build, micros: list[Micro], index: int) -> list[Micro]:
            if index == SECOND:
                torch.cuda.synchronize()
                facts["share"] = take(*torch.cuda.mem_get_info(), kept)
                torch.cuda.reset_peak_memory_stats()  # what was held for a moment is no peak
                with suppress(torch.OutOfMemoryError):
                    torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
                facts["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
            return micros

        with before_steps(change):
            yield facts

    return hold()


def _full(case: Case) -> AbstractContextManager[Facts]:
    """Take nearly all of the memory that the run leaves."""
    left = {0.1: 0.06, 0.2: 0.04}.get(case.severity, 0.025)

    def take(free: int, whole: int, kept: list[Tensor]) -> float:
        kept.append(torch.empty(free - int(left * whole), dtype=torch.uint8, device="cuda"))
        return kept[0].nbytes / whole

    return _holding(case, take)


def _fragments(case: Case) -> AbstractContextManager[Facts]:
    """Keep half of each segment of memory, so that a larger request needs a new one."""

    def take(free: int, whole: int, kept: list[Tensor]) -> float:
        loose = SEGMENT_BYTES - PIECE_BYTES
        wanted = int(MARGIN * max(case.severity, 0.12) * whole / loose)
        pairs = min(wanted, int((free - SPARE * whole) / SEGMENT_BYTES))
        both = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2 * pairs)
        ]
        kept += both[::2]
        return pairs * loose / whole

    return _holding(case, take)


COMPILED = ('techniques.torch_compile={scope = "block", backend = "aot_eager", fullgraph = false}',)
"""Settings of a CPU's healthy run, where no compiler is needed; `settings_of` has a GPU's."""
LONG = {"cpu": ("goal.steps=120",), "cuda": ("goal.steps=56",)}
CURVED = {
    "cpu": ("goal.steps=120", "eval.every_steps=10"),
    "cuda": ("goal.steps=56", "eval.every_steps=7"),
}
"""Settings with evaluations, by which two runs are compared; by device."""
BOTH = ("batch.tokens=4096",)
"""Settings of two ranks, so that each has what one process has alone."""
STAGES = (
    *BOTH,
    *("mesh.data=1", "mesh.pipeline=2", "model.layers=4", "batch.micro_sequences=4"),
    'techniques.pipeline_parallel={balance = "layers"}',
)
"""Settings of a pipeline of two ranks, whose stages have two layers each."""
CARDS = ("cuda",)
BREAKABLE = ('techniques.torch_compile={scope = "block", fullgraph = false}',)
DEVICES = "it takes two devices, and is planted on two ranks of a CPU"
EVERY = {0.1: 2}
"""Blocks of which one is checkpointed, by wanted severity; else all, as always on a GPU: more than
a fifth of its step checkpointing cannot take."""
ALONE = "a CPU has one rank's own memory and no allocator that tells of it"
UNSEEN_FAULTS, SEEN = ("stalling_loader", "empty_rows", "changing_straggler"), ("overflows",)
"""The second's rule was written once its runs had been judged wrong, on the workloads that are held
out too: it is not asked there."""
FAULTS = {
    "slow_loader": Fault("input", times.slow_loader),
    "stalling_loader": Fault("input", times.stalling_loader, counts="stalls"),
    "empty_rows": Fault("wasted tokens", _empty_rows, counts="tokens"),
    "overflows": Fault("instability", _overflows, counts="steps"),
    "padded_batches": Fault("wasted tokens", _padded, counts="tokens"),
    "items": Fault(
        "launch",
        times.items,
        devices=CARDS,
        why_not="a CPU computes when it is told to: reading a number waits for none",
    ),
    "tiny_kernels": Fault("launch", times.tiny_kernels),
    "recompilation": Fault("launch", times.recompilation, setting=COMPILED),
    "graph_breaks": Fault("launch", times.graph_breaks, setting=COMPILED, on_gpu=BREAKABLE),
    "learning_rate": Fault(
        "instability", _plan_alone, counts="progress", setting=LONG["cpu"], change=_too_high
    ),
    "poor_recipe": Fault(
        "recipe", _plan_alone, counts="progress", setting=CURVED["cpu"], change=_too_low
    ),
    "spikes": Fault("instability", _spikes, counts="steps", setting=LONG["cpu"]),
    "lost_evidence": Fault(
        "silent no-op", _lost_evidence, counts="steps", setting=("techniques.document_packing={}",)
    ),
    "foreign_no_op": Fault("silent no-op", fault_foreign.idle, counts="steps", foreign=True),
    "needless_checkpoint": Fault(
        "unused memory",
        _plan_alone,
        change=lambda s: (f"techniques.full_checkpoint={{every = {EVERY.get(s, 1)}}}",),
        on_gpu=("techniques.full_checkpoint={}",),
    ),
    "fragments": Fault("fragmentation", _fragments, counts="memory", devices=CARDS, why_not=ALONE),
    "full_memory": Fault("memory capacity", _full, counts="memory", devices=CARDS, why_not=ALONE),
    "wide_products": Fault("kernel efficiency", wide_matmuls),
    "throttled_rank": Fault(
        "straggler", times.throttled_rank, ranks=2, setting=BOTH, devices=("cpu",), why_not=DEVICES
    ),
    "changing_straggler": Fault(
        "straggler",
        times.changing_straggler,
        ranks=2,
        setting=BOTH,
        devices=("cpu",),
        why_not=DEVICES,
    ),
    "slow_stage": Fault(
        "pipeline imbalance",
        times.slow_stage,
        counts="waits",
        ranks=2,
        setting=STAGES,
        devices=("cpu",),
        why_not=DEVICES,
    ),
    "slow_collective": Fault(
        "interconnect",
        times.slow_collective,
        ranks=2,
        setting=BOTH,
        devices=("cpu",),
        why_not=DEVICES,
    ),
    "no_overlap": Fault(
        "interconnect", times.no_overlap, ranks=2, setting=BOTH, devices=("cpu",), why_not=DEVICES
    ),
}
"""Maps the name of each fault to the fault."""


def settings_of(fault: Fault, device: str) -> tuple[str, ...]:
    """Return the settings of the healthy run; on a GPU it is compiled, with a technique to lose.

    Of a GPU's few steps a tenth is too few for any rule of learning.
    """
    if fault.setting == CURVED["cpu"]:
        return CURVED[device]
    if fault.setting == LONG["cpu"] or (device == "cuda" and fault.expected == "instability"):
        return LONG[device]
    return fault.setting if device == "cpu" else ()


def change_of(fault: Fault, severity: float, plan: Plan) -> tuple[str, ...]:
    """Return the faulty run's own overrides."""
    if plan.device == "cuda" and fault.on_gpu:
        return fault.on_gpu
    rate = plan.optimizer.lr
    items = (item.partition("*") for item in fault.change(severity))
    return tuple(f"{key}={rate * float(by):g}" if star else key for key, star, by in items)


def train_case(case: Case, file: Path) -> None:
    """Train in this process, and write folder, facts and error to `file` as JSON."""
    (given := file.with_name(f"{file.name}.given")).mkdir()  # each rank has one
    plan = case.plan_with_weights(given)
    if plan.device == "cpu":
        torch.set_num_threads(1)  # steadier, and ranks do not share cores
    planting = FAULTS[case.fault].plant(case) if case.fault else nullcontext({})
    drawn = device_weights(torch.device("cuda")) if plan.device == "cuda" else nullcontext()
    error = ""
    with drawn, planting as facts:
        try:
            if case.foreign:
                fault_foreign.train(case)
            elif case.resumed:
                half = f"goal.steps={(plan.goal.steps or 2) // 2}"
                train.run(
                    replace(case, overrides=(*case.overrides, half)).plan(), progress=Progress()
                )
                train.run(plan, progress=Progress(), resume=True)
            else:
                train.run(plan, progress=Progress())
        except HeadraceError as failed:
            error = failed.message
        except torch.OutOfMemoryError as failed:  # a GPU's: no fault fills the memory of a host
            error = f"out of memory: {str(failed).partition('. ')[0]}"
    file.write_text(json.dumps({"facts": facts, "error": error}))
