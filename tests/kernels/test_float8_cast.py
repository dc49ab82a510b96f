"""The kernel casts as torch does; Triton's interpreter on a host cannot round to fp8 itself."""

import pytest
import torch
from fused_kernels import DEVICES, ON_A_GPU
from torch import Tensor

from headrace.kernels.float8_cast import KERNEL, cast_to_float8, fused_cast
from headrace.kernels.launches import COUNTS

pytest.importorskip("triton")
LARGEST = 448.0
SCALES = pytest.mark.parametrize("scale", [1.0, 2.0**-9, 2.0**60])


def equals_torchs(x: Tensor, scale: float, device: str) -> None:
    """Compare bits of the kernel with those of torch's operations on a host."""
    x, by = x.view(-1, 3) / scale, torch.tensor(scale)
    before = COUNTS[KERNEL]
    found = fused_cast(x.to(device), by.to(device)).cpu()
    assert COUNTS[KERNEL] == before + 1
    assert found.dtype is torch.float8_e4m3fn and found.shape == x.shape
    assert torch.equal(found.view(torch.uint8), cast_to_float8(x, by).view(torch.uint8))


@SCALES
@DEVICES
def test_scales_numbers_that_fp8_has(scale: float, device: str) -> None:
    numbers = torch.arange(255, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.abs() >= 2.0**-6]  # smaller ones the interpreter drops
    equals_torchs(numbers[: numbers.numel() // 3 * 3].repeat(30), scale, device)


@SCALES
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_rounds_in_every_binade_and_at_ties(scale: float, device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    exponents = torch.arange(-12, 9).repeat_interleave(97)
    x = torch.randn(exponents.numel(), generator=draw).sign() * torch.exp2(exponents)
    x = x * (1 + torch.rand(x.numel(), generator=draw))
    ties = torch.arange(1, 16, 2) / 16 + 1
    x = torch.cat([x, ties, -ties, torch.tensor([0.0, LARGEST, -LARGEST])])
    equals_torchs(x[: x.numel() // 3 * 3].clamp(-LARGEST, LARGEST), scale, device)
