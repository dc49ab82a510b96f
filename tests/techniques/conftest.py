"""Build tiny plans with techniques, and make batches for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import house
import pytest
import torch

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.data.ingest import prepare
from headrace.data.loader import Micro
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.train.train import step

STATE_LINES = ("parameters", "gradients", "optimizer")


@pytest.fixture(scope="module")
def data(corpus: Path, prepared_folder: Path) -> dict[str, str]:
    """Where the tests' text lies, prepared once before several ranks want it."""
    house.put_data_in(str(corpus), str(prepared_folder))
    house.prepare(house.make_plan())
    return {"corpus": str(corpus), "prepared": str(prepared_folder)}


@pytest.fixture
def make_tiny(tiny_plan: Callable[..., Plan]) -> Callable[..., Build]:
    """Return what builds the tiny plan, two layers deep, with `key=value` overrides."""

    def make(*overrides: str) -> Build:
        plan = tiny_plan("model.layers=2", "model.init_std=0.2", *overrides)
        return make_build(plan, prepare(plan), World(), torch.device(plan.device))

    return make


@pytest.fixture
def batch() -> Callable[[Build], list[Micro]]:
    """Return the first step's micro-batches."""

    def first(build: Build) -> list[Any]:
        return build.loader.step(0).micros

    return first


@pytest.fixture
def states(batch: Callable[[Build], list[Micro]]) -> Callable[[Build], tuple[Any, Any]]:
    """Bytes of weights, gradients and optimizers after a step: as they are, and as predicted.

    The matrices that are predicted, and who updates each, are the model's.
    """

    def after_a_step(build: Build) -> tuple[dict[str, float], dict[str, float]]:
        step(build, batch(build), 0)
        ledger, weights = build.predicted(build.plan), dict(build.model.named_parameters())
        assert {name: m.shape for name, m in ledger.matrices.items()} == {
            name: tuple(p.shape) for name, p in weights.items() if p.ndim >= 2
        }
        owners = {name: owner for owner, named in build.routed.items() for name in named}
        assert all(owners.get(name, "") == m.by for name, m in ledger.matrices.items())
        held = [s for optimizer in build.optimizers.values() for s in optimizer.state.values()]
        found = (
            sum(p.data.nbytes for p in weights.values()),
            sum(p.grad.nbytes for p in weights.values() if p.grad is not None),
            sum(t.nbytes for state in held for name, t in state.items() if name != "step"),
        )
        lines = {name: ledger.memory[name].bytes for name in STATE_LINES}
        return dict(zip(STATE_LINES, found, strict=True)), lines

    return after_a_step
