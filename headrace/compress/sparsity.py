"""Prune single weights of a matrix: choose which become zero, and store what is left.

A score says how much a number is needed: its magnitude, or by Wanda its magnitude times the norm of
the input feature that it multiplies (arXiv 2306.11695). Numbers are compared with those of their
group: of two of every four neighbours (2:4, arXiv 2104.08378), of a row (Wanda), or of the whole
matrix (magnitude). The lowest scores of each group are pruned; of equal ones the first. What is
pruned already stays so.

A stored matrix has its numbers in fp32, row by row, and a bit a number that says where they stand.
Of 2:4 that is as much as the two positions of 2 bits that GPUs keep for each four: 17/32 of fp32's
bytes, or 9/16 of those of a model that is stored in 16 bits.

Shapes: R rows, C columns, G groups, K numbers of a group, N numbers that are left.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.compress.spec import SparsitySpec

BYTE = 8
"""Bits of a byte."""


def scores_of(weight_RC: Tensor, norms_C: Tensor | None = None) -> Tensor:
    """Return how much each number of a matrix is needed, fp32 [R, C]; higher is more.

    Args:
        weight_RC: the matrix.
        norms_C: by Wanda, the L2 norm of each input feature over text; None for the magnitude.
    """
    magnitude_RC = weight_RC.detach().float().abs()
    return magnitude_RC if norms_C is None else magnitude_RC * norms_C.float()


def pruned_of(
    scores_RC: Tensor,
    spec: SparsitySpec,
    share: float | None = None,
    before_RC: Tensor | None = None,
) -> Tensor:
    """Return which numbers of a matrix are pruned, bool [R, C].

    It reads nothing from the device, and the whole matrix gives the same on every rank.

    Args:
        scores_RC: as `scores_of` gives them.
        spec: the groups in which numbers are compared. The columns are a multiple of four for 2:4.
        share: of each group that is pruned; that of the spec without it.
        before_RC: what is pruned already, which stays so.
    """
    if before_RC is not None:
        scores_RC = scores_RC.masked_fill(before_RC, -1.0)
    groups, numbers = spec.groups_of(*scores_RC.shape)
    count = round((spec.share if share is None else share) * numbers)
    order_GK = scores_RC.reshape(groups, numbers).sort(dim=1, stable=True).indices
    pruned_GK = torch.zeros(groups, numbers, dtype=torch.bool, device=scores_RC.device)
    pruned_RC = pruned_GK.scatter_(1, order_GK[:, :count], True).view_as(scores_RC)
    return pruned_RC if before_RC is None else pruned_RC | before_RC


def prune_matrix(
    weight_RC: Tensor, spec: SparsitySpec, norms_C: Tensor | None = None
) -> "SparseMatrix":
    """Return what is left of a finished matrix; one that has the spec's zeros loses no more.

    Args:
        weight_RC: the matrix.
        spec: what is pruned.
        norms_C: as `scores_of` takes them.
    """
    zeros_RC = weight_RC.detach() == 0
    has_enough = int(zeros_RC.sum()) >= spec.pruned_numbers(*weight_RC.shape)
    if spec.pattern == "unstructured" and has_enough:  # whatever rows they are in
        return SparseMatrix.of(weight_RC, zeros_RC)
    scores_RC = scores_of(weight_RC, norms_C)
    return SparseMatrix.of(weight_RC, pruned_of(scores_RC, spec, before_RC=zeros_RC))


def share_after(steps: int, begin: int, end: int, every: int, share: float) -> float:
    """Return the share that is pruned after so many steps, by the cubic ramp of arXiv 1710.01878.

    Most is pruned early, where much is superfluous: share x (1 - (1 - t)^3), in which t runs from 0
    at `begin` to 1 at `end`. It rises every `every` steps, and at `end`.

    Args:
        steps: taken so far.
        begin: steps after which it begins.
        end: steps after which all of the share is pruned; at once where it is not after `begin`.
        every: steps from one rise to the next.
        share: of the end.
    """
    if steps < begin:
        return 0.0
    if steps >= end:
        return share
    passed = (steps - begin) // every * every
    return share * (1 - (1 - passed / (end - begin)) ** 3)


@contextmanager
def input_squares(linears: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Sum the squares of what linears read inside: yields name -> fp32 [C], of all tokens so far.

    Args:
        linears: modules by name, which are called as modules; their graphs must not be compiled.
    """
    sums: dict[str, Tensor] = {}

    def adding(name: str) -> Callable[[nn.Module, Any], None]:
        def add(_: nn.Module, given: Any) -> None:
            squares_C = given[0].detach().float().square().flatten(0, -2).sum(0)
            sums[name] = squares_C if name not in sums else sums[name] + squares_C

        return add

    hooks = [one.register_forward_pre_hook(adding(name)) for name, one in linears.items()]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


class SparseMatrix(NamedTuple):
    """Hold what is left of a pruned matrix."""

    values_N: Tensor
    """fp32: the numbers that are left, row by row."""
    bits: Tensor
    """uint8 [R, ceil(C / 8)]: a bit a number, 1 where it is left; the first in the lowest bit."""
    columns: int

    @classmethod
    def of(cls, weight_RC: Tensor, pruned_RC: Tensor) -> "SparseMatrix":
        """Return a matrix without the numbers that are pruned."""
        left_RC = ~pruned_RC
        values_N = weight_RC.detach().float()[left_RC]
        return cls(values_N, pack_bits(left_RC), weight_RC.size(1))

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole matrix."""
        return torch.Size((self.bits.size(0), self.columns))

    def dequantize(self) -> Tensor:
        """Return the fp32 matrix [R, C], with zeros where it is pruned."""
        dense_RC = torch.zeros(self.shape, device=self.values_N.device)
        return dense_RC.masked_scatter_(unpack_bits(self.bits, self.columns), self.values_N)


def pack_bits(bits_RC: Tensor) -> Tensor:
    """Return truths eight a byte, the first in the lowest bit; uint8 [R, ceil(C / 8)]."""
    padded = F.pad(bits_RC.to(torch.uint8), (0, -bits_RC.size(1) % BYTE))
    places = torch.arange(BYTE, dtype=torch.uint8, device=bits_RC.device)
    return (padded.unflatten(1, (-1, BYTE)) << places).sum(-1).to(torch.uint8)


def unpack_bits(packed: Tensor, columns: int) -> Tensor:
    """Return the truths bool [R, C] of `pack_bits`."""
    places = torch.arange(BYTE, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places & 1).flatten(1)[:, :columns].bool()
