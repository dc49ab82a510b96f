"""Half of a symmetric product, written twice, is the whole product with what is added to it.

On a host the kernel runs in Triton's interpreter, in fp32; on a GPU as it is used, in bf16.
"""

import pytest
import torch
from torch import Tensor

from headrace.kernels import symmetric_matmul as kernels
from headrace.kernels.launches import COUNTS
from headrace.kernels.orthogonalize import orthogonalize
from headrace.kernels.symmetric_matmul import is_served, reference, symmetric_matmul

TERMS = [(1.0, 0.0, 0.0), (0.5, -2.0, 3.0), (-1.5, 0.25, 0.0), (2.0, 0.0, -1.0)]
"""Factors of the product and of what is added, and the number on the diagonals."""


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)) / shape[-1] ** 0.5


def plainly(
    left: Tensor, right: Tensor, added: Tensor | None, scale: float, share: float, diagonal: float
) -> Tensor:
    """Compute it in fp64, term by term."""
    whole = scale * (left.double() @ right.double().mT)
    if added is not None:
        whole = whole + share * added.double()
    return whole + diagonal * torch.eye(left.size(-2), dtype=torch.float64, device=left.device)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("shape", [(2, 9, 9), (3, 5, 12), (1, 7, 3)])
def test_the_reference_is_what_is_written(
    shape: tuple[int, int, int], terms: tuple[float, float, float]
) -> None:
    x, (scale, share, diagonal) = draw(*shape), terms
    gram = x @ x.mT
    for left, right in ((x, x), (gram, gram)):
        for added in (None, gram) if share else (None,):
            before = [t.clone() for t in (left, right, gram)]
            found = reference(left, right, added, scale, share, diagonal)
            wanted = plainly(left, right, added, scale, share, diagonal)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
            assert all(map(torch.equal, (left, right, gram), before))


@pytest.mark.parametrize(
    ("rows", "columns", "served"),
    [(768, 768, True), (2048, 8192, True), (512, 2048, False), (772, 772, False), (768, 3, False)],
)
def test_small_or_odd_matrices_are_multiplied_whole(rows: int, columns: int, served: bool) -> None:
    assert is_served(rows, columns) is served


def test_a_compiler_is_told_the_shape_alone() -> None:
    with torch.device("meta"):
        x = torch.empty(3, 768, 1024, dtype=torch.bfloat16)
    gram = symmetric_matmul(x, x)
    for found in (gram, symmetric_matmul(gram, gram, gram, scale=2.0, share=0.5, diagonal=1.0)):
        assert found.shape == (3, 768, 768) and found.dtype == torch.bfloat16


def check_kernel(x: Tensor, terms: tuple[float, float, float], most: float) -> None:
    """Compare the kernel with fp64: a matrix by its transpose, and squares that others add to."""
    scale, share, diagonal = terms
    before = COUNTS["symmetric_matmul"]
    gram = symmetric_matmul(x, x)
    assert torch.equal(gram, gram.mT)
    for left, right, added in ((x, x, None), (gram, gram, gram if share else None)):
        found = symmetric_matmul(left, right, added, scale, share, diagonal)
        wanted = plainly(left, right, added, scale, share, diagonal)
        assert torch.equal(found, found.mT)
        assert float((found.double() - wanted).norm() / wanted.norm()) < most
    assert COUNTS["symmetric_matmul"] == before + 3


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("shape", [(2, 136, 72), (1, 264, 264), (2, 128, 64), (1, 392, 40)])
def test_the_kernel_is_the_product(
    shape: tuple[int, int, int], terms: tuple[float, float, float]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    check_kernel(draw(*shape), terms, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("shape", [(3, 768, 768), (2, 776, 1032), (1, 2048, 1024), (2, 904, 72)])
def test_on_a_gpu_the_kernel_is_the_product_in_bf16(
    shape: tuple[int, int, int], terms: tuple[float, float, float]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_kernel(draw(*shape).cuda().bfloat16(), terms, 4e-3)  # one rounding


def test_muons_iteration_by_halves_is_that_by_whole_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The iteration by halves is the one by whole matmuls, in fp32 and of small matrices."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setattr(kernels, "LEAST_ROWS", 16)
    for shape in ((2, 136, 136), (2, 136, 264), (1, 264, 136)):
        matrices, before = draw(*shape), COUNTS["symmetric_matmul"]
        half, whole = (orthogonalize(matrices, symmetric=s) for s in (True, False))
        assert COUNTS["symmetric_matmul"] > before
        torch.testing.assert_close(half, whole, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 768, 768), (2, 768, 2048), (1, 2304, 768)])
def test_muons_iteration_by_halves_is_as_near_as_by_whole_products(
    shape: tuple[int, int, int],
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    matrices = draw(*shape)
    right = orthogonalize(matrices)
    before = COUNTS["symmetric_matmul"]
    whole, half = (orthogonalize(matrices.cuda(), symmetric=s).cpu() for s in (False, True))
    assert COUNTS["symmetric_matmul"] > before
    far = [float((x.float() - right).norm() / right.norm()) for x in (whole, half)]
    assert far[1] < max(1.2 * far[0], 0.05), far
