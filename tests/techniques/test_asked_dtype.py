"""Check that techniques ask the attention backend for evidence in the run's own precision."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.assemble.sockets import Build

Make = Callable[..., Build]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ASKING = {
    "alibi": (),
    "logit_soft_cap": (),
    "prefix_lm": ("techniques.prefix_lm.tokens=5",),
    "sliding_window": ("techniques.sliding_window.window=5",),
    "sparse_attention": (
        "techniques.sparse_attention.block=2",
        "techniques.sparse_attention.local=1",
        "techniques.sparse_attention.random=1",
    ),
}


class Spy:
    """A backend that notes what it is asked in."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seen = inner, set[torch.dtype]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        self.seen.add(q.dtype)
        return self.inner(q, k, v, mask)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", ASKING)
def test_the_backend_is_asked_in_the_runs_precision(
    make_tiny: Make, name: str, precision: str
) -> None:
    build = make_tiny(*(ASKING[name] or (f"techniques.{name}={{}}",)))
    build.context = replace(build.context, precision=precision)
    model: Any = build.model
    spy = model.attend = Spy(model.attend)
    for block in model.blocks.values():
        block.mixer.attend = spy
    evidence = build.plan.techniques[name].active(build)
    assert spy.seen == {DTYPES[precision]} == {build.dtype}
    assert evidence.active, evidence.detail


@pytest.mark.parametrize("precision", DTYPES)
def test_scores_far_apart_are_read_in_every_precision(make_tiny: Make, precision: str) -> None:
    """Sixteen heads' steepest slope, and a cap of 50, are beyond what fp16's weights can show."""
    wide = ("model.dim=64", "model.heads=16", "data.sequence_length=128", "batch.tokens=512")
    for name, lost in (("alibi", {"alibi": 0}), ("logit_soft_cap", {"soft_cap": 0.0})):
        build = make_tiny(*wide, f"techniques.{name}={{}}")
        build.context = replace(build.context, precision=precision)
        technique = build.plan.techniques[name]
        assert technique.active(build).active, technique.active(build).detail
        build.model.mask = replace(build.model.mask, **lost)
        assert not technique.active(build).active


@pytest.mark.parametrize("precision", DTYPES)
def test_autocast_is_in_the_runs_precision(make_tiny: Make, precision: str) -> None:
    build = make_tiny()
    build.context = replace(build.context, precision=precision)
    with build.autocast():
        found = torch.ones(2, 2) @ torch.ones(2, 2)
    assert found.dtype == build.dtype == DTYPES[precision]
