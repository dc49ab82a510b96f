"""Grouped-query attention rewrites one key, and says why where it cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from facts import in_order

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.plan.technique import Unsupported
from headrace.techniques.design.gqa import Gqa

HALF = "techniques.gqa.queries_per_key=2"


def test_the_model_is_the_one_that_the_key_gives(make_tiny: Callable[..., Build]) -> None:
    by_technique = make_tiny("model.heads=4", HALF)
    by_key = make_tiny("model.heads=4", "model.kv_heads=2")
    assert by_technique.config == by_key.config
    left, right = (dict(b.model.named_parameters()) for b in (by_technique, by_key))
    assert left.keys() == right.keys() and all(left[n].equal(right[n]) for n in left)
    assert Gqa().active(by_technique).active
    assert Gqa().active(by_technique).numbers == {"heads": 4, "kv_heads": 2}
    assert not Gqa(queries_per_key=4).active(by_key).active
    assert not Gqa().active(make_tiny("model.heads=4")).active


def test_giving_the_key_differently_is_an_error(tiny_plan: Callable[..., Any]) -> None:
    tiny_plan("model.heads=4", "model.kv_heads=2", HALF)
    with pytest.raises(ConfigError, match=in_order("model.kv_heads", 1, "gqa", 2)) as told:
        tiny_plan("model.heads=4", "model.kv_heads=1", HALF)
    assert told.value.remedy.changes == (("-gqa",),)


@pytest.mark.parametrize(("heads", "asked", "near"), [(6, 4, 3), (5, 2, 5), (4, 3, 2)])
def test_refuses_heads_that_do_not_divide(
    tiny_plan: Callable[..., Any], heads: int, asked: int, near: int
) -> None:
    plan = tiny_plan(
        f"model.heads={heads}", "model.head_dim=4", f"techniques.gqa.queries_per_key={asked}"
    )
    assert plan.model.kv_heads == 0, "the key is left alone"
    answer = Gqa(queries_per_key=asked).supports(make_context(plan, torch.device("cpu")))
    assert isinstance(answer, Unsupported)
    assert answer.remedy.text == f"techniques.gqa.queries_per_key={near}"
