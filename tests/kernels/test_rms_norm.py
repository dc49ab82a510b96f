"""The fused norm against torch's own operations; on a CPU in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.rms_norm import reference, rms_norm

pytest.importorskip("triton")
EPS = 1e-5
SHAPES = {"even": (4, 64), "odd": (3, 5, 33), "few features": (7, 3), "one row": (1, 130)}
LARGE = {"wide": (1037, 2048), "long": (40_003, 576), "widest": (5, 16_384)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HOST = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled"))
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def both(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, weight: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """(found, wanted in fp64) of the result and of the two gradients."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=draw) for size in (shape, shape[-1:], shape)]
    x, w, grad = (g.to(device, d) for g, d in zip(given, (dtype, weight, dtype), strict=True))
    seen = []
    for norm, kind in ((rms_norm, None), (_exact, torch.float64)):
        ours = [t.to(kind).requires_grad_() if kind else t.clone().requires_grad_() for t in (x, w)]
        out = norm(*ours, EPS)
        seen.append([out, *torch.autograd.grad(out, ours, grad.to(out.dtype))])
    assert [t.dtype for t in seen[0]] == [dtype, dtype, weight]
    return list(zip(*seen, strict=True))


def _exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def check(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Within two roundings to the result's dtype, and fp32's over a sum of rows."""
    for found, wanted in pairs:
        unit = torch.finfo(found.dtype).eps
        most = wanted.abs().max().item()
        atol = max(2 * unit, 8 * torch.finfo(torch.float32).eps) * most
        torch.testing.assert_close(found.double(), wanted, rtol=2 * unit, atol=atol)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", [HOST, GPU])
def test_equals_the_definition(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check(both(shape, dtype, device))


@pytest.mark.parametrize("device", [HOST, GPU])
def test_the_weight_may_be_in_half_precision(device: str) -> None:
    check(both((3, 33), torch.bfloat16, device, torch.bfloat16))


@pytest.mark.parametrize("device", [HOST, GPU])
def test_a_program_adds_up_many_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kernels.rms_norm_triton.PARTS", 2)
    monkeypatch.setattr("headrace.kernels.rms_norm_triton.TILE_NUMBERS", 64)
    check(both((23, 33), torch.float32, device))


@pytest.mark.parametrize("device", [HOST, GPU])
def test_a_frozen_weight_and_strided_rows(device: str) -> None:
    x = torch.randn(5, 3, 8, device=device).transpose(0, 1).requires_grad_()
    weight = torch.randn(8, device=device)
    (found,) = torch.autograd.grad(rms_norm(x, weight, EPS).sum(), x)
    (wanted,) = torch.autograd.grad(reference(x, weight, EPS).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_is_an_operation_that_a_compiler_can_take() -> None:
    if not torch.cuda.is_available():
        given = torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True), EPS
        torch.library.opcheck(torch.ops.headrace.rms_norm.default, given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_rows_and_the_same_bits_again(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    first, second = both(shape, dtype, "cuda"), both(shape, dtype, "cuda")
    check(first)
    assert all(a.equal(b) for (a, _), (b, _) in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_without_a_graph_break(dtype: torch.dtype) -> None:
    x = torch.randn(6, 66, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(66, device="cuda", requires_grad=True)

    def around(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x * 2, weight, EPS).float().sin().sum()

    compiled = torch.compile(around, fullgraph=True)
    found = torch.autograd.grad(compiled(x, weight), (x, weight))
    wanted = torch.autograd.grad(around(x, weight), (x, weight))
    for ours, theirs in zip(found, wanted, strict=True):
        unit = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=unit, atol=unit)


@pytest.mark.parametrize("device", [HOST, GPU])
def test_rows_that_lie_otherwise_have_the_same_result(device: str) -> None:
    whole, weight = torch.randn(5, 3, 16, device=device), torch.randn(8, device=device)
    for x in (whole[..., :8].transpose(0, 1), whole[..., ::2]):
        assert rms_norm(x, weight, EPS).equal(rms_norm(x.contiguous(), weight, EPS))


def test_torchs_own_operations_round_once() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 16, generator=draw).bfloat16(), torch.randn(16, generator=draw)
    found, wanted = reference(x, weight, EPS), _exact(x.double(), weight.double(), EPS)
    assert found.dtype == torch.bfloat16
    assert (found == wanted.bfloat16()).float().mean() > 0.99
