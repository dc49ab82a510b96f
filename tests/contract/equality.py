"""What a step computed, what it should have, and how far apart the two may be."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from tiny_rows import LENGTH, documents_of, make_micros
from torch import Tensor

from headrace.assemble.sockets import Build, Pass
from headrace.data.rows import IGNORE, Row
from headrace.model.head import Vocabulary, cross_entropy
from headrace.model.mask import Rows
from headrace.train.train import step

TOLERANCE_FP32 = 1e-5
"""Largest difference of any number of a gradient, over the gradient's largest number."""
MAGNIFIED, MAGNIFIED_BF16 = 10.0, 2.0
"""A nudge is one rounding of each weight; a layout or a cut rounds in every product, and bf16 every
result once."""
BAND_BF16 = 0.05
"""L2 distance of a gradient in bf16 from the fp32 reference's, over the reference's norm."""
BANDS = {"bf16": BAND_BF16, "fp16": BAND_BF16 / 2**3}
"""This band by precision. fp16 rounds the same operands and results to 3 bits more than bf16, so it
moves them an eighth as far."""
UNIT_FP32, UNIT_BF16 = 2.0**-23, 2.0**-9
"""What a nudge moves a weight by: a unit in its last place, and the most that bf16 rounds by."""


@dataclass
class Result:
    """Hold what a step computed, before its update."""

    loss: float
    gradients: dict[str, Tensor]


def gradients_of(build: Build) -> dict[str, Tensor]:
    """Return every parameter's gradient by name, fp32 on the host."""
    return {
        name: torch.zeros(()) if p.grad is None else p.grad.float().cpu()
        for name, p in build.model.named_parameters()
        if p.requires_grad
    }


def take_step(build: Build, rows: Sequence[Row], *, index: int = 0) -> Result:
    """Take one step of the run's own `step`."""
    micros = make_micros(
        rows, micro_rows=build.plan.batch.micro_sequences, segments=build.mask.document
    )
    gradients: dict[str, Tensor] = {}
    watched = at_the_update(build, lambda: gradients.update(gradients_of(build)))
    with flags_of(build), watched:
        loss = float(step(build, micros, index)[0])
    return Result(loss, gradients)


@contextmanager
def flags_of(build: Build) -> Iterator[None]:
    """What the run sets in the process while it lasts."""
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        yield


@contextmanager
def at_the_update(build: Build, look: Callable[[], None]) -> Iterator[None]:
    """Call `look` when the first sweep of a step is about to be absorbed, with its gradients."""
    passes = build.passes

    def watched(build: Build, index: int) -> list[Pass]:
        first, *rest = passes(build, index)

        def absorb(build: Build, finite: Tensor) -> None:
            look()
            first.absorb(build, finite)

        return [replace(first, absorb=absorb), *rest]

    build.passes = watched
    try:
        yield
    finally:
        build.passes = passes


def reference(
    build: Build,
    rows: Sequence[Row],
    *,
    documents: bool = False,
    more: Callable[[Build, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Result:
    """Run the plain baseline on each row, or on each document as a row of its own: no batch at all.

    Args:
        build: of the baseline alone, in fp32.
        rows: the batch.
        documents: whether documents are blind to each other.
        more: (build, ids, logits, targets) of a row -> what its loss has beside cross-entropy.
    """
    model = build.model
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), device=build.device)
    targets = 0
    for row in rows:
        assert row.targets is not None
        for part in documents_of(row) if documents else [slice(0, LENGTH)]:
            ids_BT = torch.from_numpy(row.ids[:-1][part])[None].to(build.device)
            targets_N = torch.from_numpy(row.targets[part]).to(build.device)
            place_BT = torch.arange(ids_BT.size(1), device=build.device)[None]
            logits_NV = model.logits(ids_BT, Rows(place_BT))[0]
            total = total + cross_entropy(logits_NV, targets_N, None, Vocabulary())
            if more is not None:
                total = total + more(build, ids_BT[0], logits_NV, targets_N)
            targets += int((targets_N != IGNORE).sum())
    loss = total / targets
    loss.backward()
    return Result(float(loss.detach()), gradients_of(build))


def distances(found: Result, wanted: Result, *, by_norm: bool = False) -> dict[str, float]:
    """Return how far loss and gradients are off: largest difference over largest number, or L2."""
    assert found.gradients.keys() == wanted.gradients.keys()
    off: dict[str, float] = {"loss": abs(found.loss - wanted.loss) / abs(wanted.loss)}
    for name, right in wanted.gradients.items():
        difference = found.gradients[name] - right
        assert right.abs().max() > 0, f"the reference's gradient of {name} is zero"
        if by_norm:
            off[name] = float(difference.norm() / right.norm())
        else:
            off[name] = float(difference.abs().max() / right.abs().max())
    return off


def assert_equal(
    found: Result,
    wanted: Result,
    *,
    band: float | None = None,
    nudged: Callable[[float], Result] | None = None,
) -> None:
    """Loss and every gradient agree: within TOLERANCE_FP32 by number, or within `band` by L2.

    Args:
        found: what was computed.
        wanted: the reference.
        band: of half precision, or of an approximation.
        nudged: the reference from weights that are moved by a unit; where it is given, a multiple
            of its distance from the reference is rounding too.
    """
    off = distances(found, wanted, by_norm=band is not None)
    limit = TOLERANCE_FP32 if band is None else band
    if nudged is not None and max(off.values()) > limit:
        limit = max(limit, rounding(wanted, nudged, half=band is not None))
    wrong = {name: round(value, 9) for name, value in off.items() if not value <= limit}
    assert not wrong, f"beyond {limit}: {wrong}"


def rounding(wanted: Result, nudged: Callable[[float], Result], *, half: bool) -> float:
    """How far rounding alone can move a gradient, as fp32 numbers or as L2 in half precision."""
    unit, more = (UNIT_BF16, MAGNIFIED_BF16) if half else (UNIT_FP32, MAGNIFIED)
    return more * max(distances(nudged(unit), wanted, by_norm=half).values())
