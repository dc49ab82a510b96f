"""A rank of a run to which something happens at a step: what each kind of fault does to it."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.cli.app import app
from headrace.parallel.layout import local_of
from headrace.train import checkpoint
from headrace.train import train as trainer

SLOW_S = 0.05
"""Seconds by which the slow rank is late in each step."""


def kill(build: Any) -> None:
    """End the process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(build: Any) -> None:
    """Stop the process, as a debugger or a scheduler may."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(build: Any) -> None:
    """Wait for what never comes."""
    threading.Event().wait()


def call_another(build: Any) -> None:
    """Call a collective of a group in which no other rank calls one."""
    dist.all_reduce(torch.zeros(7), group=build.world.group("data"))


def fail(build: Any) -> None:
    """Raise an error that no other rank has."""
    raise ValueError("a bug of one rank")


def flip(build: Any) -> None:
    """Change one bit of one weight."""
    weight = local_of(next(build.model.parameters()).data).view(-1)
    weight[:1].view(torch.int32).bitwise_xor_(1 << 22)


def late(engine: Any) -> Any:
    """Return an engine that takes longer."""

    def run(*given: Any) -> Any:
        time.sleep(SLOW_S)
        return engine(*given)

    return run


AT_STEP: dict[str, Callable[[Any], None]] = {
    "kill": kill,
    "stop": stop,
    "hang": hang,
    "call_another": call_another,
    "fail": fail,
    "flip": flip,
}


def train(*, fault: str, rank: int, at_step: int, argv: list[str]) -> None:
    """Train; `rank` has the fault before the step of that number, or from it on.

    Args:
        fault: one of `AT_STEP`, "slow", or "full": its disk takes no checkpoint.
        rank: which one.
        at_step: the first step is 0.
        argv: what stands behind `headrace train`.
    """
    step, save = trainer.step, checkpoint.save_file

    def stepped(build: Any, micros: Any, index: int, inspect: Any = None) -> Any:
        if build.world.rank == rank and index == at_step and fault in AT_STEP:
            AT_STEP[fault](build)
        if build.world.rank == rank and index == at_step and fault == "slow":
            build.engine = late(build.engine)
        return step(build, micros, index, inspect)

    def saved(tensors: Any, path: Path) -> None:
        if fault == "full" and os.environ["RANK"] == str(rank):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(tensors, path)

    trainer.step, checkpoint.save_file = stepped, saved
    sys.argv = ["headrace", "train", *argv]
    app()
