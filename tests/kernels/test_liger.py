"""Liger's kernels in their calls against torch's own operations; on a GPU, with the package."""

import pytest
import torch
from torch import Tensor

from headrace.kernels import liger, swiglu
from headrace.kernels import rms_norm as norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("liger_kernel")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compare(ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> None:
    """Within a few roundings; an intermediate is rounded too, and long sums in fp32."""
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.dtype == wanted.dtype
        unit = max(4 * torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)
        most = wanted.abs().max().item()
        torch.testing.assert_close(found, wanted, rtol=unit, atol=unit * most)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 33), (1037, 2048), (40_003, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm(shape: tuple[int, ...], dtype: torch.dtype, compiled: bool) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(shape[-1], device="cuda", requires_grad=True)
    weigh, seen = torch.randn_like(x), []
    ours = torch.compile(liger.rms_norm, fullgraph=True) if compiled else liger.rms_norm
    for call in (ours, norm.reference):
        out = call(x, weight, 1e-5)
        seen.append([out, *torch.autograd.grad(out, (x, weight), weigh)])
    compare(*seen, dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("tokens", "features", "group"), [(15, 33, 11), (7, 33, 33), (1037, 5632, 704)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_activation(
    tokens: int, features: int, group: int, dtype: torch.dtype, compiled: bool
) -> None:
    given = torch.randn(tokens, 2 * features, device="cuda", dtype=dtype, requires_grad=True)
    kept = given.detach().clone()
    weigh, seen = torch.randn(tokens, features, device="cuda", dtype=dtype), []
    ours = torch.compile(liger.silu_mul, fullgraph=True) if compiled else liger.silu_mul
    for call in (ours, swiglu.reference):
        out = call(given, group)
        seen.append([out, *torch.autograd.grad(out, given, weigh)])
    compare(*seen, dtype)
    assert given.equal(kept), "the backward pass wrote over its input"
