"""Pad rows to a few lengths, so that a compiler sees few shapes.

A compiled graph holds for one shape, and every new one is compiled again: seconds to minutes in
which nothing trains, and for recorded kernels memory that is kept. Rows whose length is no multiple
of `multiple` are filled up to the next one, at most to data.sequence_length, with tokens that have
no target. They stand behind the row's own tokens and are a document of their own: no token sees
them, no loss counts them, and the number of targets stays, so that loss and gradients are those of
the rows as they were.

Short rows are many rows. So what is padded is also dealt out to micro-batches of as many rows as a
whole micro-batch of that length has: lengths that share a bucket share one shape, and each takes
the memory of a micro-batch of whole rows, but for gradients, which now are summed.

In this project batches of the plan, last micro-batches and evaluations all have one shape; only a
technique that recuts rows changes it. Cost: work on padding, up to twice of the steps with short
rows where a bucket holds two lengths, against the compilation that is saved; it pays in short runs
and with many lengths. Left out: dynamic shapes in the compiler, and filling rows up with text.
Source: tf.data.experimental.bucket_by_sequence_length (pad_to_bucket_boundary).
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger, Line
from headrace.model.head import IGNORED
from headrace.model.mask import Rows
from headrace.plan.symptoms import LoopChange
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)


class ShapeBuckets(Technique[Build]):
    """Pad rows to a few lengths, so that a compiler sees few shapes."""

    multiple: int = Field(default=128, ge=1, le=1 << 24)
    """Tokens of which a row's length is made a multiple, up to data.sequence_length; tuner range 64
    to 512."""

    room: ClassVar[str] = "compile"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    composes: ClassVar[tuple[str, ...]] = ("enrich",)
    excludes: ClassVar[Mapping[str, str]] = {
        "mixture_of_experts": "a router balances all tokens that it sees, padding among them "
        "(arXiv 2101.03961, section 2.2)",
        "optimizer_in_backward": "padded rows come as several micro-batches, whose gradients must "
        "be summed before an update (arXiv 2306.09782)",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("launch:compilation",)
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("few shapes",)
    card: ClassVar[Card] = Card(
        buys=("one compilation, and one recording, for each length that shares a bucket (derived)"),
        costs=(
            "work on padding: length of the bucket over length of the row, in those steps",
            "gradients that are summed (derived)",
        ),
        helps="short runs, many lengths, CUDA graphs and long compilations",
        hurts="long runs, where an hour of padding buys a minute of compiling",
        source="tf.data.experimental.bucket_by_sequence_length (pad_to_bucket_boundary)",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support compiled plans, with rows whose length varies and is not a multiple already."""
        plan = context.plan
        if plan is None:
            return Supported()
        if not any("compiled" in t.composes for t in plan.techniques.values()):
            return Unsupported(
                "nothing is compiled, so that padding costs work and no graph is there that a new "
                "length would have compiled again",
                mend("+torch_compile"),
                RefusalKind.COMBINATION,
            )
        recutting = plan.lengthening
        if not recutting:
            return Unsupported(
                f"every row of this plan has data.sequence_length = {plan.data.sequence_length} "
                "tokens, in training and in evaluation, so that nothing varies",
                mend("+sequence_length_schedule"),
                RefusalKind.COMBINATION,
            )
        for axis in ("context", "pipeline"):
            if getattr(plan.mesh, axis) > 1:
                return Unsupported(
                    f"under mesh.{axis} = {getattr(plan.mesh, axis)} a rank has its part of each "
                    "micro-batch already, and cannot deal it out anew",
                    context.whole(axis),
                    RefusalKind.COMBINATION,
                )
        start = getattr(recutting[0], "start", None)
        if start is not None and start % self.multiple == 0:
            return Unsupported(
                f"rows begin with {recutting[0].name()}.start = {start} tokens, a multiple of "
                f"{self.multiple} already, and so is every later length",
                mend(f"techniques.{self.name()}.multiple={2 * start}"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Sum gradients over micro-batches; activations are at most a whole micro-batch's."""
        if "gradients" not in ledger.memory:
            return ledger
        return ledger.with_line("gradients", Line(ledger.memory["gradients"].bytes, ("always",)))

    def apply(self, build: Build) -> None:
        """Pad and deal out what comes in other lengths."""
        plan = build.plan
        whole, tokens = plan.data.sequence_length, plan.micro_rows * plan.data.sequence_length
        notes = {"came": {}, "trained": {}, "padding": 0, "recompiles": recompiles()}
        build.notes[self.name()] = notes

        def enrich(build: Build, works: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
            dealt: list[MicroBatch] = []
            for work in works:
                R, L = work.ids_BT.shape
                length = min(-(-L // self.multiple) * self.multiple, max(whole, L))
                parts = [work] if length == L else deal(work, length, -(-tokens // length))
                _count(notes["came"], [work])
                _count(notes["trained"], parts)
                notes["padding"] += sum(p.ids_BT.numel() for p in parts) - R * L
                dealt += parts
            return dealt

        build.enrich.append(enrich)

    def active(self, build: Build) -> Evidence:
        """Read shapes as they came and as they were trained, and recompiles for a size.

        Rows that came whole, as where a run resumes after they have grown, need no padding.
        """
        notes = build.notes[self.name()]
        came, trained, padding = notes["came"], notes["trained"], notes["padding"]
        whole = build.plan.data.sequence_length
        fits = all(length % self.multiple == 0 or length >= whole for _, length in trained)
        recompiled = recompiles() - notes["recompiles"]
        shapes = " and ".join(f"{rows} x {length}" for rows, length in trained) or "no rows"
        return Evidence(
            active=bool(came) and fits,
            detail=f"{len(came)} shapes came, trained as {shapes} tokens with {padding} of "
            f"padding; {recompiled} recompiles for a size",
            numbers={
                "shapes_in": len(came),
                "shapes_out": len(trained),
                "padding_tokens": padding,
                "recompiles": recompiled,
            },
        )


def deal(work: MicroBatch, length: int, rows: int) -> list[MicroBatch]:
    """Deal the tokens out into rows of `length`, as micro-batches of `rows` rows each.

    What is added has no target: tokens behind each row, and rows behind the last.
    """
    R, L = work.ids_BT.shape
    more, missing = length - L, -R % rows

    def filled(x_RL: Tensor, value: int = 0) -> Tensor:
        return F.pad(x_RL, (0, more, 0, missing), value=value)

    def counted(x_RL: Tensor, last_R1: Tensor) -> Tensor:
        """Return `x_RL` with rows that are continued by counting, up to the new length."""
        place = torch.arange(more, device=x_RL.device, dtype=x_RL.dtype)
        whole = torch.cat([x_RL, last_R1 + place], dim=1)
        return torch.cat([whole, whole[-1:].expand(missing, -1)])

    positions, segments, prefix_R, noise, _ = work.rows  # which are whole: no rank has a part
    if segments is not None:  # padding is a document of its own
        ends_R1 = segments[:, -1:] + 1
        segments = torch.cat([segments, ends_R1.expand(-1, more)], dim=1)
        segments = torch.cat([segments, segments[-1:].expand(missing, -1)])
        positions = counted(positions, torch.zeros_like(positions[:, -1:]))
    elif positions.size(0) == 1:  # one row of them serves all
        place = torch.arange(more, device=positions.device)[None]
        positions = torch.cat([positions, positions[:, -1:] + 1 + place], dim=1)
    else:
        positions = counted(positions, positions[:, -1:] + 1)
    if prefix_R is not None:
        prefix_R = F.pad(prefix_R, (0, missing))
    noise = None if noise is None else filled(noise, 1 << 30)  # a text of one token
    ids, targets = filled(work.ids_BT), filled(work.targets_BT, IGNORED)
    index = filled(work.index_BT)
    extras = {name: _widened(x, R, L, length, missing) for name, x in (work.extras or {}).items()}
    works = []
    for first in range(0, R + missing, rows):
        here = slice(first, first + rows)
        part = Rows(
            positions if positions.size(0) == 1 else positions[here],
            None if segments is None else segments[here],
            None if prefix_R is None else prefix_R[here],
            None if noise is None else noise[here],
        )
        own = {name: x[here].flatten(0, 1) for name, x in extras.items()}
        works.append(MicroBatch(ids[here], targets[here], part, index[here], own or None))
    return works


def _widened(extra_NX: Tensor, R: int, L: int, length: int, missing: int) -> Tensor:
    """Return what belongs to each token, [R x L, ...], as [rows, length, ...]; padding is zeros."""
    wide = extra_NX.new_zeros(R + missing, length, *extra_NX.shape[1:])
    wide[:R, :L] = extra_NX.unflatten(0, (R, L))
    return wide


def _count(seen: dict[tuple[int, int], int], works: Sequence[MicroBatch]) -> None:
    for work in works:
        shape = (work.ids_BT.size(0), work.ids_BT.size(1))
        seen[shape] = seen.get(shape, 0) + 1


def recompiles() -> int:
    """Count guards on a tensor's size that have failed in this process, by torch's own record."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    return sum(
        "size mismatch" in str(why) for all_ in dynamo.guard_failures.values() for why in all_
    )
