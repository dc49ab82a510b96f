"""Record the compiled step's kernels once, and launch them together from then on.

A kernel costs the host some microseconds to launch. Small models and few rows compute for less than
that, and the device waits. A CUDA graph is a recording of launches with their addresses: replaying
it is one launch. Inductor does it for each graph that it compiles (`mode="reduce-overhead"` sets
the same flag): the first call warms up, the second records, later ones replay. All recordings share
one pool of memory, so that the backward graph finds what the forward graph kept where it lay.

A replay writes where the recording wrote. So what comes out of one must have been read before the
next begins: each micro-batch says that it begins, and gradients, which are outputs too, are copied
out of the pool after a step's first micro-batch when others follow (pytorch/pytorch#169545).

Cost: inputs are copied to fixed places; the pool gives nothing back between forward and backward;
each shape is compiled and recorded by itself, in the pool of all; code that is not compiled
launches as before, and so do optimizers. Left out: recording those and the parts between graphs,
and collectives inside of graphs.
Source: torch._inductor.cudagraph_trees; docs.pytorch.org, CUDAGraph Trees.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import HostWork
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

RECORDING = "inductor"
"""The backend that records what it compiles."""
SETTLED = 8
"""Micro-batches: one to warm up and one to record, of a few lengths."""


class CudaGraphs(Technique[Build]):
    """Record the compiled step's kernels once, and launch them together from then on."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "compile"
    stage: ClassVar[Stage] = Stage.COMPILE
    claims: ClassVar[tuple[str, ...]] = ("sync",)
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    excludes: ClassVar[Mapping[str, str]] = {
        "activation_offload": "a recorded backward pass reads what was kept where it lay when it "
        "was recorded, and what comes back from the host lies elsewhere "
        "(torch._inductor.cudagraph_trees, check_invariants)",
        "optimizer_in_backward": "a recorded backward pass holds all of its gradients until it "
        "ends, so that none is freed in between (torch._inductor.cudagraph_trees)",
        "stochastic_depth": "each set of blocks is a recording of its own, and there are "
        "2^(layers - 1) sets (derived)",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("launch",)
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("recorded graphs",)
    card: ClassVar[Card] = Card(
        buys=(
            "the host's time per launch",
            "elsewhere from slightly slower to about 30% faster, only where launches bound "
            "the step (Megatron Bridge, CUDA graphs guide)",
        ),
        costs=(
            "a pool that keeps the step's peak, copies of inputs, and of gradients where "
            "there are several micro-batches"
        ),
        helps="small models, few rows, many layers: a device that waits for the host",
        hurts="large kernels, which hide their launches; shapes that change; memory that is short",
        source="torch._inductor.cudagraph_trees; Megatron Bridge, CUDA graphs guide",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support an NVIDIA GPU, inductor and one process."""
        if context.device != "cuda":
            return Unsupported(
                f"{context.device} has no CUDA graphs", mend("device=cuda"), RefusalKind.DEVICE
            )
        plan = context.plan
        on = plan.techniques.values() if plan else ()
        compiling = [t for t in on if "compiled" in t.composes]
        if not compiling:
            return Unsupported(
                "it records what is compiled, and nothing is",
                mend("+torch_compile"),
                RefusalKind.COMBINATION,
            )
        backend = getattr(compiling[0], "backend", RECORDING)
        if backend != RECORDING:
            return Unsupported(
                f"backend = {backend!r} records nothing",
                mend(f"techniques.{compiling[0].name()}.backend={RECORDING}"),
                RefusalKind.COMBINATION,
            )
        if context.ranks > 1:
            return Unsupported(
                f"collectives of {context.ranks} ranks inside of recordings are not proven here",
                context.whole(*(axis for axis, size in plan.mesh.sizes.items() if size > 1)),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add gradients of a later micro-batch, beside the sum that was copied out of the pool."""
        # What is compiled is recorded, and that is both passes.
        ledger = ledger.reworked(
            lambda _, piece: replace(
                piece, recorded=piece.phase != "optimizer" and not isinstance(piece, HostWork)
            )
        )
        if ledger.sizes.get("micro_batches", 1) <= 1 or "gradients" not in ledger.memory:
            return ledger
        line = Line(ledger.memory["gradients"].bytes, ("backward",))
        return ledger.with_line("recorded_gradients", line)

    def apply(self, build: Build) -> None:
        """Let inductor record, and say where each micro-batch begins.

        What an earlier build of this process recorded would be no evidence for this one.
        """
        if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
            trees.reset_cudagraph_trees()
        notes = build.notes[self.name()] = {"summed": False, "skips": None, "begun": 0}
        build.runtime.append(partial(_recording, notes))
        build.sync = partial(_begin, notes, build.sync)

    def active(self, build: Build) -> Evidence:
        """Read the compiled graphs that the recorder has taken and run, and their recordings.

        A graph's first call warms up and its second records, so the first micro-batches can show
        no recording; after `SETTLED` of them there must be one.
        """
        if build.device.type != "cuda":
            return Evidence(False, f"{build.device.type} has no CUDA graphs")
        from torch._inductor.cudagraph_trees import get_manager

        index = build.device.index
        manager = get_manager(
            torch.cuda.current_device() if index is None else index, create_if_none_exists=False
        )
        taken, ran, recorded = counts(manager)
        notes = build.notes[self.name()]
        before = notes["skips"]
        skipped = 0 if before is None else skips() - before
        settled = notes["begun"] >= SETTLED
        return Evidence(
            active=before is not None and ran > 0 and (recorded > 0 or not settled),
            detail=f"{taken} compiled graphs are replayed from recordings: {ran} have warmed up, "
            f"{recorded} are recorded so far (each at its second call), {skipped} were skipped",
            numbers={"graphs": taken, "warm": ran, "recorded": recorded, "skipped": skipped},
        )


@contextmanager
def _recording(notes: dict[str, Any]) -> Iterator[None]:
    """Record what inductor compiles while it lasts."""
    from torch._inductor import config

    if notes["skips"] is None:
        notes["skips"] = skips()
    with config.patch({"triton.cudagraphs": True}):
        yield


def _begin(notes: dict[str, Any], inner: Any, build: Build, last: bool) -> None:
    """Begin a micro-batch: what earlier micro-batches left in the pool may be written over.

    So the gradients of a step's first micro-batch move out of it when a second one comes, which
    then adds to them.
    """
    inner(build, last)
    if torch.is_grad_enabled():
        notes["begun"] += 1
        learned = [p for p in build.model.parameters() if p.grad is not None]
        if learned and not notes["summed"]:
            for parameter in learned:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clone()
        notes["summed"] = bool(learned)
    torch.compiler.cudagraph_mark_step_begin()


def counts(manager: Any) -> tuple[int, int, int]:
    """Count graphs that inductor's recorder has taken, graphs that have run, and recordings."""
    if manager is None:
        return 0, 0, 0
    waiting = [node for nodes in manager.roots.values() for node in nodes]
    recorded = 0
    while waiting:
        node = waiting.pop()
        recorded += 1
        waiting += [child for children in node.children.values() for child in children]
    return len(manager.ids_to_funcs), len(manager.warmed_up_functions), recorded


def skips() -> int:
    """Count graphs that inductor compiled and would not record, in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])
