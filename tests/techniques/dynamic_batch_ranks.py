"""What each rank of the test of dynamic_batch does: one of them runs out of memory in a step."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from tiny import PLAN

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.plan.plan import Plan
from headrace.train import train as trainer
from headrace.train.checkpoint import Saved

FULL = "CUDA out of memory. Tried to allocate 1.00 GiB."
WANT = ("techniques.dynamic_batch={}",)
SHORT = ("mesh.data=4", "batch.tokens=512", "goal.steps=4", "checkpoint.every_steps=2")
AT, WHO, MOST = 1, 2, 2
"""The step and the rank that is out of memory, and the rows that fit there."""


def run_out(build: Build) -> Build:
    """Let the backward pass of this rank run out of memory, in one step and of many rows."""
    rows = [0]
    build.model.register_forward_pre_hook(lambda model, given: rows.append(given[0].size(0)))

    def allocate(*_: Any) -> None:
        if build.world.rank == WHO and build.now["step"] == AT and rows[-1] > MOST:
            raise torch.OutOfMemoryError(FULL)

    build.model.embed.weight.register_hook(allocate)
    return build


def ran(corpus: str, prepared: str, name: str, *words: str) -> Path:
    """Run a plan and return its folder."""
    text = PLAN.format(corpus=corpus, prepared=prepared)
    plan = Plan.read(text, catalogue(), overrides=[*SHORT, f"name={name}", *words])
    return trainer.run(plan).folder


def shrink(corpus: str, prepared: str) -> None:
    """Compare weights, stream and loss with a run that was small from the start."""
    torch.set_num_threads(1)
    small = ran(corpus, prepared, "small", f"batch.micro_sequences={MOST}")
    trainer.make_build = lambda *a, **k: run_out(make_build(*a, **k))
    mine = ran(corpus, prepared, "mine", *WANT)
    if os.environ["RANK"] != "0":  # which writes what is compared
        return
    right, found = (json.loads((run / "report.json").read_text()) for run in (small, mine))
    assert found["stream_sha256"] == right["stream_sha256"]
    numbers = found["techniques"]["dynamic_batch"]["numbers"]
    assert (numbers["began_with"], numbers["rows"], numbers["shrinks"]) == (8, MOST, 2), numbers
    assert numbers["too_long"] == 0, numbers
    losses = [
        [json.loads(row)["loss"] for row in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (small, mine)
    ]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]))
    first, second = (Saved(run / "checkpoints" / "step-4") for run in (small, mine))
    assert second.values["techniques"]["dynamic_batch"] == {"rows": MOST, "shrinks": 2}
    for name in first.names_under("model/"):
        shape, dtype = first.shape_of(name)
        pair = [torch.empty(shape, dtype=dtype) for _ in range(2)]
        first.fill_(name, pair[0])
        second.fill_(name, pair[1])
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6)
