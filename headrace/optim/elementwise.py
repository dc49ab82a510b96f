"""Run an update by element over all tensors of an optimizer, in few launches and without a wait.

An update is a pure function of lists of local tensors, written with torch's `_foreach` operations:
one launch serves a list. Lists are cut where they hold `BATCH_NUMBERS`, since temporaries are as
large as the list. A step whose gradient is not finite is masked on the device: its gradients read
as zeros, and `keep`, 1.0 or 0.0, multiplies every change. Work by element is right on any part of
a sharded parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.work import Stream
from headrace.parallel.layout import local_of

lists: Any = torch
"""Torch, whose stubs leave out the operations on lists of tensors."""
FP32 = 4
BATCH_NUMBERS = 1 << 25
"""Numbers of a list of tensors whose temporaries are held at once: 128 MiB each in fp32."""
TEMPORARIES = 2
"""Copies of a list that every update here holds at once: its gradients, and one more."""
WORDS = {2: torch.int16, 4: torch.int32}
"""Bytes of a number -> the integer that holds its bits."""
UPDATE = "update/optimizer"
"""The ledger's name of the baseline's update: 28 bytes a number."""


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Hold what optimizers by element share; a subclass has the states and the update.

    Args:
        named: parameters by name.
        defaults: what every group has: `lr`, `weight_decay` and what the update reads.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    """Names of states that lie as the parameter and begin with zeros."""
    counts: ClassVar[tuple[str, ...]] = ()
    """Names of states that are one number for each parameter and begin with zero."""

    def __init__(self, named: Mapping[str, nn.Parameter], **defaults: Any) -> None:
        super().__init__(list(named.values()), defaults)
        self.found_inf: Tensor | None = None
        self.updates = 0

    def update(
        self,
        group: Mapping[str, Any],
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        keep: Tensor,
        state: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Change weights and states in place; change nothing where `keep` is 0.

        Args:
            group: the group's settings.
            weights: local parts of the parameters.
            gradients: copies of the local parts of their gradients, zeros where `keep` is 0. They
                may be overwritten.
            keep: 1.0, or 0.0 for a masked step, on the device.
            state: states by name, as lists in the order of `weights`.
        """
        raise NotImplementedError

    def start(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the first state of a parameter."""
        return {key: torch.zeros_like(parameter) for key in self.moments} | {
            key: torch.zeros((), device=parameter.device) for key in self.counts
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter; where `found_inf` is 1, all stays as it is."""
        self.updates += 1
        for group in self.param_groups:
            for parameters in batches([p for p in group["params"] if p.grad is not None]):
                keep = torch.ones((), device=parameters[0].device)
                if self.found_inf is not None:
                    keep = 1.0 - self.found_inf
                for parameter in parameters:
                    if not self.state[parameter]:
                        self.state[parameter] = self.start(parameter)
                keys = self.state[parameters[0]]
                state = {k: [local_of(self.state[p][k]) for p in parameters] for k in keys}
                gradients = erased(
                    [local_of(p.grad) for p in parameters if p.grad is not None], keep
                )
                self.update(group, [local_of(p) for p in parameters], gradients, keep, state)


def batches(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in order, in lists of at most `BATCH_NUMBERS` or one parameter."""
    batch: list[nn.Parameter] = []
    batch_numbers = 0
    for parameter in parameters:
        numbers = local_of(parameter).numel()
        if batch and batch_numbers + numbers > BATCH_NUMBERS:
            yield batch
            batch, batch_numbers = [], 0
        batch.append(parameter)
        batch_numbers += numbers
    if batch:
        yield batch


def erased(gradients: Sequence[Tensor], keep: Tensor) -> list[Tensor]:
    """Return copies of gradients, or zeros where `keep` is 0.

    The bits are multiplied as integers, since zero times NaN is NaN.
    """
    words = [g.view(WORDS[g.element_size()]) for g in gradients]
    kept = lists._foreach_mul(words, keep.to(words[0].dtype))
    return [k.view(g.dtype) for k, g in zip(kept, gradients, strict=True)]


def predict_rest(
    ledger: Ledger, owner: str, *, states: int, traffic: float, kernels: float, each: float
) -> Ledger:
    """Return the ledger with another optimizer in the place of the baseline's AdamW.

    The time is derived from the bytes that the operations read and write.

    Args:
        ledger: with the matrices that other optimizers update.
        owner: name of the technique.
        states: fp32 numbers that it keeps for each weight; AdamW keeps two.
        traffic: bytes that it reads and writes for each weight.
        kernels: launches for one list of tensors.
        each: launches for one tensor, beside those.
    """
    ledger = ledger.updated_by(owner, lambda name, matrix: True)
    mine, learns = ledger.updates(owner), ledger.updates()
    slices, line = ledger.sizes.get("slices", 1.0), ledger.memory["optimizer"]
    others = sum(m.numbers / slices for n, m in learns.items() if n not in mine)
    numbers = max(0.0, ledger.memory["gradients"].bytes / FP32 - others)
    more = (states - 2) * FP32 * numbers
    ledger = ledger.with_line("optimizer", replace(line, bytes=max(0.0, line.bytes + more)))
    work = dict(ledger.work)
    launches = kernels * max(1.0, -(-numbers // BATCH_NUMBERS)) + each * len(mine)
    work[f"update/{owner}"] = Stream("optimizer", 1, traffic * numbers, launches)
    if isinstance(piece := work.pop(UPDATE, None), Stream):
        left = piece.bytes - 7 * FP32 * numbers
        if left > 1:  # other optimizers' part
            work[UPDATE] = replace(piece, bytes=left)
    return replace(ledger, work=work, sizes={**ledger.sizes, DERIVED: 1.0})


def updated_in_lists(ledger: Ledger, owner: str) -> Ledger:
    """Return the ledger with the copies that an `ElementwiseOptimizer` holds of a list."""
    slices = ledger.sizes.get("slices", 1.0)
    matrices = [m.numbers / slices for m in ledger.updates(owner).values()]
    copied = min(sum(matrices), max(BATCH_NUMBERS, max(matrices, default=0.0)))
    return ledger.updating(TEMPORARIES * FP32 * copied)
