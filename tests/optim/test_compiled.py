"""A compiled update: one graph for each shape, and what it writes into marked in every call."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config

from headrace.optim.compiled import ALIGNED, CompiledUpdates

STATIC = "_dynamo_static_input_type"


def add_(weights: list[Tensor], kept: Tensor) -> None:
    """Add what is kept to all weights."""
    for weight in weights:
        weight.add_(kept)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[bool]]]:
    """Which inputs of each graph were marked, as it was compiled to be recorded."""
    compiler, found = torch.compile, list[list[bool]]()

    def backend(graph: Any, inputs: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        found.append([STATIC in node.meta.get("tensor_dict", {}) for node in nodes])
        return graph

    monkeypatch.setattr(torch, "compile", lambda f, **how: compiler(f, backend=backend, **how))
    with config.patch({"triton.cudagraphs": True}):
        yield found


def given(rows: int) -> tuple[list[Tensor], Tensor]:
    """Two weights and what is kept, as new tensors at the addresses of one call before."""
    return [torch.ones(rows, 4).detach() for _ in range(2)], torch.ones(rows, 4)


def test_what_stays_is_marked_whenever_it_is_compiled(seen: list[list[bool]]) -> None:
    updates = CompiledUpdates("test")
    weights, kept = given(8)
    for anew in (False, True):
        if anew:
            torch.compiler.reset()
        there = [weight.detach() for weight in weights]
        updates.call(add_, (there, kept), [*there, kept])
    assert seen == [[True] * 3] * 2 and len(updates) == 1
    assert all(bool((weight == 3).all()) for weight in weights)
    updates.call(add_, given(4), [])
    assert len(updates) == 2 and seen[2] == [False] * 3


def test_what_lies_oddly_is_not_marked_and_has_a_graph_of_its_own(seen: list[list[bool]]) -> None:
    updates = CompiledUpdates("test")
    whole = torch.ones(2, 3, 3)
    for kept in whole:  # the second lies 36 bytes behind the first
        weights = [torch.ones(3, 3) for _ in range(2)]
        updates.call(add_, (weights, kept), [*weights, kept])
    assert whole[1].data_ptr() % ALIGNED
    assert len(updates) == 2 and seen == [[True] * 3, [False] * 3]


def test_nothing_is_marked_that_is_not_recorded(seen: list[list[bool]]) -> None:
    """And what lies oddly shares its graph."""
    updates = CompiledUpdates("test")
    with config.patch({"triton.cudagraphs": False}):
        for kept in torch.ones(2, 3, 3):
            weights = [torch.ones(3, 3) for _ in range(2)]
            updates.call(add_, (weights, kept), [*weights, kept])
    assert len(updates) == 1 and seen == [[False] * 3]
