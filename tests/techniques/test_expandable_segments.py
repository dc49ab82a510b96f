"""Read the allocator's settings in and after a run, and where tensors lie."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.data.loader import Micro
from headrace.plan.technique import Unsupported
from headrace.techniques.memory import expandable_segments as module
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("before", "inside", "after"),
    [
        ("", "expandable_segments:True", "expandable_segments:False"),
        (
            "max_split_size_mb:64",
            "max_split_size_mb:64,expandable_segments:True",
            "max_split_size_mb:64,expandable_segments:False",
        ),
        (
            "expandable_segments:False,max_split_size_mb:64",
            "max_split_size_mb:64,expandable_segments:True",
            "expandable_segments:False,max_split_size_mb:64",
        ),
        ("expandable_segments:True", "expandable_segments:True", "expandable_segments:True"),
    ],
)
def test_other_settings_stay_and_it_is_put_back(
    monkeypatch: pytest.MonkeyPatch, before: str, inside: str, after: str
) -> None:
    now = [before]
    monkeypatch.setattr(module, "_settings", lambda: now[0])
    monkeypatch.setattr(module, "_set_settings", lambda settings: now.__setitem__(0, settings))
    seen = {"grows": True}
    with pytest.raises(KeyError), module._expandable(torch.device("cpu"), seen):
        assert now == [inside] and not seen["grows"]  # a host has no segments
        raise KeyError
    assert now == [after]


def test_torch_takes_and_tells_the_settings() -> None:
    before = module._settings()
    tells = hasattr(torch._C, "_accelerator_getAllocatorSettings")  # torch 2.11 does not
    with module._expandable(torch.device("cpu"), {}):
        assert ("expandable_segments:True" in module._settings()) == tells
    assert "expandable_segments:True" not in module._settings() or before


def test_bytes_are_counted_where_tensors_begin() -> None:
    tensors = [torch.zeros(8), torch.zeros(16), torch.zeros(4)]
    segments = [{"address": t.data_ptr(), "total_size": t.nbytes} for t in tensors[:2]]
    assert module._bytes_inside(segments, tensors) == 32 + 64
    assert module._bytes_inside([], tensors) == 0


def test_refused_off_cuda_and_on_windows(make_tiny: Make, monkeypatch: Any) -> None:
    with pytest.raises(UnsupportedError, match="not the CUDA allocator's") as caught:
        make_tiny("techniques.expandable_segments={}")
    assert "device=cuda" in caught.value.remedy.text
    context = replace(make_tiny().context, device="cuda")
    monkeypatch.setattr(sys, "platform", "win32")
    assert isinstance(module.ExpandableSegments().supports(context), Unsupported)


@pytest.mark.gpu
@needs_cuda
def test_gradients_and_states_lie_in_expandable_segments(make_tiny: Make, batch: Batch) -> None:
    build = make_tiny("techniques.expandable_segments={}", "device=cuda", "model.dim=1024")
    with pytest.raises(Exception, match="not in force"):
        check_active(build)
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        step(build, batch(build), 0)
        numbers = check_active(build)["expandable_segments"].numbers
    assert numbers["segments"] > 0
    assert 0 < numbers["own_bytes"] <= numbers["mapped_bytes"]


@pytest.mark.gpu
@needs_cuda
def test_fixed_segments_are_told_apart() -> None:
    """Without the setting the same question has the other answer."""
    before = module._settings()
    module._set_settings("expandable_segments:False")
    try:
        assert not module._new_memory_grows(torch.device("cuda"))
    finally:
        module._set_settings(before or "expandable_segments:False")
