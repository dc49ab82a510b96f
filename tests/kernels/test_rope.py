"""What the fused rotation, with and without a norm, does beside `test_fused_kernels`."""

import pytest
import torch
from fused_kernels import (
    DEVICES,
    EPS,
    ROPE,
    ROPE_NORM,
    angles,
    rope_inputs,
    rope_norm_inputs,
)
from torch import Tensor

from headrace.kernels.rope import reference_norm, rope, rope_norm

pytest.importorskip("triton")


@DEVICES
def test_a_table_may_be_scaled(device: str) -> None:
    """The gradient is the transpose, also of what is no rotation."""
    given = rope_inputs((2, 3, 2, 6, 2), torch.float32, device, factor=1.4)
    ROPE.check(given, torch.float32)


@DEVICES
def test_scaled_tables_and_a_program_that_adds_up_many_heads(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.kernels.rope_triton.PARTS", 2)
    monkeypatch.setattr("headrace.kernels.rope_triton.TILE_PAIRS", 8)
    given = rope_norm_inputs((2, 7, 3, 6, 2), torch.float32, device, factor=1.4)
    ROPE_NORM.check(given, torch.float32)


def apart(table: Tensor) -> Tensor:
    """Return the same numbers in memory that has gaps."""
    return table.repeat_interleave(2, -1)[..., ::2]


@DEVICES
def test_a_table_may_lie_apart(device: str) -> None:
    x, weight = torch.randn(2, 5, 3, 8, device=device), torch.randn(8, device=device)
    tables = angles(2, 5, 8, device)
    strided = [apart(table) for table in tables]
    assert rope(x, *strided).equal(rope(x, *tables))
    seen = []
    for cos, sin in (strided, tables):
        ours = x.clone().requires_grad_()
        out = rope_norm(ours, weight, EPS, cos, sin)
        seen.append((out, *torch.autograd.grad(out.sum(), ours)))
    assert all(a.equal(b) for a, b in zip(*seen, strict=True))


@DEVICES
def test_back_undoes_it(device: str) -> None:
    x = torch.randn(2, 5, 3, 8, device=device)
    cos, sin = angles(2, 5, 8, device)
    there = rope(x, cos, sin)
    back = torch.ops.headrace.rope(there, cos, sin, True)
    assert (there - x).abs().max() > 0.1
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


@DEVICES
def test_a_frozen_weight(device: str) -> None:
    x = torch.randn(2, 3, 2, 6, device=device, requires_grad=True)
    weight, tables = torch.randn(6, device=device), angles(1, 3, 6, device)
    seen = [
        torch.autograd.grad(call(x, weight, EPS, *tables).sin().sum(), x)[0]
        for call in (rope_norm, reference_norm)
    ]
    torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@DEVICES
def test_heads_that_are_not_there_add_nothing_without_an_eps(device: str) -> None:
    """A tile's rows beyond the last head are zeros, whose root has no inverse."""
    x = torch.randn(1, 3, 1, 8, device=device)
    weight = torch.randn(8, device=device, requires_grad=True)
    out = rope_norm(x, weight, 0.0, *angles(1, 3, 8, device))
    (found,) = torch.autograd.grad(out.sum(), weight)
    assert found.isfinite().all()
