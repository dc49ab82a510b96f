"""Gradients of a leaf in half precision are added up in fp32, and nothing else sees it."""

import pytest
import torch
from torch import Tensor, nn

from headrace.kernels.launches import COUNTS
from headrace.kernels.wide_sum import KERNEL, WideSum, add_


def parts(count: int, *shape: int, device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=draw).to(device, torch.bfloat16) for _ in range(count)]


def test_the_sum_is_fp32s_and_the_first_gradient_is_widened() -> None:
    leaf = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    WideSum(leaf, fused=False)
    wanted = torch.zeros(3, 4)
    for part in parts(5, 3, 4):
        (leaf * part).sum().backward()
        wanted += part.float()
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad, wanted)
    low = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    for part in parts(5, 3, 4):
        (low * part).sum().backward()
    assert low.grad is not None and not torch.equal(low.grad.float(), wanted)  # rounded each time


def test_gradients_that_are_asked_for_leave_the_sum_alone() -> None:
    """A guard or a second-order estimate asks while sums are there."""
    leaf, (first, second) = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), parts(2, 2)
    WideSum(leaf, fused=False)
    (leaf * first).sum().backward()
    (asked,) = torch.autograd.grad((leaf * second).sum(), [leaf])
    assert torch.equal(asked, second) and leaf.grad is not None
    assert torch.equal(leaf.grad, first.float())
    (leaf * second).sum().backward()
    assert torch.equal(leaf.grad, first.float() + second.float())


def test_a_step_begins_anew_and_a_leaf_used_twice_is_one_part() -> None:
    leaf, (first, second) = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), parts(2, 2)
    WideSum(leaf, fused=False)
    (leaf * first).sum().backward()
    leaf.grad = None
    (leaf * first + leaf * second).sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.float32
    assert torch.equal(leaf.grad, (first + second).float())


def test_a_leaf_is_not_kept_alive() -> None:
    import weakref

    leaf = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    WideSum(leaf, fused=False)
    (leaf * 2).sum().backward()
    seen = weakref.ref(leaf)
    del leaf
    assert seen() is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1,), (1025,), (300, 701)])
def test_the_kernel_adds_as_torch_does(shape: tuple[int, ...]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    total, before = torch.randn(shape, device="cuda"), COUNTS[KERNEL]
    (part,) = parts(1, *shape, device="cuda")
    wanted = total + part.float()
    assert torch.equal(add_(total, part, fused=True), wanted) and COUNTS[KERNEL] == before + 1
    odd = torch.zeros(4, 6, device="cuda").t()
    assert torch.equal(add_(odd, torch.ones_like(odd).bfloat16(), fused=True), torch.ones_like(odd))
