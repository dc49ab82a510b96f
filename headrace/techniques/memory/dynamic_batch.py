"""Begin with the largest micro-batch that fits, and go on with a smaller one where it does not.

A plan says how many tokens a step has. How many of its rows fit into one forward and backward pass
depends on the GPU, the length of rows and every other technique, and is mostly found by hand: a run
that ends out of memory, and another one. The gradient of a step is a sum over its rows under one
denominator, the step's targets, so it does not depend on how many rows are taken at once.

**Before the run**, where batch.micro_sequences is 0, sizes are tried from all rows of a rank down
by halves (to the next divisor). The ledger decides what is clear: a size that it predicts to need
less than half of the free memory is taken, one that would need twice of it is not tried. Between
them a child process trains two steps and an evaluation with the free memory less `headroom` as its
limit. It ends with what it broke, and this process has held no weights yet. The answer is written
into the plan, so a run repeated from its plan.toml, or resumed from it, asks nobody.

**In the run**, a forward or backward pass that runs out of memory loses its gradients, what layers
kept, and the allocator's cache. Then the same step is taken again from the same random state, its
micro-batches cut in half by rows: the same tokens in the same order, the same targets, the same
loss scale. No token is lost, the stream and the global batch stay, and weights end where those of a
run end that had the smaller size from the start. Gradients are now summed, so those of bf16 weights
are kept in fp32 from then on. The size stays small, in the checkpoint too: a resume begins with it.
Validation is cut in the same way.

**Several ranks** shrink together. Where each holds the whole model, a pass sends nothing: a rank
that runs out of memory takes its pass again, the others wait for it where gradients are summed, and
each goes on with the smallest size of any. The first rank tries sizes for all, with the least
memory that one of them has. Where a pass sends something (slices, parts of a model, buckets of
gradients), the others stand in a collective that the interrupted pass never reaches, so that is
refused.

Cost: seconds for each size that is tried; in the run the lost part of a step, and with a compiler
the new shape; with several ranks one word a step on the hosts. Left out: what lies outside of the
passes (a teacher that reads micro-batches as the plan cuts them, the optimizer's update), which
only the child process tries; growing again.
Source: Composer's automatic microbatching; Accelerate's find_executable_batch_size.

Shapes: B rows, T tokens of a row.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build, Engine, MicroBatch
from headrace.core.errors import (
    NO_MEMORY,
    RefusalKind,
    RunError,
    UnsupportedError,
    is_out_of_memory,
)
from headrace.core.remedy import mend, typed
from headrace.core.units import format_bytes, largest_divisor
from headrace.costs.ledger import Ledger
from headrace.model.head import Objective
from headrace.model.mask import Rows
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Batch, Goal, Plan, TrackConfig
from headrace.plan.symptoms import LoopChange
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

CERTAIN, HOPELESS = 0.5, 2.0
"""Shares of the free memory: a size that is predicted to need less than the first fits, more than
the second does not. The ledger is held to 10% (tests/contract/test_predicts), uncompiled."""
KILLED = -9
"""Exit status of a child process that the system kills for its memory: by SIGKILL."""
CHUNKED, CHUNK = "chunked_cross_entropy", 2048
"""The technique that cuts a row's logits, and the tokens of a chunk where no other number is
given."""
LESS = ("full_checkpoint", CHUNKED)
"""Techniques whose rows need less memory."""
CHILD = """
import os, resource, sys
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
    os.environ.pop(name, None)  # torchrun's: this process is alone
from pathlib import Path
import torch
from headrace.train import train
from headrace.cli.catalogue import catalogue
from headrace.plan.plan import Plan
from headrace.train.interrupts import Interrupts
from headrace.core.progress import Progress

