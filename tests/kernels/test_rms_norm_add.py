"""The fused addition and norm against fp64; on a CPU in Triton's interpreter."""

import pytest
import torch
from test_rms_norm import DTYPES, EPS, GPU, HOST, LARGE, check
from torch import Tensor

from headrace.kernels.launches import COUNTS
from headrace.kernels.rms_norm import reference_add, rms_norm_add

pytest.importorskip("triton")
SHAPES = {"odd": (3, 5, 33), "few features": (7, 3)}


def both(
    shape: tuple[int, ...], stream: torch.dtype, part: torch.dtype, device: str
) -> list[tuple[Tensor, Tensor]]:
    """(found, wanted in fp64) of sum, result and three gradients; both outputs are used."""
    draw = torch.Generator().manual_seed(0)
    x, delta, along, grad = (torch.randn(shape, generator=draw) for _ in range(4))
    weight = torch.randn(shape[-1:], generator=draw).to(device)
    x, delta = x.to(device, stream), delta.to(device, part)
    kind = torch.promote_types(stream, part)
    along, grad = along.to(device, kind), grad.to(device, kind)
    seen = []

    def exact(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + delta
        written = total + (seen[0][0] - total).detach()  # rounded, which its gradient is not
        assert (written - total).abs().max() <= torch.finfo(kind).eps * total.abs().max()
        total = written
        return total, total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    for call, wide in ((rms_norm_add, None), (exact, torch.float64)):
        ours = [t.to(wide or t.dtype).clone().requires_grad_() for t in (x, delta, weight)]
        outs = call(*ours, EPS)
        over = [g.to(outs[0].dtype) for g in (along, grad)]
        seen.append([*outs, *torch.autograd.grad(outs, ours, over)])
    assert [t.dtype for t in seen[0]] == [kind, kind, stream, part, torch.float32]
    return list(zip(*seen, strict=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", [HOST, GPU])
def test_equals_the_definition(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check(both(shape, dtype, dtype, device))


@pytest.mark.parametrize("device", [HOST, GPU])
def test_a_stream_in_fp32_and_a_part_in_bf16_and_the_other_way_round(device: str) -> None:
    check(both((3, 33), torch.float32, torch.bfloat16, device))
    check(both((3, 33), torch.bfloat16, torch.float32, device))


@pytest.mark.parametrize("device", [HOST, GPU])
def test_strided_inputs_and_one_gradient_alone(device: str) -> None:
    x, delta = (torch.randn(5, 3, 8, device=device).transpose(0, 1) for _ in range(2))
    weight = torch.randn(8, device=device)
    for used in ([0], [1]):
        seen = []
        for call in (rms_norm_add, reference_add):
            ours = x.clone().requires_grad_(), delta.clone().requires_grad_()
            total = sum(call(*ours, weight, EPS)[i].sin().sum() for i in used)
            seen.append(torch.autograd.grad(total, ours))  # type: ignore[arg-type]
        for found, wanted in zip(*seen, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", [HOST, GPU])
def test_one_launch_each_way(device: str) -> None:
    before = COUNTS.copy()
    both((3, 33), torch.float32, torch.float32, device)
    launched = COUNTS - before
    assert launched == {"rms_norm_add_forward": 1, "rms_norm_add_backward": 1}


def test_is_an_operation_that_a_compiler_can_take() -> None:
    if not torch.cuda.is_available():
        x, delta = (torch.randn(3, 6, requires_grad=True) for _ in range(2))
        given = x, delta, torch.randn(6, requires_grad=True), EPS
        torch.library.opcheck(torch.ops.headrace.rms_norm_add.default, given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_rows_and_the_same_bits_again(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    first, second = (both(shape, dtype, dtype, "cuda") for _ in range(2))
    check(first)
    assert all(a.equal(b) for (a, _), (b, _) in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_without_a_graph_break(dtype: torch.dtype) -> None:
    x, delta = (torch.randn(6, 66, device="cuda", dtype=dtype, requires_grad=True) for _ in "xd")
    weight = torch.randn(66, device="cuda", requires_grad=True)

    def around(x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        total, normal = rms_norm_add(x * 2, delta, weight, EPS)
        return (total.float().cos() + normal.float().sin()).sum()

    compiled, given = torch.compile(around, fullgraph=True), (x, delta, weight)
    found = torch.autograd.grad(compiled(*given), given)
    wanted = torch.autograd.grad(around(*given), given)
    for ours, theirs in zip(found, wanted, strict=True):
        unit = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=unit, atol=unit)
