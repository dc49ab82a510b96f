"""cuDNN's kernels alone: the trunk's results, which masks they take, and where they are refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pieces import h200, qkv
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.model.attention import Sdpa, check_mask
from headrace.model.mask import BlockPattern, MaskSpec, Rows
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.cudnn_attention import CudnnAttention, CudnnSdpa

B, H = 2, 4  # of qkv
GPU = h200()


def test_no_other_kernel_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, seen = torch.backends.cuda, []

    def look(query: Tensor, *args: object, **how: object) -> Tensor:
        seen.append(
            (
                cuda.cudnn_sdp_enabled(),
                cuda.flash_sdp_enabled(),
                cuda.math_sdp_enabled(),
                cuda.mem_efficient_sdp_enabled(),
            )
        )
        return query

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", look)
    CudnnSdpa()(*qkv(13), None)
    assert seen == [(True, False, False, False)]


@pytest.mark.parametrize(
    "spec",
    [
        MaskSpec(prefix=True),
        MaskSpec(alibi=H),
        MaskSpec(soft_cap=2.0),
        MaskSpec(blocks=BlockPattern(2)),
    ],
    ids=["prefix", "alibi", "soft_cap", "blocks"],
)
def test_a_mask_that_is_not_tested_is_refused(spec: MaskSpec) -> None:
    config = ModelConfig(heads=H, position="none")
    with pytest.raises(ConfigError, match=r"cudnn_attention .* does not know"):
        check_mask(config, CudnnSdpa(), spec)
    check_mask(config, CudnnSdpa(), MaskSpec(document=True, window=3))


def test_refuses_where_it_has_no_kernel() -> None:
    assert isinstance(CudnnAttention().supports(GPU), Supported)
    for how, says in (
        ({"device": "cpu"}, "not cpu"),
        ({"capability": (7, 5)}, "Ampere"),
        ({"precision": "fp32"}, "half precision"),
    ):
        answer = CudnnAttention().supports(replace(GPU, **how))
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy.text


def test_its_evidence_is_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in force where nothing of cuDNN is launched, nor where others are allowed too."""

    def evidence(attend: Sdpa) -> Any:
        build: Any = SimpleNamespace(
            config=ModelConfig(dim=32, heads=4, kv_heads=2),
            device=torch.device("cpu"),
            model=SimpleNamespace(attend=attend),
        )
        return CudnnAttention().active(build)

    assert not evidence(Sdpa()).active

    def launch(query: Tensor, *args: object, **how: object) -> Tensor:
        with torch.profiler.record_function("cudnn_generated_fort_native_sdpa_sm90_flash_fprop"):
            return query

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", launch)
    assert evidence(CudnnSdpa()).active and not evidence(Sdpa()).active


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("length", [13, 200, 513])
@pytest.mark.parametrize(
    "spec", [MaskSpec(), MaskSpec(document=True), MaskSpec(document=True, window=5)], ids=str
)
def test_the_kernel_equals_a_dense_reference(spec: MaskSpec, length: int, width: int) -> None:
    """Results are in bf16 within its rounding of the fp32 reference, forward and every gradient."""
    places = torch.arange(length, device="cuda").expand(B, -1)
    cuts = torch.tensor([[length // 3], [1]], device="cuda")
    rows, seen = Rows(places, (places >= cuts).int()), []
    for backend, dtype in ((CudnnSdpa(), torch.bfloat16), (Sdpa(), torch.float32)):
        given = [x.bfloat16().to(dtype).requires_grad_() for x in qkv(length, width, "cuda")]
        out = backend(*given, backend.prepare(spec, rows, length))
        weigh = torch.linspace(-1, 1, width, device="cuda").to(dtype)
        seen.append([out, *torch.autograd.grad((out * weigh).sum(), given)])
    for found, right in zip(*seen, strict=True):
        off = (found.float() - right).norm() / right.norm()
        assert off < 0.02, f"off by {off}"
