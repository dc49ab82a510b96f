"""Ranks that keep copies in memory, as on two hosts of two ranks; one is killed in a step."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from headrace.cli.app import app
from headrace.train import session
from headrace.train import train as trainer
from headrace.train.memory_copies import MemoryCopies

LOCAL = 2
"""Ranks of a host."""


def train(*, memory: str, dies: int, at: int, argv: list[str]) -> None:
    """Train; a rank is killed before it takes the step of an index, where it begins afresh."""
    rank, plain = int(os.environ["RANK"]), trainer.step
    root = Path(memory) / f"host-{rank // LOCAL}"
    root.mkdir(parents=True, exist_ok=True)
    session.MemoryCopies = partial(MemoryCopies, root=root, local_ranks=LOCAL)

    def step(build: Any, micros: Any, index: int, inspect: Any = None) -> Any:
        if rank == dies and index == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(build, micros, index, inspect)

    trainer.step = step
    sys.argv = ["headrace", "train", *argv]
    app()


if __name__ == "__main__":  # as torchrun starts it, once more after the first time
    who = 3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else -1
    train(memory=sys.argv[1], dies=who, at=7, argv=sys.argv[2:])
