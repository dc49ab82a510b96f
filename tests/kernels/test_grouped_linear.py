"""A grouped matmul equals one matmul per row, forward and backward, on both paths."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.grouped_linear import grouped_linear, has_grouped_kernel, looped_linear

COUNTS = {
    "even": [3, 3, 3],
    "empty in the middle": [4, 0, 5],
    "empty at both ends": [0, 9, 0],
    "single rows": [1, 7, 1],
}


def by_row(x_NK: Tensor, weight_EOK: Tensor, counts: list[int]) -> Tensor:
    """Multiply every row by the matrix of its expert: the definition."""
    expert_N = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.einsum("nk,nok->no", x_NK, weight_EOK[expert_N])


def inputs(counts: list[int], wide: int, out: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), wide, requires_grad=True)
    weight = torch.randn(len(counts), out, wide, requires_grad=True)
    return x, weight, torch.tensor(counts).cumsum(0).int()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forward_and_gradients_equal_the_definition(counts: list[int], compiled: bool) -> None:
    x, weight, ends = inputs(counts, 7, 5)
    weigh = torch.randn(sum(counts), 5)
    run: Any = grouped_linear
    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = run(x, weight, ends)
    gradients = torch.autograd.grad((found * weigh).sum(), [x, weight])
    right = by_row(x, weight, counts)
    wanted = torch.autograd.grad((right * weigh).sum(), [x, weight])
    torch.testing.assert_close(found, right)
    for grad, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(grad, want)
    for expert, count in enumerate(counts):
        assert (gradients[1][expert].abs().sum() == 0) == (count == 0)


def test_gradients_in_double_precision() -> None:
    x, weight, ends = inputs([2, 0, 3], 3, 4)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    assert torch.autograd.gradcheck(lambda x, w: looped_linear(x, w, ends), wide)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_kernel_equals_the_loop(counts: list[int]) -> None:
    """In bf16, to the rounding of its results; experts without rows have a gradient of zero."""
    x, weight, ends = (t.detach().cuda() for t in inputs(counts, 24, 40))
    x, weight = (t.bfloat16().requires_grad_() for t in (x, weight))
    assert has_grouped_kernel(x, weight)
    weigh = torch.randn(sum(counts), 40, device="cuda").bfloat16()
    pairs = []
    for run in (grouped_linear, looped_linear):
        out = run(x, weight, ends)
        pairs.append([out, *torch.autograd.grad((out * weigh).sum(), [x, weight])])
    for found, right in zip(*pairs, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
