"""Timed algorithms: a flag that is set and restored, convolutions that were launched, refusals."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.model.convolution import CUDNN
from headrace.plan.technique import Context, Supported, Unsupported
from headrace.techniques.compile import cudnn_autotune
from headrace.techniques.compile.cudnn_autotune import CudnnAutotune, timed_algorithms
from headrace.train.train import step

Make = Callable[..., Build]
SHORT, ON = "techniques.short_convolution.between=1", "techniques.cudnn_autotune={}"
PACKING = "techniques.document_packing={}"
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def flag() -> Iterator[None]:
    """Whatever a test does to the process."""
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


def take_steps(build: Build, count: int = 1) -> None:
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        for index in range(count):
            step(build, build.loader.step(index).micros, index)


def test_the_flag_is_set_and_restored() -> None:
    for before in (False, True):
        torch.backends.cudnn.benchmark = before
        with pytest.raises(KeyError), timed_algorithms():
            assert torch.backends.cudnn.benchmark
            raise KeyError
        assert torch.backends.cudnn.benchmark is before


def test_is_in_force_where_cudnn_convolves_under_the_flag(
    make_tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of the evidence alone is none: the flag, a launch, and whose launch it is."""
    build = make_tiny(SHORT)
    technique = CudnnAutotune()
    technique.apply(build)
    take_steps(build)
    found = technique.active(build)
    assert not found.active and found.numbers == {"steps": 1, "launched": 1}
    monkeypatch.setattr(cudnn_autotune, "libraries", lambda before: {CUDNN: 1})
    assert technique.active(build).active
    for others in ({}, {CUDNN: 1, "CudaDepthwise2d": 1}):
        monkeypatch.setattr(cudnn_autotune, "libraries", lambda before, found=others: found)
        assert not technique.active(build).active
    monkeypatch.setattr(cudnn_autotune, "libraries", lambda before: {CUDNN: 1})
    flags, build.runtime = build.runtime, []
    take_steps(build)
    build.runtime = flags
    assert not technique.active(build).active  # a step without the flag


def test_says_where_it_has_something_to_choose(
    tiny_plan: Callable[..., Any], make_tiny: Make
) -> None:
    def on_gpu(*keys: str) -> Supported | Unsupported:
        plan = tiny_plan("model.layers=2", ON, *keys)
        known = {"device": "cuda", "device_name": "GPU", "capability": (9, 0)}
        context: Any = Context(**{**vars(make_tiny().context), **known, "plan": plan})
        return CudnnAutotune().supports(context)

    assert isinstance(on_gpu(SHORT), Supported)
    plain, packed = on_gpu(), on_gpu(SHORT, PACKING)
    assert isinstance(plain, Unsupported) and "no convolutions" in plain.reason
    assert plain.remedy.text == "--with short_convolution"
    assert isinstance(packed, Unsupported) and packed.remedy.text == "--without document_packing"
    with pytest.raises(UnsupportedError, match="cpu has no cuDNN"):
        make_tiny(ON, SHORT)


GPU = ["device=cuda", "model.dim=64", "model.heads=4", SHORT, ON]


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(
    ("precision", "compiled"),
    [("bf16", False), ("fp32", False), pytest.param("bf16", True, marks=pytest.mark.slow)],
)
def test_a_gpus_convolutions_are_cudnns(make_tiny: Make, precision: str, compiled: bool) -> None:
    more = ["techniques.torch_compile.scope=block"] * compiled
    build = make_tiny(*GPU, f"model.precision={precision}", *more)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        take_steps(build, 2)
    assert check_active(build)["cudnn_autotune"].numbers["steps"] == 2
    launched = {event.key for event in seen.key_averages()}
    assert "aten::cudnn_convolution" in launched
    assert not any("conv_depthwise" in key for key in launched)


@pytest.mark.gpu
@on_a_gpu
def test_why_features_are_last() -> None:
    """With features first torch takes its one kernel in bf16, and cuDNN has nothing to choose."""
    weight = torch.zeros(64, 1, 3, device="cuda", dtype=torch.bfloat16)
    found = torch._C._select_conv_backend(
        weight.new_zeros(2, 64, 34),
        weight,
        bias=None,
        stride=[1],
        padding=[0],
        dilation=[1],
        transposed=False,
        output_padding=[0],
        groups=64,
        bias_sizes=None,
    )
    assert str(found).endswith("CudaDepthwise2d")
