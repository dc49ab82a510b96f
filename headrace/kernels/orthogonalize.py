"""A quintic Newton-Schulz iteration finds the nearest semi-orthogonal matrix.

It is Muon's update direction: matmuls alone push every singular value of the momentum towards 1.
The coefficients trade exactness for slope at zero, so values end within about [0.7, 1.2]
(Keller Jordan, "Muon", 2024, https://kellerjordan.github.io/posts/muon). bf16 suffices on GPUs; a
CPU without bf16 arithmetic iterates in fp32.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of x, x^3 and x^5 in the iteration (Keller Jordan, as above)."""
STEPS = 5
"""Iterations (Keller Jordan, as above)."""


def orthogonalize(matrices: Tensor) -> Tensor:
    """Orthogonalise each matrix of a batch [..., rows, columns], in the iteration's dtype."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def reference_orthogonalize(matrix: Tensor) -> Tensor:
    """Return the exact answer for one matrix, U V^T of its singular value decomposition, fp64."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v
