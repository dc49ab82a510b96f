"""Tied embeddings rewrite one key; one matrix then serves both ends, with one gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from facts import in_order

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.data.ingest import prepare
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.techniques.design.tied_embeddings import TiedEmbeddings
from headrace.train.train import step


@pytest.fixture
def tied(tiny_plan: Callable[..., Any], make_tiny: Callable[..., Build]) -> Callable[[], Build]:
    """The tiny build with the technique, which has no knob to name it by."""

    def make() -> Build:
        text = tiny_plan("model.layers=2", "model.init_std=0.2").to_toml()
        lines = [line for line in text.splitlines() if not line.startswith("tied_embeddings")]
        plan = Plan.read("\n".join(lines), catalogue(), with_=["tied_embeddings"])
        build = make_build(plan, prepare(plan), World(), torch.device("cpu"))
        build.phases = make_tiny().phases
        return build

    return make


def test_the_model_is_the_one_that_the_key_gives(
    tied: Callable[[], Build],
    make_tiny: Callable[..., Build],
    batch: Callable[[Build], list[Any]],
) -> None:
    left, right = tied(), make_tiny("model.tied_embeddings=true")
    assert left.config == right.config
    losses = [float(step(build, batch(build), 0)[0]) for build in (left, right)]
    assert losses[0] == losses[1]
    for name, parameter in right.model.named_parameters():
        assert left.model.get_parameter(name).equal(parameter)
    assert TiedEmbeddings().active(left).active
    assert "head.weight" not in dict(left.model.named_parameters())
    assert not TiedEmbeddings().active(make_tiny()).active


def test_giving_the_key_differently_is_an_error(tiny_plan: Callable[..., Any]) -> None:
    text, key = tiny_plan().to_toml(), "model.tied_embeddings=false"
    with pytest.raises(
        ConfigError, match=in_order("model.tied_embeddings", False, "tied_embeddings", True)
    ):
        Plan.read(text, catalogue(), overrides=[key], with_=["tied_embeddings"])
    written = tiny_plan(key).to_toml()
    named = Plan.read(written, catalogue(), with_=["tied_embeddings"])
    assert named.model.tied_embeddings, "the command is stronger than the file's key"
