"""Runs that a technique ends, or that a comparison does, and how each remedy is followed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shell import Case, run

from headrace.assemble import autotune as choose
from headrace.techniques.loss.chunked_cross_entropy import ChunkedHead
from headrace.techniques.memory import dynamic_batch
from headrace.techniques.precision.fp16_loss_scaling import Fp16LossScaling
from headrace.tuner.command import locked

ONE = "train {tiny} name=own goal.steps=1"
SIZED = f"{ONE} guard=false --with dynamic_batch"
CHUNKED = "--with chunked_cross_entropy techniques.chunked_cross_entropy.chunk_tokens=64"
LONG = "data.sequence_length=1024 batch.tokens=1024 eval.tokens=1024"
BF16 = "--with bf16_parameters techniques.bf16_parameters.rounding"
TEACHER = "--with distillation techniques.distillation.teacher=hf"


def twice_the_loss(patch: pytest.MonkeyPatch) -> None:
    """Let a head return two times its loss, as one with a defect would."""
    plain = ChunkedHead.forward
    patch.setattr(ChunkedHead, "forward", lambda *given, **how: plain(*given, **how) * 2)


def no_scale_fits(patch: pytest.MonkeyPatch) -> None:
    """Let every gradient overflow fp16 at the rate of the plan."""
    plain = Fp16LossScaling.apply

    def apply(self: Any, build: Any) -> None:
        plain(self, build)
        scaled = build.loss_scale
        if build.plan.optimizer.lr > 1e-3:
            build.loss_scale = lambda *given: scaled(*given) * torch.inf

    patch.setattr(Fp16LossScaling, "apply", apply)


def rounded(_: Path) -> None:
    """Train a run whose weights keep what was rounded."""
    words = ["train", "runs/demo/plan.toml", "name=own", "goal.steps=3", "guard=false"]
    words += ["--without", "muon"]
    assert not run([*words, *f"{BF16}=master".split()]).code


def four_rows(patch: pytest.MonkeyPatch) -> None:
    """Let no backend run with more than four rows."""
    plain = choose._trial

    def trial(build: Any, work: Any, *given: Any) -> Any:
        if work.ids_BT.size(0) > 4:
            raise RuntimeError("CUDA out of memory")
        return plain(build, work, *given)

    patch.setattr(choose, "_trial", trial)


def one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    """Let no row of 16 tokens fit but under full_checkpoint."""
    plain = dynamic_batch.guarded

    def guarded(size: Any, engine: Any) -> Any:
        def short(build: Any, *given: Any) -> Any:
            plan = build.plan
            if plan.data.sequence_length > 8 and "full_checkpoint" not in plan.techniques:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return engine(build, *given)

        return plain(size, short)

    patch.setattr(dynamic_batch, "guarded", guarded)


def little_memory(patch: pytest.MonkeyPatch) -> None:
    """Leave less than half of what a row of 1,024 tokens needs; a trial of less fits."""
    patch.setattr(dynamic_batch, "free_bytes", lambda device: 1_000_000)
    patch.setattr(dynamic_batch, "fits", lambda plan, limit, device: True)


def failing_trial(patch: pytest.MonkeyPatch) -> None:
    """Leave so much memory that a size is tried, in a process that fails."""
    ended = SimpleNamespace(returncode=1, stderr="ValueError: no such file\n")
    patch.setattr(dynamic_batch, "free_bytes", lambda device: 400_000)
    patch.setattr(
        dynamic_batch,
        "subprocess",
        SimpleNamespace(run=lambda *_, **__: ended, DEVNULL=None, PIPE=None),
    )


def exported(_: Path) -> None:
    """Export the run into `hf`, as a teacher."""
    assert run(["export", "demo", "--to", "hf", "--output", "hf"]).code == 0


HELD: list[Any] = []
"""Locks of folders that another process would hold."""

TECHNIQUES = {
    "assemble/autotune:measure#1": Case(f"{ONE} attention=measured", fake=four_rows),
    "train/guard:compare#1": Case(f"{ONE} {CHUNKED}", fake=twice_the_loss),
    "techniques/precision/fp16_loss_scaling:Fp16LossScaling._recover#1": Case(
        f"{ONE} guard=false optimizer.lr=2e-3 model.precision=fp16 --with fp16_loss_scaling "
        "techniques.fp16_loss_scaling.patience=1",
        fake=no_scale_fits,
    ),
    "techniques/memory/dynamic_batch:MicroBatchSize.shrink#1": Case(SIZED, fake=one_row_too_many),
    "techniques/memory/dynamic_batch:DynamicBatch.first_rows#1": Case(
        f"{SIZED} {LONG}", fake=little_memory
    ),
    "techniques/memory/dynamic_batch:fits#1": Case(SIZED, fake=failing_trial),
    "techniques/adapt/distillation:Distillation._source#1": Case(
        f"{ONE} guard=false {TEACHER} model.vocab=512", exported
    ),
    "techniques/adapt/distillation:Distillation._source#2": Case(
        f"{ONE} guard=false {TEACHER} techniques.distillation.top_k=999", exported
    ),
    "techniques/adapt/distillation:Distillation._source#3": Case(
        f"{ONE} guard=false {TEACHER} data.sequence_length=32", exported
    ),
    "cli/distill:_plan#1": Case(
        "distill demo {tiny} --without distillation --dry-run",
        fills={", without a teacher": " goal.steps=1"},
    ),
    "cli/distill:_plan#2": Case(
        "distill demo runs/demo goal.steps=1 --dry-run",
        before=lambda run: Path("x.txt").write_text("The mill stands by the river. " * 99),
        fills={"PATH": "x.txt goal.steps=1 --dry-run"},
    ),
    "optim/bf16_adamw:Bf16AdamW.step#1": Case(
        "train runs/own/plan.toml --resume --checkpoint step-3 goal.steps=4 name=next "
        "techniques.bf16_parameters.rounding=stochastic",
        rounded,
    ),
    "tuner/command:locked#2": Case(
        "tune {tiny} --minutes 0.01",
        lambda _: HELD.append(locked(Path("runs/demo-tune"), "", "")),
        prose={"the same command once that process has ended": "a process"},
    ),
}
"""Each way of these remedies leads to another state."""
