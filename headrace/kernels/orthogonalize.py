"""Compute the nearest semi-orthogonal matrix by odd polynomials, in matmuls alone.

It is Muon's update direction: each iteration is a x + b x^3 + c x^5 of every singular value, which
pushes all of them towards 1 and leaves the singular vectors as they are. Two sets of coefficients:

- `jordan` repeats one polynomial that trades exactness for slope at zero; values end within about
  [0.68, 1.13], and small ones between (Keller Jordan, "Muon", 2024,
  https://kellerjordan.github.io/posts/muon);
- `polar_express` has the best polynomial for each iteration in turn (arXiv 2505.16932); values end
  within [0.86, 1.14]. In fp64, the root mean square of (value - 1) is 0.09 of random matrices
  [128, 352] and 0.10 where values fall as 1/n; it is 0.22 and 0.20 with `jordan`
  (tests/kernels/test_orthogonalize.py).

Where a matrix is wide, iterating on X X^T instead of X takes fewer FLOPs ("Gram Newton-Schulz",
Zhang, Amsel, Chen and Dao, 2026): with G = X X^T and the polynomial P = a + b G + c G^2, the next X
is P X and the next G is P G P, so X itself is multiplied only at the end. In bf16 the errors of G
grow without a limit over five iterations (to singular values of 10^7 where they fall as 1/n). So X
is multiplied after the first two iterations and G begins anew: then either answer is within 6% of
fp64's for the matrices of its tests. bf16 suffices on GPUs; a CPU iterates in fp32.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headrace.kernels.symmetric_matmul import is_served, reference, symmetric_matmul

Coefficients = tuple[tuple[float, float, float], ...]
"""(a, b, c) of each iteration."""
Multiply = Callable[..., Tensor]
"""`reference` or `symmetric_matmul`, whose arguments are the same."""


class Polynomials(NamedTuple):
    """Hold (a, b, c) of each iteration, and what the norm is multiplied by before the first."""

    coefficients: Coefficients
    margin: float = 1.0


Name = Literal["polar_express", "jordan"]
POLYNOMIALS: Mapping[Name, Polynomials] = {
    "polar_express": Polynomials(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        margin=1.02,
    ),
    "jordan": Polynomials(((3.4445, -4.7750, 2.0315),) * 5),
}
"""Polynomials by name. Those of Polar Express are its algorithm's for five iterations with a safety
factor of 2%, as modded-nanogpt publishes them (github.com/KellerJordan/modded-nanogpt)."""
STEPS = 5
"""Iterations of either set."""
SEGMENTS = (2, 3)
"""Iterations on X X^T before X is multiplied and X X^T is computed again."""
SQUARED, WIDE = 14, 1.5
"""Matmuls of squares [shorter, shorter] that all iterations on X X^T take, beside two that make
X X^T and two that multiply X; and the sides' ratio above which these are fewer FLOPs: with squares
as the unit, 14 + 4 r against 5 (1 + 2 r) of the plain iteration."""


def is_wide(rows: int, columns: int) -> bool:
    """Return whether iterating on X X^T takes fewer FLOPs for matrices of this shape."""
    return max(rows, columns) > WIDE * min(rows, columns)


def iterated_dtype(matrices: Tensor) -> torch.dtype:
    """Return the dtype in which matrices are iterated unless another is asked for."""
    return torch.bfloat16 if matrices.is_cuda else torch.float32


def orthogonalize(
    matrices: Tensor,
    name: Name = "polar_express",
    dtype: torch.dtype | None = None,
    *,
    symmetric: bool = False,
) -> Tensor:
    """Orthogonalise each matrix of a batch.

    Args:
        matrices: [batch, rows, columns], or one [rows, columns]; left as they are.
        name: which polynomials.
        dtype: in which to iterate; by default bf16 on a GPU and fp32 elsewhere.
        symmetric: compute half of each symmetric matmul alone, where that is worth it; on a GPU
            with Triton and in half precision.

    Returns:
        Matrices of the same shape in that dtype.
    """
    if dtype is None:
        dtype = iterated_dtype(matrices)
    if matrices.ndim == 2:
        return orthogonalize(matrices[None], name, dtype, symmetric=symmetric)[0]
    coefficients, margin = POLYNOMIALS[name]
    tall = matrices.size(-2) > matrices.size(-1)
    steps = iterate_wide if is_wide(matrices.size(-2), matrices.size(-1)) else iterate
    x = _normalized(matrices.mT if tall else matrices, margin, dtype)
    half = symmetric and is_served(x.size(-2), x.size(-1))
    x = steps(x, coefficients, symmetric_matmul if half else reference)
    return x.mT if tall else x


def _normalized(matrices: Tensor, margin: float, dtype: torch.dtype) -> Tensor:
    """Return matrices divided by their norms times `margin`, so that no value is above 1.

    The norm is that of the rows' norms: one sum over a whole matrix would be left to a few of a
    GPU's multiprocessors where a compiler fuses it with what gathers the rows.
    """
    x = matrices.to(dtype)
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    norm = torch.linalg.vector_norm(norms, dim=-2, keepdim=True)
    return (x * (1.0 / (norm * margin + 1e-7))).to(dtype)


def iterate(x: Tensor, coefficients: Coefficients, multiply: Multiply = reference) -> Tensor:
    """Return the polynomials of x [batch, shorter, longer], three matmuls an iteration.

    With G = x x^T, a + b G + c G^2 is c (G + b / 2c)^2 + a - b^2 / 4c, so that numbers are added to
    diagonals alone: a matmul that adds a matrix copies it first.
    """
    for a, b, c in coefficients:
        gram = multiply(x, x, diagonal=b / (2 * c))
        squared = multiply(gram, gram, scale=c, diagonal=a - b * b / (4 * c))
        x = torch.bmm(squared, x)
    return x


def iterate_wide(x: Tensor, coefficients: Coefficients, multiply: Multiply = reference) -> Tensor:
    """Return the same by iterating on x x^T, with fewer FLOPs where x is wide.

    All matrices but x are polynomials of one symmetric matrix, and so are their products.
    """
    left = list(coefficients)
    for count in SEGMENTS:
        gram, factor = multiply(x, x), None
        for index in range(count):
            a, b, c = left.pop(0)  # small values of G stay exact where G itself is added
            polynomial = multiply(gram, gram, gram, scale=c, share=b, diagonal=a)
            factor = polynomial if factor is None else multiply(polynomial, factor)
            if index < count - 1:
                gram = multiply(multiply(polynomial, gram), polynomial)
        assert factor is not None
        x = torch.bmm(factor, x)
    return x


def reference_orthogonalize(matrix: Tensor) -> Tensor:
    """Return the exact answer for one matrix, U V^T of its singular value decomposition, fp64."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v
