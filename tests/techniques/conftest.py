"""A tiny build with techniques, and batches for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.build import make_build
from headrace.core.plan import Plan
from headrace.data.ingest import prepare
from headrace.data.loader import Micro
from headrace.parallel.world import World
from headrace.sockets import Build


@pytest.fixture
def make_tiny(tiny_plan: Callable[..., Plan]) -> Callable[..., Build]:
    """The build of the tiny plan, two layers deep, with `key=value` overrides."""

    def make(*overrides: str) -> Build:
        plan = tiny_plan("model.layers=2", "model.init_std=0.2", *overrides)
        return make_build(plan, prepare(plan), World(), torch.device(plan.device))

    return make


@pytest.fixture
def batch() -> Callable[[Build], list[Micro]]:
    """The first step's micro-batches."""

    def first(build: Build) -> list[Any]:
        return build.loader.step(0).micros

    return first
