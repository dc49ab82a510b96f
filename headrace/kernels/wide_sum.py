"""Add gradients in half precision to their sum in fp32, at the memory's own rate.

Autograd's sum of a number in fp32 and one in bf16 is torch's addition of two dtypes, which took 1.5
times as long on one H200 as a kernel that reads and writes the same bytes (a prototype, LOG.md).
So a gradient takes the place of the sum while autograd puts it there, and is added to it after.

Triton compiles the kernel for a GPU; elsewhere torch adds.
"""

import weakref

import torch
from torch import Tensor

from headrace.kernels.launches import COUNTS

KERNEL = "wide_sum"
"""Name of the kernel among the launches."""


def add_(total: Tensor, part: Tensor, *, fused: bool) -> Tensor:
    """Add `part` to `total`, in place; both are of one shape and lie in memory alike.

    Args:
        total: in fp32.
        part: in half precision.
        fused: by the kernel, on a GPU that has Triton.
    """
    if not fused or not total.is_contiguous() or not part.is_contiguous():
        return total.add_(part)
    from headrace.kernels import wide_sum_triton

    COUNTS[KERNEL] += 1
    return wide_sum_triton.add_(total, part)


class WideSum:
    """Keep the gradient of a leaf in half precision in fp32, to which others are added.

    The first gradient is widened once it is there. A leaf's own hook runs for gradients that
    `torch.autograd.grad` returns too: then the sum is put back as the backward pass ends. What
    reads a gradient before the leaf has all of them needs another way.
    """

    def __init__(self, leaf: Tensor, *, fused: bool) -> None:
        """Hook into a leaf's gradients.

        Args:
            leaf: in half precision, whose gradient autograd may leave in it.
            fused: add by the kernel.
        """
        leaf.grad_dtype = None
        self.fused = fused
        self._before: Tensor | None = None  # what stood in the place of the gradient that comes
        self._leaf = weakref.ref(leaf)
        leaf.register_hook(self._make_room)
        leaf.register_post_accumulate_grad_hook(self._add)

    def _make_room(self, gradient: Tensor) -> None:
        leaf = self._leaf()
        if leaf is not None and leaf.grad is not None:
            self._before, leaf.grad = leaf.grad, None
            torch.autograd.Variable._execution_engine.queue_callback(self._put_back)

    def _add(self, leaf: Tensor) -> None:
        before, self._before = self._before, None
        assert leaf.grad is not None
        if before is not None:
            leaf.grad = add_(before, leaf.grad, fused=self.fused and before.is_cuda)
        elif leaf.grad.dtype is not torch.float32:
            leaf.grad = leaf.grad.float()

    def _put_back(self) -> None:
        leaf, before, self._before = self._leaf(), self._before, None
        if leaf is not None and before is not None:
            leaf.grad = before
