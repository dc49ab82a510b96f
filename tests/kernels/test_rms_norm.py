"""What the fused norm and its addition do beside `test_fused_kernels`."""

import pytest
import torch
from fused_kernels import DEVICES, EPS, RMS_NORM, RMS_NORM_ADD, norm_add_inputs, norm_inputs

from headrace.kernels.launches import COUNTS
from headrace.kernels.rms_norm import reference, reference_add, rms_norm, rms_norm_add

pytest.importorskip("triton")


@DEVICES
def test_the_weight_may_be_in_half_precision(device: str) -> None:
    given = norm_inputs((3, 33), torch.bfloat16, device, torch.bfloat16)
    RMS_NORM.check(given, torch.bfloat16)


@DEVICES
def test_a_program_adds_up_many_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kernels.rms_norm_triton.PARTS", 2)
    monkeypatch.setattr("headrace.kernels.rms_norm_triton.TILE_NUMBERS", 64)
    RMS_NORM.check(norm_inputs((23, 33), torch.float32, device), torch.float32)


@DEVICES
def test_a_frozen_weight_and_strided_rows(device: str) -> None:
    x = torch.randn(5, 3, 8, device=device).transpose(0, 1).requires_grad_()
    weight = torch.randn(8, device=device)
    (found,) = torch.autograd.grad(rms_norm(x, weight, EPS).sum(), x)
    (wanted,) = torch.autograd.grad(reference(x, weight, EPS).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@DEVICES
def test_rows_that_lie_otherwise_have_the_same_result(device: str) -> None:
    whole, weight = torch.randn(5, 3, 16, device=device), torch.randn(8, device=device)
    for x in (whole[..., :8].transpose(0, 1), whole[..., ::2]):
        assert rms_norm(x, weight, EPS).equal(rms_norm(x.contiguous(), weight, EPS))


@DEVICES
@pytest.mark.parametrize(
    ("stream", "part"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["fp32 stream", "bf16 stream"],
)
def test_a_stream_and_a_part_of_two_dtypes(
    stream: torch.dtype, part: torch.dtype, device: str
) -> None:
    RMS_NORM_ADD.check(norm_add_inputs((3, 33), stream, device, part), torch.float32)


@DEVICES
def test_strided_inputs_and_one_gradient_alone(device: str) -> None:
    x, delta = (torch.randn(5, 3, 8, device=device).transpose(0, 1) for _ in range(2))
    weight = torch.randn(8, device=device)
    for used in (0, 1):
        seen = []
        for call in (rms_norm_add, reference_add):
            ours = x.clone().requires_grad_(), delta.clone().requires_grad_()
            seen.append(torch.autograd.grad(call(*ours, weight, EPS)[used].sin().sum(), ours))
        for found, wanted in zip(*seen, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@DEVICES
def test_an_addition_and_its_norm_are_one_launch_each_way(device: str) -> None:
    before = COUNTS.copy()
    RMS_NORM_ADD.run(rms_norm_add, norm_add_inputs((3, 33), torch.float32, device))
    assert COUNTS - before == {"rms_norm_add_forward": 1, "rms_norm_add_backward": 1}
