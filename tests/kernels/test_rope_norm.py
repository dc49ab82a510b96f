"""The fused norm and rotation of heads against fp64; on a CPU in Triton's interpreter."""

import pytest
import torch
from test_rope import DTYPES, GPU, HOST, LARGE, SHAPES, angles
from torch import Tensor

from headrace.kernels.rope import reference_norm, rope_norm

pytest.importorskip("triton")
EPS = 1e-5


def exact(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def check(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, *, rows: int, factor: float = 1.0
) -> None:
    """Keys as they lie in a fused product, and gradients as attention gives them back."""
    B, T, H, K = shape
    draw = torch.Generator().manual_seed(0)
    fused = torch.randn(B, T, H, 3, K, generator=draw).to(device, dtype)
    grad = torch.randn(B, H, T, K, generator=draw).to(device, dtype).transpose(1, 2)
    weight = torch.randn(K, generator=draw).to(device)
    cos, sin = (factor * table for table in angles(rows, T, K, device))
    seen = []
    for call, wide in ((rope_norm, None), (exact, torch.float64)):
        ours = [t.to(wide or t.dtype).clone().requires_grad_() for t in (fused, weight)]
        tables = (t.to(wide or t.dtype) for t in (cos, sin))
        out = call(ours[0][:, :, :, 1], ours[1], EPS, *tables)
        seen.append((out, *torch.autograd.grad(out, ours, grad.to(out.dtype))))
    assert [t.dtype for t in seen[0]] == [dtype, dtype, torch.float32]
    for found, wanted in zip(*seen, strict=True):
        unit = 2 * torch.finfo(found.dtype).eps
        atol = max(unit, 8 * torch.finfo(torch.float32).eps) * wanted.abs().max().item()
        torch.testing.assert_close(found.double(), wanted, rtol=unit, atol=atol)


def test_torchs_own_operations_round_once() -> None:
    """A norm in bf16 would round before the turn and after it."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=draw) for s in ((2, 7, 5, 8), (8,)))
    x, (cos, sin) = x.bfloat16(), angles(2, 7, 8, "cpu")
    wanted = exact(x.double(), weight.double(), EPS, cos.double(), sin.double())
    found = reference_norm(x, weight, EPS, cos, sin)
    assert found.dtype == torch.bfloat16
    assert (found == wanted.bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", [HOST, GPU])
def test_equals_the_definition(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check(shape, dtype, device, rows=1 if dtype == torch.float16 else shape[0])


@pytest.mark.parametrize("device", [HOST, GPU])
def test_scaled_tables_and_a_program_that_adds_up_many_heads(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.kernels.rope_triton.PARTS", 2)
    monkeypatch.setattr("headrace.kernels.rope_triton.TILE_PAIRS", 8)
    check((2, 7, 3, 6), torch.float32, device, rows=2, factor=1.4)


@pytest.mark.parametrize("device", [HOST, GPU])
def test_a_frozen_weight(device: str) -> None:
    x = torch.randn(2, 3, 2, 6, device=device, requires_grad=True)
    weight, tables = torch.randn(6, device=device), angles(1, 3, 6, device)
    seen = [
        torch.autograd.grad(call(x, weight, EPS, *tables).sin().sum(), x)[0]
        for call in (rope_norm, reference_norm)
    ]
    torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-6)


def test_is_an_operation_that_a_compiler_can_take() -> None:
    if not torch.cuda.is_available():
        x = torch.randn(2, 4, 3, 6).transpose(1, 2).requires_grad_()
        given = x, torch.randn(6, requires_grad=True), EPS, *angles(1, 3, 6, "cpu")
        torch.library.opcheck(torch.ops.headrace.rope_norm.default, given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_batches(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(shape, dtype, "cuda", rows=1)
    check(shape, dtype, "cuda", rows=shape[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_without_a_graph_break(dtype: torch.dtype) -> None:
    fused = torch.randn(2, 5, 3, 3, 6, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(6, device="cuda", requires_grad=True)
    tables = angles(1, 5, 6, "cuda")

    def around(fused: Tensor, weight: Tensor) -> Tensor:
        return rope_norm((fused * 2)[:, :, :, 1], weight, EPS, *tables).float().sin().sum()

    compiled = torch.compile(around, fullgraph=True)
    found = torch.autograd.grad(compiled(fused, weight), (fused, weight))
    wanted = torch.autograd.grad(around(fused, weight), (fused, weight))
    for ours, theirs in zip(found, wanted, strict=True):
        unit = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=unit, atol=unit)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("device", [HOST, GPU])
def test_heads_that_are_not_there_add_nothing_without_an_eps(device: str) -> None:
    """A tile's rows beyond the last head are zeros, whose root has no inverse."""
    x = torch.randn(1, 3, 1, 8, device=device)
    weight = torch.randn(8, device=device, requires_grad=True)
    out = rope_norm(x, weight, 0.0, *angles(1, 3, 8, device))
    (found,) = torch.autograd.grad(out.sum(), weight)
    assert found.isfinite().all()
