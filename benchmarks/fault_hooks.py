"""Define what a planted fault is, and the hooks by which it changes a run from outside."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.assemble.build import make_build
from headrace.assemble.context import choose_device
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.data.ingest import prepare
from headrace.data.loader import Micro
from headrace.export.hf import export_hf
from headrace.model.decoder import Block
from headrace.parallel.world import World
from headrace.plan.doubts import doubts_of
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage
from headrace.train import train

MARGIN = 1.15
"""The factor over the wanted severity at which a fault aims, so that noise does not undercut it."""
Facts = dict[str, Any]
"""The facts that a fault reports of itself, for its row."""


@dataclass(frozen=True)
class Case:
    """Describe one run: a workload, and what is planted into it.

    It is plain data, since it goes to another process.

    Args:
        text: the workload's plan.
        overrides: `key=value`, the fault's among them.
        fault: one of FAULTS, "" for none.
        severity: share of the step that is wanted.
        step_s: of the healthy run.
        ranks: processes.
        foreign: whether a loop that is not ours trains it.
        resumed: whether it ends at its half and goes on from there.
    """

    text: str
    overrides: tuple[str, ...]
    fault: str = ""
    severity: float = 0.0
    step_s: float = 0.0
    ranks: int = 1
    foreign: bool = False
    resumed: bool = False

    @property
    def extra_s(self) -> float:
        """Return the seconds that a step must gain so that the fault takes the wanted share."""
        share = MARGIN * self.severity
        return self.step_s * share / (1 - share)

    def plan(self) -> Plan:
        """Return the plan that is trained."""
        return Plan.read(self.text, catalogue(), overrides=self.overrides)

    def plan_with_weights(self, folder: Path) -> Plan:
        """Return the plan that is trained, with weights of a folder where it needs pretrained ones.

        These weights are random, since only the fault's share of a step is measured.
        """
        plan = self.plan()
        if not any(doubt.meaningless for doubt in doubts_of(plan)):
            return plan
        bare = plan.replaced(techniques={})
        build = make_build(
            bare, prepare(bare), World(), choose_device(bare), until=Stage.MATERIALIZE
        )
        state = {name: p.detach() for name, p in build.model.named_parameters()}
        build.prepared.tokenizer.save(file := folder / "tokenizer.json")
        weights, length = folder / "weights", plan.data.sequence_length
        export_hf(state, build.config, file, weights, sequence_length=length)
        start = (f"model.pretrained={weights}", *self.overrides)
        return Plan.read(self.text, catalogue(), overrides=start)

    def block_calls(self) -> int:
        """Return how often a step runs a block forward on one rank."""
        plan = self.plan()
        return plan.model.layers * (plan.rows_per_step // plan.mesh.data // plan.micro_rows)


Plant = Callable[[Case], AbstractContextManager[Facts]]


@dataclass(frozen=True)
class Fault:
    """Describe a fault: how it is planted and what it should be called.

    Args:
        expected: the bottleneck that the doctor should name.
        plant: the context manager that puts the fault into a run.
        counts: what its severity is a share of: "time" of the usual step, the time of all steps
            where some have "stalls", "tokens", the "progress" of the run, its "steps", the
            device's "memory", or the "waits" of ranks for one of them; the fault reports the last
            three itself, as `share`.
        devices: where it can be planted.
        why_not: why it cannot be planted on other devices.
        setting: overrides of the healthy run too.
        change: overrides of the faulty one, by wanted severity.
        on_gpu: in place of them on a GPU, where there are any.
        ranks: processes that it takes.
        foreign: see Case.
    """

    expected: str
    plant: Plant
    counts: str = "time"
    devices: tuple[str, ...] = ("cpu", "cuda")
    why_not: str = ""
    setting: tuple[str, ...] = ()
    change: Callable[[float], tuple[str, ...]] = field(default=lambda severity: ())
    on_gpu: tuple[str, ...] = ()
    ranks: int = 1
    foreign: bool = False


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `make(the original)` inside the context."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def before_steps(
    change: Callable[[Build, list[Micro], int], list[Micro]],
) -> AbstractContextManager[None]:
    """Give `change` the micro-batches of each step before it; it may return others."""
    return patched(
        train,
        "step",
        lambda step: (
            lambda build, micros, index, *rest: step(
                build, change(build, micros, index), index, *rest
            )
        ),
    )


def after_blocks(do: Callable[[Tensor], None]) -> AbstractContextManager[None]:
    """Give `do` what each block returns in training."""

    def make(call: Any) -> Any:
        def called(block: nn.Module, *given: Any) -> Tensor:
            out = call(block, *given)
            if torch.is_grad_enabled():
                do(out)
            return out

        return called

    return patched(Block, "__call__", make)


def built(change: Callable[[Build], None]) -> AbstractContextManager[None]:
    """Give `change` the build of the run when it is made."""

    def make(make_build: Any) -> Any:
        def made(*given: Any, **how: Any) -> Build:
            build = make_build(*given, **how)
            change(build)
            return build

        return made

    return patched(train, "make_build", make)
