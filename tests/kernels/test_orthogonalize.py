"""This module compares the Newton-Schulz iteration with the singular value decomposition."""

import pytest
import torch

from headrace.kernels.orthogonalize import orthogonalize, reference_orthogonalize

SHAPES = ((8, 8), (7, 19), (19, 7), (1, 5), (33, 32))
LOWEST, HIGHEST = 0.67, 1.21
"""Where five steps of the quintic leave singular values that are not tiny (Jordan, 2024)."""

BF16_BAND = 0.06
"""Five steps double an error of 2^-8 several times; 0.033 on an H200."""


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_orthogonal(shape: tuple[int, int]) -> None:
    exact = reference_orthogonalize(draw(*shape))
    short = exact @ exact.mT if shape[0] <= shape[1] else exact.mT @ exact
    torch.testing.assert_close(short, torch.eye(min(shape), dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_keeps_directions_and_evens_out_lengths(shape: tuple[int, int], scale: float) -> None:
    matrix = scale * draw(*shape)
    found = orthogonalize(matrix).double()
    u, before, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    inner = u.mT @ found @ v.mT
    off = inner - inner.diagonal().diag()
    assert off.abs().max() < 1e-4, "singular vectors moved"
    large = inner.diagonal()[before > 0.05 * before.norm()]
    assert large.min() > LOWEST and large.max() < HIGHEST
    exact = reference_orthogonalize(matrix)
    assert (found * exact).sum() / (found.norm() * exact.norm()) > 0.9


@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_are_those_of_five_steps_of_the_quintic(shape: tuple[int, int]) -> None:
    """They fit the published coefficients number by number, as no other count of steps does."""
    matrix = draw(*shape)
    u, lengths, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    lengths = lengths / lengths.norm()
    for _ in range(5):
        lengths = 3.4445 * lengths - 4.7750 * lengths**3 + 2.0315 * lengths**5
    found = (u.mT @ orthogonalize(matrix).double() @ v.mT).diagonal()
    torch.testing.assert_close(found, lengths, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_equals_its_matrices(shape: tuple[int, int]) -> None:
    batch = torch.stack([10.0**n * draw(*shape, seed=n) for n in range(4)])
    found = orthogonalize(batch)
    assert found.shape == batch.shape
    for one, matrix in zip(found, batch, strict=True):
        torch.testing.assert_close(one, orthogonalize(matrix), rtol=1e-5, atol=1e-6)


def test_zero_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(2, 5, 3)).any()


@pytest.mark.gpu
def test_on_a_gpu_it_iterates_in_bf16_near_the_fp32_answer() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    matrix = draw(64, 96)
    found = orthogonalize(matrix.cuda())
    assert found.dtype == torch.bfloat16
    right = orthogonalize(matrix)
    assert float((found.cpu().float() - right).norm() / right.norm()) < BF16_BAND
