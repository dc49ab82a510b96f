"""Begin with short rows and lengthen them: the same tokens, cheaper and steadier at first.

A step at length L cuts each row of T tokens into T / L rows; nothing is dropped, and every target
stays, those across a cut too. Early on a model learns from near tokens, so that far ones cost
attention and give noise: short rows make the first steps cheaper (attention grows with L) and allow
larger learning rates. L is a pure function of the step: `start`, then twice as much as often as it
divides T, then T, in equal parts of the time until `until`. So there are few lengths, because each
is a shape that a compiler compiles anew.

Positions restart at a cut, except in a document that begins inside of the new row. Left out:
lengths by a measured loss (they would not be a function of the step), and filling up rows that do
not divide. Source: arXiv 2108.06084; Composer's SeqLengthWarmup.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.core.units import divisors
from headrace.costs.ledger import Ledger
from headrace.data.loader import Micro
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.plan.until import doubled, end_step, unknown_end, unreached_end, value_at


def lengths_to(whole: int, start: int) -> list[int]:
    """Return `start`, its doublings that divide `whole`, and `whole`."""
    return [length for length in doubled(start, whole) if whole % length == 0]


def cut(micro: Micro, length: int) -> Micro:
    """Cut the same tokens into rows of `length`."""

    def rows(whole_BT: Tensor) -> Tensor:
        return whole_BT.view(-1, length)

    micro = replace(micro, ids_BT=rows(micro.ids_BT), targets_BT=rows(micro.targets_BT))
    if micro.segments_BT is None or micro.positions_BT is None:
        return micro
    # A document that began before the cut is further from its beginning than the row is long.
    positions_BT = torch.minimum(rows(micro.positions_BT), torch.arange(length))
    if micro.positions_BT.is_pinned():
        positions_BT = positions_BT.pin_memory()
    return replace(micro, segments_BT=rows(micro.segments_BT), positions_BT=positions_BT)


class SequenceLengthSchedule(Technique[Build]):
    """Begin with short rows and lengthen them: the same tokens, cheaper and steadier at first."""

    start: int = Field(default=64, ge=2, le=1 << 24)
    """Tokens of a row in the first step; it must divide data.sequence_length. One has none before
    it, and attention nothing to learn."""
    until: float = Field(default=0.3, gt=0, le=10**15)
    """When rows are whole: at most 1 is a share of the schedule's steps, above it is a step."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "schedule"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    composes: ClassVar[tuple[str, ...]] = ("recut", "values")
    follows_horizon: ClassVar[bool] = True
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("instability", "computation:attention")
    card: ClassVar[Card] = Card(
        buys=(
            "attention of short rows in the first steps, and a steadier start",
            "Composer reports about 1.5x on GPT-2 125M (A100)",
        ),
        costs=(
            "one more compiled shape per length",
            "the first steps see no far tokens",
        ),
        helps="long rows, where attention is a large share of the work; large learning rates",
        hurts="short rows, and fine-tuning of a model that knows far tokens already",
        source="arXiv 2108.06084; docs.mosaicml.com, Sequence Length Warmup",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a schedule by which no step of the run has whole rows."""
        ends = end_step(self.until, plan.horizon_steps)
        so = f"no step sees the {plan.data.sequence_length} tokens that are validated"
        return unreached_end(self, plan, ends, "makes rows whole", so)

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require that `start` divides a row, and that the schedule knows its end."""
        plan = context.plan
        if plan is None:
            return Supported()
        whole, name = plan.data.sequence_length, self.name()
        unit = 2 * plan.mesh.context if plan.mesh.context > 1 else 1
        fits = [n for n in divisors(whole) if n % unit == 0 and 1 < n < whole]
        if not fits:
            return Unsupported(
                f"rows of data.sequence_length = {whole} tokens cannot be cut evenly"
                + (f" into multiples of 2 x mesh.context = {unit}" if unit > 1 else ""),
                mend(f"data.sequence_length={-(-whole // (4 * unit)) * 4 * unit}"),
            )
        if self.start not in fits:
            near = min(fits, key=lambda n: abs(n - self.start))
            return Unsupported(
                f"start = {self.start} tokens does not cut a row of {whole} evenly"
                + (f" into multiples of {unit}" if unit > 1 else ""),
                mend(f"techniques.{name}.start={near}"),
            )
        if end_step(self.until, plan.horizon_steps) is None:
            return unknown_end(f"techniques.{name}.until", self.until)
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return what whole rows cost, which come: the run's peak, and its longest steps."""
        return ledger

    def apply(self, build: Build) -> None:
        """Give each step its length, and cut its rows."""
        plan = build.plan
        lengths = lengths_to(plan.data.sequence_length, self.start)
        ends = end_step(self.until, plan.horizon_steps)
        assert ends is not None, "supports asks for it"
        build.values["sequence_length"] = lambda step: float(value_at(step, lengths, ends))
        seen: dict[int, int] = {}
        build.notes[self.name()] = seen

        def recut(build: Build, micro: Micro) -> Micro:
            length = int(build.now["sequence_length"])
            micro = cut(micro, length) if length < micro.ids_BT.size(1) else micro
            seen[micro.ids_BT.size(1)] = seen.get(micro.ids_BT.size(1), 0) + 1
            return micro

        build.recut.append(recut)

    def active(self, build: Build) -> Evidence:
        """Report the lengths of the rows that were trained."""
        seen: dict[int, int] = build.notes[self.name()]
        now = build.now.get("sequence_length")
        counts: dict[str, Any] = {f"micro_batches_of_{n}": count for n, count in seen.items()}
        return Evidence(
            active=now is not None and seen.get(int(now), 0) > 0,
            detail="trained rows of " + (" and ".join(map(str, seen)) or "no") + " tokens",
            numbers=counts,
        )
