"""The fused rotation against torch's own operations; on a CPU in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.rope import reference, rope, rope_norm

pytest.importorskip("triton")
SHAPES = {
    "even": (2, 4, 4, 8),
    "odd": (3, 5, 7, 6),
    "one head": (2, 7, 1, 66),
    "pair": (1, 3, 2, 2),
}
LARGE = {"many heads": (3, 1025, 33, 128), "small heads": (2, 777, 7, 24)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HOST = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled"))
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def angles(rows: int, length: int, head_dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine of any angles, [rows, length, 1, head_dim / 2]."""
    angle = torch.arange(rows * length * head_dim / 2).view(rows, length, 1, -1).to(device)
    return angle.cos(), angle.sin()


def check(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, *, rows: int, factor: float = 1.0
) -> None:
    """Keys as they lie in a fused product, and gradients as attention gives them back."""
    B, T, H, K = shape
    draw = torch.Generator().manual_seed(0)
    fused = torch.randn(B, T, H, 3, K, generator=draw).to(device, dtype).requires_grad_()
    grad = torch.randn(B, H, T, K, generator=draw).to(device, dtype).transpose(1, 2)
    cos, sin = (factor * table for table in angles(rows, T, K, device))
    seen = []
    for turn in (rope, reference):
        out = turn(fused[:, :, :, 1], cos, sin)
        seen.append((out, *torch.autograd.grad(out, fused, grad)))
    unit = 2 * torch.finfo(dtype).eps
    for found, wanted in zip(*seen, strict=True):
        assert found.dtype == dtype and found.shape == wanted.shape
        most = wanted.abs().max().item()  # a difference of products may be nearly zero
        torch.testing.assert_close(found, wanted, rtol=unit, atol=unit * most)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", [HOST, GPU])
def test_equals_torchs_own(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check(shape, dtype, device, rows=1)
    check(shape, dtype, device, rows=shape[0])


@pytest.mark.parametrize("device", [HOST, GPU])
def test_a_table_may_be_scaled(device: str) -> None:
    """The gradient is the transpose, also of what is no rotation."""
    check((2, 3, 2, 6), torch.float32, device, rows=2, factor=1.4)


def apart(table: Tensor) -> Tensor:
    """The same numbers, which do not lie one behind the other."""
    return table.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("device", [HOST, GPU])
def test_a_table_may_lie_apart(device: str) -> None:
    x, weight = torch.randn(2, 5, 3, 8, device=device), torch.randn(8, device=device)
    tables = angles(2, 5, 8, device)
    strided = [apart(table) for table in tables]
    assert rope(x, *strided).equal(rope(x, *tables))
    seen = []
    for cos, sin in (strided, tables):
        ours = x.clone().requires_grad_()
        out = rope_norm(ours, weight, 1e-5, cos, sin)
        seen.append((out, *torch.autograd.grad(out.sum(), ours)))
    assert all(a.equal(b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("device", [HOST, GPU])
def test_back_undoes_it(device: str) -> None:
    x = torch.randn(2, 5, 3, 8, device=device)
    cos, sin = angles(2, 5, 8, device)
    there = rope(x, cos, sin)
    back = torch.ops.headrace.rope(there, cos, sin, True)
    assert (there - x).abs().max() > 0.1
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


def test_is_an_operation_that_a_compiler_can_take() -> None:
    if not torch.cuda.is_available():
        x = torch.randn(2, 4, 3, 6).transpose(1, 2).requires_grad_()
        given = x, *angles(1, 3, 6, "cpu"), False
        torch.library.opcheck(torch.ops.headrace.rope.default, given)


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
    tables = angles(1, 5, 6, "cuda")

    def around(fused: Tensor) -> Tensor:
        return rope((fused * 2)[:, :, :, 1], *tables).float().sin().sum()

    compiled = torch.compile(around, fullgraph=True)
    (found,) = torch.autograd.grad(compiled(fused), fused)
    (wanted,) = torch.autograd.grad(around(fused), fused)
    unit = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=unit, atol=unit)
