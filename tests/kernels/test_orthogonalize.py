"""This module compares both sets of polynomials with the singular value decomposition."""

from math import prod

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headrace.kernels import orthogonalize as kernels
from headrace.kernels.orthogonalize import (
    POLYNOMIALS,
    SEGMENTS,
    SQUARED,
    STEPS,
    Name,
    is_wide,
    iterate,
    iterate_wide,
    orthogonalize,
    reference_orthogonalize,
)

SHAPES = ((8, 8), (7, 19), (19, 7), (1, 5), (33, 32), (12, 17))
ENDS: dict[Name, tuple[float, float]] = {"jordan": (0.67, 1.21), "polar_express": (0.85, 1.15)}
"""Where five steps leave singular values that are not tiny (Jordan, 2024; arXiv 2505.16932)."""
NAMES = tuple(POLYNOMIALS)
BF16_BAND = 0.06
"""Five steps double an error of 2^-8 several times; 0.033 of Jordan's on an H200."""

shapes = pytest.mark.parametrize("shape", SHAPES)
names = pytest.mark.parametrize("name", NAMES)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spectrum(rows: int, columns: int, power: float) -> Tensor:
    """Return a matrix whose singular values fall as n to a power."""
    u, v = (torch.linalg.qr(draw(n, rows, seed=n))[0] for n in (rows, columns))
    return (u * torch.arange(1, rows + 1) ** -power) @ v.mT


def lengths(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix.double())


@shapes
def test_the_reference_is_orthogonal(shape: tuple[int, int]) -> None:
    exact = reference_orthogonalize(draw(*shape))
    short = exact @ exact.mT if shape[0] <= shape[1] else exact.mT @ exact
    torch.testing.assert_close(short, torch.eye(min(shape), dtype=torch.float64))


@names
@shapes
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_keeps_directions_and_evens_out_lengths(
    shape: tuple[int, int], scale: float, name: Name
) -> None:
    matrix = scale * draw(*shape)
    found = orthogonalize(matrix, name).double()
    u, before, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    inner = u.mT @ found @ v.mT
    off = inner - inner.diagonal().diag()
    assert off.abs().max() < 2e-4, "singular vectors moved"
    large = inner.diagonal()[before > 0.05 * before.norm()]
    low, high = ENDS[name]
    assert large.min() > low and large.max() < high
    exact = reference_orthogonalize(matrix)
    assert (found * exact).sum() / (found.norm() * exact.norm()) > 0.9


@names
@shapes
def test_lengths_are_those_of_the_published_polynomials(shape: tuple[int, int], name: Name) -> None:
    """They fit the coefficients number by number, as no other count of steps does."""
    matrix = draw(*shape)
    u, left, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    coefficients, margin = POLYNOMIALS[name]
    left = left / (left.norm() * margin)
    for a, b, c in coefficients:
        left = a * left + b * left**3 + c * left**5
    found = (u.mT @ orthogonalize(matrix, name).double() @ v.mT).diagonal()
    torch.testing.assert_close(found, left, rtol=1e-4, atol=2e-5)


def test_polar_express_leaves_lengths_half_as_far_from_one() -> None:
    """It decides the default: the numbers of the module's first paragraph are these."""
    far: dict[Name, list[float]] = {}
    for name in NAMES:
        for matrix in (draw(128, 352), *(spectrum(128, 352, power) for power in (0.5, 1.0))):
            off = lengths(orthogonalize(matrix, name)) - 1
            far.setdefault(name, []).append(float(off.square().mean().sqrt()))
    assert far["polar_express"] == pytest.approx([0.091, 0.093, 0.097], abs=0.002)
    assert far["jordan"] == pytest.approx([0.217, 0.174, 0.201], abs=0.005)


@names
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_iterating_on_squares_is_the_same(power: float, name: Name) -> None:
    """Check that fp32 agrees to rounding, and bf16 stays near, as one segment of five does not."""
    matrix = spectrum(128, 352, power) if power else draw(128, 352)
    coefficients, margin = POLYNOMIALS[name]
    x = (matrix / (matrix.norm() * margin))[None]
    right = iterate(x.double(), coefficients)
    for dtype, band in ((torch.float32, 1e-4), (torch.bfloat16, BF16_BAND)):
        for steps in (iterate, iterate_wide):
            found = steps(x.to(dtype), coefficients)
            assert found.dtype == dtype
            assert float((found.double() - right).norm() / right.norm()) < band


def test_without_a_second_segment_bf16_runs_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is why `SEGMENTS` has two."""
    monkeypatch.setattr(kernels, "SEGMENTS", (STEPS,))
    coefficients, margin = POLYNOMIALS["polar_express"]
    matrix = spectrum(128, 352, 1.0)
    x = (matrix / (matrix.norm() * margin))[None]
    assert iterate_wide(x.bfloat16(), coefficients).abs().max() > 100


@pytest.mark.parametrize("shape", [(16, 16), (16, 24), (16, 25), (40, 16), (16, 64)])
def test_the_way_with_fewer_flops_is_taken(shape: tuple[int, int]) -> None:
    """Count both: only shapes wider than `WIDE` iterate on squares."""
    narrow, long = min(shape), max(shape)
    x, coefficients = draw(2, narrow, long), POLYNOMIALS["jordan"].coefficients
    counts = []
    for call in (lambda: iterate(x, coefficients), lambda: iterate_wide(x, coefficients)):
        with FlopCounterMode(display=False) as counter:
            call()
        counts.append(counter.get_total_flops())
    unit = 2 * 2 * narrow**2
    assert counts[0] == unit * STEPS * (2 * long + narrow)
    assert counts[1] == unit * (SQUARED * narrow + 2 * len(SEGMENTS) * long)
    assert is_wide(*shape) == (counts[1] < counts[0])
    with FlopCounterMode(display=False) as counter:
        orthogonalize(draw(2, *shape))
    assert counter.get_total_flops() == min(counts)


@names
@shapes
def test_a_batch_equals_its_matrices(shape: tuple[int, int], name: Name) -> None:
    batch = torch.stack([10.0**n * draw(*shape, seed=n) for n in range(4)])
    before = batch.clone()
    found = orthogonalize(batch, name)
    assert found.shape == batch.shape and batch.equal(before)
    for one, matrix in zip(found, batch, strict=True):
        torch.testing.assert_close(one, orthogonalize(matrix, name), rtol=1e-5, atol=2e-6)


@names
def test_zero_stays_zero(name: Name) -> None:
    for shape in ((2, 5, 3), (2, 4, 4)):
        found = orthogonalize(torch.zeros(shape), name)
        assert found.numel() == prod(shape) and not found.any()


@names
@pytest.mark.gpu
def test_on_a_gpu_it_iterates_in_bf16_near_the_fp32_answer(name: Name) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for columns in (64, 96, 200):
        matrix = draw(64, columns)
        found = orthogonalize(matrix.cuda(), name)
        assert found.dtype == torch.bfloat16
        right = orthogonalize(matrix, name)
        assert float((found.cpu().float() - right).norm() / right.norm()) < 2 * BF16_BAND
