"""Train towards a softened target, so that a model does not grow sure without reason.

Cross-entropy asks for all probability on one token, which only endless logits give. Here a target
keeps 1 - smoothing of it, and the vocabulary shares the rest evenly: (1 - smoothing) x nll +
smoothing x the mean nll of all entries. That is the loss of training; validation measures the plain
one. Entries that only pad the vocabulary get their share too.

It goes into the objective, as a part that a head can ask for (kernels/cross_entropy_objective). A
head with kernels, that of fused_cross_entropy or chunked_cross_entropy, hands them the share, and
they sum the logits in a reading that they do anyway. Elsewhere it is torch's own, or, over slices
of a vocabulary, part of what the ranks add up anyway (model/sharded_vocabulary): no more memory is
held, and the logits are read twice more and their gradient once.

Source: arXiv 1512.00567 (section 7).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.costs.work import Stream, Work
from headrace.kernels.cross_entropy_objective import Smoothed
from headrace.model.head import IGNORED
from headrace.plan.technique import Card, Context, Doubt, Evidence, Stage, Supported, Technique

PASSES: Mapping[str, tuple[float, float]] = {"forward": (8, 2), "backward": (8, 1)}
"""Bytes of a fp32 logit that eager torch moves, and its kernels: two sums, of the evidence and of
the loss; and the loss's two gradients made one."""


class LabelSmoothing(Technique[Build]):
    """Train towards a softened target, so that a model does not grow sure without reason."""

    smoothing: float = Field(default=0.1, gt=0, lt=1)
    """Share of a target's probability that all entries share; tuner range 0.01 to 0.2."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "loss"
    stage: ClassVar[Stage] = Stage.STEP
    images: ClassVar[bool] = True
    composes: ClassVar[tuple[str, ...]] = ("objective",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="less certainty on little data: 0.2% of top-1 error on ImageNet (arXiv 1512.00567)",
        costs="16 bytes more of traffic per logit (derived)",
        helps="many passes over little text",
        hurts="one pass over much text, and a model that will teach another (arXiv 1906.02629)",
        source="arXiv 1512.00567, section 7",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a smoothing that gives the token of the text half of the probability or less."""
        if self.smoothing < 0.5:
            return None
        usual = f"techniques.{self.name()}.smoothing=0.1"
        return Doubt(
            f"techniques.{self.name()}.smoothing = {self.smoothing:g} gives the token that came "
            f"{1 - self.smoothing:.0%} of the probability and all others the rest",
            mend(usual),
            changes=(usual,),
        )

    def supports(self, context: Context) -> Supported:
        """Support every device."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add its passes over the logits where no kernel or compiler includes them."""
        sizes = ledger.sizes
        logits = sizes["tokens"] * sizes["vocab"] / sizes.get("tensor_ranks", 1)

        def edit(name: str, piece: Work) -> Work:
            what, _, part = name.partition("/")
            if what != "loss" or part not in PASSES or not isinstance(piece, Stream):
                return piece
            if piece.fused is None:
                return piece
            bytes, kernels = PASSES[part]
            more = bytes * logits / piece.count
            return replace(piece, bytes=piece.bytes + more, kernels=piece.kernels + kernels)

        return ledger.reworked(edit)

    def apply(self, build: Build) -> None:
        """Smooth the objective's targets."""
        # Logits that are all equal, as behind a head of zeros, are moved by 0.0: the sum begins at
        # -0.0, which shows whether anything was added.
        moved = build.notes[self.name()] = torch.full((), -0.0, device=build.device)
        build.objective = Smoothed(self.smoothing, build.config.vocab, moved, IGNORED)

    def active(self, build: Build) -> Evidence:
        """Read by how much it has moved the loss so far."""
        if build.model.head is None:
            return Evidence(None, "this stage of a pipeline computes no loss")
        nats = build.notes[self.name()].item()
        added = math.copysign(1.0, nats) > 0 or nats != 0
        return Evidence(added, f"moved the loss by {nats:.3g} nats", {"moved_nats": nats})