Interrupts.patience_s = None  # its thread has a stack that the limit counts
plan, limit, held = Path(sys.argv[1]), int(sys.argv[2]), Path("/proc/self/statm")
if sys.argv[3] == "cuda":
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole))
elif held.is_file():
    limit += int(held.read_text().split()[5]) * resource.getpagesize()  # without mere reservations
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
train.run(Plan.read(plan.read_text(), catalogue()), progress=Progress())
"""
"""Script of a child process that runs a plan file, as any other run, under a limit of bytes."""


class MicroBatchSize:
    """Rows of a micro-batch as they are now, and how it came to that.

    Args:
        rows: to begin with.
        length: tokens of a row in the plan.
        too_large: sizes that were found too large before.
        less: options after which a row needs less memory; empty where there is none.
    """

    def __init__(self, rows: int, length: int, too_large: int, less: tuple[str, ...] = ()) -> None:
        self.rows, self.length, self.shrinks, self.less = rows, length, 0, less
        self.agreed = 0
        """Shrinks that all ranks know of."""
        self.numbers: dict[str, float] = {
            "rows": rows,
            "began_with": rows,
            "too_large": too_large,
            "shrinks": 0,
            "micro_batches": 0,
            "too_long": 0,
        }
        """Numbers of this process so far; `shrinks` of the whole run."""

    def cut(self, works: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Cut the micro-batches into parts of as many tokens as fit; keep those that fit."""
        most = self.rows * self.length
        return [part for work in works for part in cut(work, -(-most // work.ids_BT.size(1)))]

    def ran(self, parts: Sequence[MicroBatch]) -> None:
        """Count the micro-batches of a pass that learns, and those a row or more over what fits."""
        most, sizes = self.rows * self.length, [part.ids_BT.shape for part in parts]
        self.numbers["micro_batches"] += len(sizes)
        self.numbers["too_long"] += sum(most <= (B - 1) * T for B, T in sizes)

    def shrink(self, parts: Sequence[MicroBatch], asked: str) -> None:
        """Take half of the rows that were too many; a RunError where it was one."""
        largest = max(part.ids_BT.numel() for part in parts)
        rows = min(self.rows, -(-largest // self.length))
        if rows == 1:
            raise RunError(
                f"a micro-batch of one row of {self.length} tokens does not fit: {asked}",
                mend(*self.less, text=f"{typed(*self.less)} --resume" if self.less else "")
                | f"data.sequence_length={max(1, self.length // 2)} name=NEW",
            )
        self._become([*halves(rows)][1], self.shrinks + 1)

    def _become(self, rows: int, shrinks: int) -> None:
        self.rows, self.shrinks = rows, shrinks
        self.numbers |= {"rows": rows, "shrinks": shrinks}

    def agree(self, build: Build, summed: bool) -> None:
        """Take the smallest size of any rank, after a pass in which one of them shrank.

        All ranks come here together.

        Args:
            build: the run.
            summed: whether this rank's gradients were added up from more parts than were planned.
        """
        world = build.world
        if world.ranks == 1 or not world.any(self.shrinks > self.agreed):
            return
        sizes = world.gather((self.rows, self.shrinks, summed))
        rows, shrinks = min(rows for rows, *_ in sizes), max(shrinks for _, shrinks, _ in sizes)
        if rows < self.rows:
            rank = next(rank for rank, (size, *_) in enumerate(sizes) if size == rows)
            build.note_line(f"rank {rank} is out of memory: micro-batches of {rows} rows on all")
        self._become(rows, shrinks)
        self.agreed = shrinks
        if any(parts for *_, parts in sizes):
            sum_in_fp32(build)

    def tensors(self) -> dict[str, Tensor]:
        """Return none: the state is a number."""
        return {}

    def values(self) -> dict[str, Any]:
        """Return what is saved as JSON."""
        return {"rows": self.rows, "shrinks": self.shrinks}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Begin as small as the run had become; a size that never failed is the plan's to say."""
        if values["shrinks"]:
            fit = [rows for rows in halves(self.rows) if rows <= values["rows"]]
            self._become(fit[0] if fit else 1, values["shrinks"])
            self.agreed = self.shrinks


class DynamicBatch(Technique[Build]):
    """Begin with the largest micro-batch that fits, and go on with a smaller one if it does not."""

    headroom: float = Field(default=0.05, gt=0, lt=1)
    """Share of the free memory that a trial leaves alone; tuner range 0.02 to 0.2."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.GATE  # the last before weights are held
    claims: ClassVar[tuple[str, ...]] = ("engine",)
    composes: ClassVar[tuple[str, ...]] = ("state",)
    excludes: ClassVar[Mapping[str, str]] = {
        "optimizer_in_backward": "a pass that runs out of memory has updated some weights already, "
        "and cannot be taken again (arXiv 2306.09782)",
        "cuda_graphs": "recordings of the larger micro-batch keep their pool, so that a smaller "
        "one has less memory than before (torch._inductor.cudagraph_trees)",
        "activation_offload": "what an interrupted pass has sent to the host is never fetched, and "
        "counts against its evidence (derived)",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:activations", "memory capacity:logits")
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("smaller micro-batches",)
    card: ClassVar[Card] = Card(
        buys=(
            "the largest micro-batch that fits, without trials by hand, and a run that goes "
            "on where it would have ended (derived)"
        ),
        costs=(
            "a child process of two steps for each size that the prediction leaves open",
            "at a shrink the step again, and everything that is compiled (derived)",
        ),
        helps="new models, other GPUs, lengths that vary, memory that others use too",
        hurts="ranks that hold slices or parts of a model, which it refuses; sizes that are known "
        "to fit gain nothing",
        source="Composer's automatic microbatching; Accelerate's find_executable_batch_size",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require an NVIDIA GPU or a CPU, and ranks whose passes send nothing."""
        on = context.plan.techniques.values() if context.ranks > 1 else ()
        sending = [t.name() for t in on if t.axes or "sync" in t.claims]
        if sending:
            rest = context.ranks - 1
            return Unsupported(
                f"a rank that runs out of memory leaves the other {rest} waiting in a collective "
                f"of {sending[0]}",
                mend("batch.micro_sequences=1", f"-{self.name()}"),
                RefusalKind.COMBINATION,
            )
        if context.device == "mps":
            return Unsupported(
                "how much memory an Apple GPU has left, and how it runs out, is not proven here",
                mend("batch.micro_sequences=1", f"-{self.name()}"),
                RefusalKind.DEVICE,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Change nothing: the run begins with the plan's rows; its report has the final ones."""
        return ledger

    def apply(self, build: Build) -> None:
        """Find the rows to begin with, write them into the plan, and guard the engine."""
        rows, too_large = self.first_rows(build)
        build.plan = with_rows(build.plan, rows)
        size = MicroBatchSize(rows, build.plan.data.sequence_length, too_large, less(build.plan))
        build.notes[self.name()] = build.state[self.name()] = size
        build.engine = guarded(size, build.engine)

    def first_rows(self, build: Build) -> tuple[int, int]:
        """Return the rows of the largest micro-batch that fits, and how many sizes are too large.

        Raises:
            UnsupportedError: one row is.
            RunError: a child process failed for another reason.
        """
        plan, need = build.plan, 0.0
        if plan.batch.micro_sequences:
            return plan.micro_rows, 0
        world, free = build.world, free_bytes(build.device)
        if build.device.type == "cpu":  # ranks of one host share its memory
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", world.ranks))
        room = int((1 - self.headroom) * min(world.gather(free)))
        for too_large, rows in enumerate(halves(plan.micro_rows)):
            need = build.predicted(with_rows(plan, rows)).peak()[1]
            if need <= CERTAIN * room:
                return rows, too_large
            if need <= HOPELESS * room:
                build.note_line(f"{self.name()} tries micro-batches of {rows} rows")
                alone = trial(plan, self.name(), rows)
                if world.any(world.rank == 0 and fits(alone, room, build.device)):
                    build.note_line(f"batch.micro_sequences={rows} fits")
                    return rows, too_large
        raise UnsupportedError(
            f"a micro-batch of one row of {plan.data.sequence_length} tokens does not fit into "
            f"{format_bytes(room)}; {format_bytes(need)} are predicted",
            mend(*less(plan))
            | mend(f"data.sequence_length={max(1, plan.data.sequence_length // 2)}"),
        )

    def active(self, build: Build) -> Evidence:
        """Report the micro-batches that went through it, none with more rows than it allows."""
        size: MicroBatchSize = build.notes[self.name()]
        ran, over, before = (size.numbers[n] for n in ("micro_batches", "too_long", "too_large"))
        return Evidence(
            active=ran > 0 == over,
            detail=f"ran {ran:.0f} micro-batches, {over:.0f} of them of more than {size.rows} rows "
            f"of {size.length} tokens; {before} sizes were too large before, {size.shrinks} since",
            numbers=size.numbers,
        )


# --- the rows to begin with -------------------------------------------------------------------


def halves(rows: int) -> Iterator[int]:
    """Yield `rows`, then each time the largest divisor that is at most its half, down to 1."""
    yield rows
    while rows > 1:
        rows = largest_divisor(rows, rows // 2)
        yield rows


def with_rows(plan: Plan, rows: int) -> Plan:
    """Return the plan with micro-batches of `rows` rows."""
    return plan.replaced(batch=plan.batch.model_copy(update={"micro_sequences": rows}))


def free_bytes(device: torch.device) -> int:
    """Return free memory: the GPU's; on a CPU the machine's, or what its group is left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = 1024 * _number("/proc/meminfo", "MemAvailable:") or free
    most, current = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    cached = _number("/sys/fs/cgroup/memory.stat", "inactive_file")  # of files, given back if asked
    return min(free, max(0, most - max(0, current - cached))) if most else free


def _number(path: str, name: str = "") -> int:
    words = ["", *(Path(path).read_text().split() if Path(path).is_file() else ()), "", ""]
    after = words[words.index(name) + 1] if name in words else ""
    return int(after) if after.isdigit() else 0


def trial(plan: Plan, name: str, rows: int) -> Plan:
    """Return a plan of two steps and an evaluation without `name`, for a trial."""
    tokens = rows * plan.data.sequence_length
    steps = plan.horizon_steps or max(2, plan.schedule.warmup_steps)
    return plan.replaced(
        name="trial",
        guard=False,
        batch=Batch(tokens=min(2 * tokens, plan.batch.tokens), micro_sequences=rows),
        goal=Goal(steps=2),
        schedule=plan.schedule.model_copy(update={"steps": steps}),
        eval=plan.eval.model_copy(update={"every_steps": 2, "tokens": tokens}),
        checkpoint=plan.checkpoint.model_copy(update={"every_steps": 0}),
        track=TrackConfig(),
        mesh=MeshConfig(),
        techniques={n: t for n, t in plan.techniques.items() if n != name},
    )


def less(plan: Plan) -> tuple[str, ...]:
    """Return the changes after which a row needs less memory: techniques that are not on."""
    words = [f"+{name}" for name in LESS if name not in plan.techniques]
    length = plan.data.sequence_length
    if CHUNKED not in plan.techniques and length <= CHUNK:
        words.append(f"techniques.{CHUNKED}.chunk_tokens={max(1, length // 2)}")
    return tuple(words)


def fits(plan: Plan, limit: int, device: torch.device) -> bool:
    """Return whether the plan runs in a process of its own that may take `limit` bytes.

    Raises:
        RunError: it failed, and not for memory.
    """
    with TemporaryDirectory(prefix="headrace-") as folder:
        file = Path(folder) / "plan.toml"
        file.write_text(plan.replaced(directory=folder).to_toml())
        ended = subprocess.run(
            [sys.executable, "-c", CHILD, str(file), str(limit), device.type],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
    if ended.returncode in (0, KILLED):
        return ended.returncode == 0
    if any(sign in ended.stderr for sign in NO_MEMORY):
        return False
    lines = [line for line in ended.stderr.splitlines() if line[:1].strip()]  # not indented
    why = lines[-1] if lines else f"exit code {ended.returncode}"
    raise RunError(
        f"a trial of batch.micro_sequences = {plan.micro_rows} failed, and not for memory: {why}",
        mend(
            f"batch.micro_sequences={plan.micro_rows}",
            text=f"batch.micro_sequences={plan.micro_rows}, which tries nothing and shows the "
            "whole error",
        ),
    )


# --- in the run -------------------------------------------------------------------------------


def guarded(size: MicroBatchSize, inner: Engine) -> Engine:
    """Return the engine, retried with smaller micro-batches where memory does not suffice."""

    def engine(
        build: Build, works: Sequence[MicroBatch], objective: Objective, scale: Tensor
    ) -> Tensor:
        before = random_state(build.device)
        while True:
            parts = size.cut(works)
            if len(parts) > len(works) and torch.is_grad_enabled():
                sum_in_fp32(build)
            try:
                loss = inner(build, parts, objective, scale)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                asked = (str(error).strip() or type(error).__name__).splitlines()[0]
            else:
                if torch.is_grad_enabled():
                    size.ran(parts)
                    size.agree(build, len(parts) > len(works))
                return loss
            # The error is gone here, and with it the frames that held what the pass had made.
            let_go(build, before)
            size.shrink(parts, asked)
            build.note_line(
                f"out of memory: micro-batches of {size.rows} rows from here on ({asked})"
            )

    return engine


def random_state(device: torch.device) -> list[Tensor]:
    """Return the state of the random numbers of the host, and of a GPU."""
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


def let_go(build: Build, random: Sequence[Tensor]) -> None:
    """Drop what an interrupted pass left behind, and restore the state of the random numbers."""
    for kept in build.auxiliary:
        kept(build)  # which takes what layers kept, and clears it
    for parameter in build.model.parameters():
        parameter.grad = None
    if build.compiled:  # for a shape that will not come again; a compiler takes few of one code
        torch.compiler.reset()
    gc.collect()
    torch.set_rng_state(random[0])
    if build.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_rng_state(random[1], build.device)


def sum_in_fp32(build: Build) -> None:
    """Keep gradients of half-precision weights in fp32 from here on, since they are added up."""
    for parameter in build.model.parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < 4:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            parameter.grad = None if gradient is None else gradient.float()


def cut(work: MicroBatch, rows: int) -> list[MicroBatch]:
    """Cut the micro-batch into parts of at most `rows` rows, in order: views of the same tokens."""
    B, T = work.ids_BT.shape
    if rows >= B:
        return [work]

    def part(first: int) -> MicroBatch:
        here, tokens = slice(first, first + rows), slice(first * T, (first + rows) * T)

        def of(x_B: Tensor | None) -> Any:
            return x_B if x_B is None or x_B.size(0) == 1 else x_B[here]

        extras = {name: x_N[tokens] for name, x_N in (work.extras or {}).items()}
        own = Rows(*map(of, work.rows))
        ids_BT, targets_BT, index_BT = work.ids_BT[here], work.targets_BT[here], work.index_BT[here]
        return MicroBatch(ids_BT, targets_BT, own, index_BT, extras or None)

    return [part(first) for first in range(0, B, rows)]
