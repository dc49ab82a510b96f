"""torch's flash kernel alone: the trunk's results, and a refusal of every mask that it lacks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pieces import h200, qkv
from torch import Tensor

from headrace.core.errors import UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.model.attention import Sdpa
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.flash_attention import FlashAttention, FlashSdpa
from headrace.techniques.attention.sliding_window import SlidingWindow
from headrace.techniques.data.document_packing import DocumentPacking

PLAN = Plan.model_validate({"goal": {"steps": 1}})
GPU = h200()


def test_a_forward_pass_and_a_query_over_a_cache_are_the_trunks() -> None:
    q, k, v = qkv(13)
    for query in (q, q[:, -1:]):
        torch.testing.assert_close(FlashSdpa()(query, k, v, None), Sdpa()(query, k, v, None))


def test_no_other_kernel_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, seen = torch.backends.cuda, []

    def look(query: Tensor, *args: object, **how: object) -> Tensor:
        seen.append(
            (
                cuda.flash_sdp_enabled(),
                cuda.cudnn_sdp_enabled(),
                cuda.math_sdp_enabled(),
                cuda.mem_efficient_sdp_enabled(),
            )
        )
        return query

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", look)
    FlashSdpa()(*qkv(13), None)
    Sdpa()(*qkv(13), None)
    assert seen == [(True, False, False, False), (True, True, True, True)]


def test_refuses_where_it_has_no_kernel() -> None:
    assert isinstance(FlashAttention().supports(GPU), Supported)
    assert isinstance(FlashAttention().supports(replace(GPU, precision="fp16")), Supported)
    wide = Plan.model_validate({"goal": {"steps": 1}, "model": {"head_dim": 264}})
    for how, says in (
        ({"device": "cpu"}, "not cpu"),
        ({"device": "mps"}, "not mps"),
        ({"capability": (7, 5)}, "Ampere"),
        ({"precision": "fp32"}, "half precision"),
        ({"plan": wide}, "have 264"),
    ):
        answer = FlashAttention().supports(replace(GPU, **how))
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy.text


@pytest.mark.parametrize("other", [DocumentPacking(), SlidingWindow(window=4)])
def test_refuses_what_would_need_a_dense_mask(other: DocumentPacking | SlidingWindow) -> None:
    plan = PLAN.replaced(techniques={other.name(): other, "flash_attention": FlashAttention()})
    answer = FlashAttention().supports(replace(GPU, plan=plan))
    assert isinstance(answer, Unsupported) and other.name() in answer.reason
    assert "varlen_attention" in answer.remedy.text and "flex_attention" in answer.remedy.text


@pytest.mark.parametrize(
    "spec", [MaskSpec(document=True), MaskSpec(window=3), MaskSpec(causal=False)]
)
def test_a_mask_that_comes_all_the_same_ends_the_run(spec: MaskSpec) -> None:
    with pytest.raises(UnsupportedError, match="no mask"):
        FlashSdpa().prepare(spec, Rows(torch.arange(4)[None]), 4)


def test_its_evidence_is_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in force on a CPU, whose kernel has another name, nor where the trunk launches one."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    config = ModelConfig(dim=32, heads=4, kv_heads=2)

    def evidence(attend: Sdpa) -> Any:
        build: Any = SimpleNamespace(
            config=config,
            device=torch.device("cpu"),
            context=GPU,
            model=SimpleNamespace(attend=attend),
        )
        return FlashAttention().active(build)

    assert not evidence(FlashSdpa()).active and not evidence(Sdpa()).active

    def launch(query: Tensor, *args: object, **how: object) -> Tensor:
        with torch.profiler.record_function("void pytorch_flash::flash_fwd_kernel<...>"):
            return query

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", launch)
    assert evidence(FlashSdpa()).active and not evidence(Sdpa()).active
    assert "flash_fwd_kernel" in evidence(FlashSdpa()).detail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [8, 20, 64])
@pytest.mark.parametrize("length", [1, 13, 200, 513])
def test_the_kernel_equals_a_dense_reference(length: int, width: int) -> None:
    """Results are in bf16 within its rounding of the fp32 reference, forward and every gradient."""
    rows, seen = Rows(torch.arange(length, device="cuda")[None]), []
    reference = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    for backend, dtype in ((FlashSdpa(), torch.bfloat16), (Sdpa(), torch.float32)):
        given = [x.bfloat16().to(dtype).requires_grad_() for x in qkv(length, width, "cuda")]
        mask = backend.prepare(MaskSpec(), rows, length) if dtype != torch.float32 else reference
        out = backend(*given, mask)
        weigh = torch.linspace(-1, 1, width, device="cuda").to(dtype)
        seen.append([out, *torch.autograd.grad((out * weigh).sum(), given)])
    for found, right in zip(*seen, strict=True):
        off = (found.float() - right).norm() / right.norm().clamp(min=1e-6)
        assert off < 0.02 or (length == 1 and found.abs().max() < 1e-2), f"off by {off}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_query_over_a_cache_on_a_gpu() -> None:
    q, k, v = (x.bfloat16() for x in qkv(77, 64, "cuda"))
    found = FlashSdpa()(q[:, -1:], k, v, None)
    right = Sdpa()(q.float(), k.float(), v.float(), None)[:, -1:]
    torch.testing.assert_close(found.float(), right, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # torch warns of each kernel's reason
def test_what_it_has_no_kernel_for_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="No available kernel"):
        FlashSdpa()(*qkv(13, 64, "cuda"), None)  # fp32
