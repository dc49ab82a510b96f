"""Sum gradients over ranks while the backward pass still makes others.

Parameters lie in buckets, in the order in which a backward pass reaches them. As soon as all
gradients of a bucket are there, they are copied into one tensor, whose sum is asked for and not
waited for; the gradients are views of that tensor from then on. Every rank must ask in the same
order, so a bucket waits for those before it, and what the backward pass left out is asked for at
its end (PyTorch DDP, arXiv 2006.15704, section 3.2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def in_buckets(named: Mapping[str, nn.Parameter], bytes: int) -> list[list[nn.Parameter]]:
    """Return the parameters from the last to the first, in buckets of at least so many bytes."""
    buckets: list[list[nn.Parameter]] = [[]]
    filled = 0
    for parameter in reversed([*named.values()]):
        if filled >= bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.nbytes
    return buckets


@dataclass(frozen=True)
class Sum:
    """A sum that was asked for.

    Args:
        work: what is waited for.
        flat: the gradients of a bucket, one after another, in the dtype in which they are summed.
        parameters: those whose gradients they are.
    """

    work: Any
    flat: Tensor
    parameters: Sequence[nn.Parameter]

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the gradient of each parameter, and its part of the sum."""
        parts = self.flat.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            assert parameter.grad is not None
            yield parameter.grad, part.view_as(parameter)


@dataclass
class GradientBuckets:
    """The buckets of a model, and the sums that are on their way.

    Args:
        group: the ranks whose gradients are summed.
        buckets: parameters, in the order in which buckets are sent.
        dtype: what gradients are summed in; None is their own.
    """

    group: dist.ProcessGroup
    buckets: list[list[nn.Parameter]]
    dtype: torch.dtype | None = None
    sending: bool = False
    """whether the coming backward pass is the last before the update"""
    early: int = 0
    """buckets of the newest step that were sent before its backward pass ended"""
    sent_bytes: int = 0
    """bytes of the sums of the newest step"""
    _begun: bool = False
    _waits: list[set[nn.Parameter]] = field(default_factory=list)
    _next: int = 0
    _sums: list[Sum] = field(default_factory=list)

    def watch(self) -> None:
        """Have every parameter say when its gradient is there."""
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, number=number: self._arrived(p, number)
                )

    def begin(self, last: bool) -> None:
        """Take note of a coming backward pass, of which an evaluation has none; the last sends."""
        if not torch.is_grad_enabled():
            return
        if last and not self._begun:  # each chunk of a pipeline's stage has a last pass of its own
            self._waits = [set(bucket) for bucket in self.buckets]
            self._next = self.early = self.sent_bytes = 0
            self._begun = True
        self.sending = last

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, and wait until every gradient is the sum over ranks."""
        while self._next < len(self.buckets):
            self._send()
        for one in self._sums:
            one.work.wait()
            for gradient, part in one.parts():
                if gradient.dtype != part.dtype:
                    gradient.copy_(part)
        self._sums, self.sending, self._begun = [], False, False

    @torch.no_grad()
    def _arrived(self, parameter: nn.Parameter, number: int) -> None:
        """Send every bucket whose turn it is and whose gradients are all there."""
        if not self.sending:
            return
        self._waits[number].discard(parameter)
        while self._next < len(self.buckets) and not self._waits[self._next]:
            self._send()
            self.early += 1

    def _send(self) -> None:
        """Ask for the sums of the next bucket, one for each dtype in it."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.buckets[self._next]:
            if parameter.grad is not None:
                dtype = self.dtype or parameter.grad.dtype
                by_dtype.setdefault(dtype, []).append(parameter)
        self._next += 1
        for dtype, parameters in by_dtype.items():
            flat = torch.cat([p.grad.flatten().to(dtype) for p in parameters if p.grad is not None])
            one = Sum(dist.all_reduce(flat, group=self.group, async_op=True), flat, parameters)
            for parameter, (gradient, part) in zip(parameters, one.parts(), strict=True):
                if gradient.dtype == dtype:
                    parameter.grad = part
            self._sums.append(one)
            self.sent_bytes += flat.nbytes
