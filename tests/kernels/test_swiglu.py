"""The fused activation against torch's own operations; on a CPU in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.swiglu import reference, swiglu

pytest.importorskip("triton")
SHAPES = {"even": ((3, 5), 16, 8), "odd": ((7,), 33, 11), "wide": ((2, 2), 1100, 1100)}
"""(tokens, hidden features, of a group)"""


def both(
    tokens: tuple[int, ...], features: int, group: int, dtype: torch.dtype, device: str
) -> list[tuple[Tensor, Tensor]]:
    """(found, wanted in fp32) of the result and of the gradient."""
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(*tokens, 2 * features, generator=draw).to(device, dtype)
    weigh = torch.randn(*tokens, features, generator=draw).to(device, dtype)
    ours, theirs = given.clone().requires_grad_(), given.float().requires_grad_()
    out, right = swiglu(ours, group), reference(theirs, group)
    out.backward(weigh)
    right.backward(weigh.float())
    assert ours.grad is not None and theirs.grad is not None
    return [(out, right), (ours.grad, theirs.grad)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)  # fmt: skip
def test_equals_torchs_own(
    shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype, device: str
) -> None:
    if (device == "cuda") != torch.cuda.is_available():
        pytest.skip("the interpreter is for a CPU, the kernel for a GPU")
    unit = torch.finfo(dtype).eps
    for found, wanted in both(*shape, dtype, device):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted, rtol=2 * unit, atol=2 * unit)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_is_one_operation_for_a_compiler() -> None:
    given = torch.randn(6, 66, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda x: swiglu(x * 2, 11) + 1, fullgraph=True)
    (found,) = torch.autograd.grad(compiled(given).sum(), given)
    (wanted,) = torch.autograd.grad((reference(given * 2, 11) + 1).sum(), given)
    torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for a CPU")
def test_a_gradient_may_lie_otherwise() -> None:
    given, weigh = torch.randn(3, 32), torch.randn(16, 3)
    found = []
    for grad in (weigh.t(), weigh.t().contiguous()):
        ours = given.clone().requires_grad_()
        found.extend(torch.autograd.grad(swiglu(ours, 8), ours, grad))
    assert found[0].equal(found[1])
