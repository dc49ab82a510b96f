"""The nearest semi-orthogonal matrix, by a quintic Newton-Schulz iteration.

Muon's update direction: every singular value of the momentum pushed towards 1, with matrix products
alone. The coefficients trade exactness for slope at zero, so values end within about [0.7, 1.2]
(Keller Jordan, "Muon", 2024, https://kellerjordan.github.io/posts/muon). bf16 suffices on GPUs; a
CPU without bf16 arithmetic iterates in fp32.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Orthogonalise each matrix of a batch [..., rows, columns]; same shape, iteration dtype."""
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
    """The exact answer for one matrix: U V^T of its singular value decomposition, fp64."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v
