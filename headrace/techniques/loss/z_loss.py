"""Pull the softmax's normaliser towards one, so that logits cannot drift.

Cross-entropy does not see a constant that is added to all logits of a token. Nothing holds that
constant, and in half precision large logits are coarse. This adds `weight` x logsumexp^2 per target
to the loss of training; validation measures the plain one. It reduces over the vocabulary only
through `vocabulary`, so it is right on a chunk of tokens and on a shard of the vocabulary, whoever
fills the head.

It goes around the objective, as a part that a head can ask for (kernels/cross_entropy_objective). A
head with kernels, that of fused_cross_entropy or chunked_cross_entropy, hands them the weight, and
they make both gradients at once: nothing more is read or held. Elsewhere autograd keeps the logits
for its gradient, and adds a gradient of theirs to the loss's.

Source: PaLM (arXiv 2204.02311, section 5).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger
from headrace.costs.work import Stream, Work
from headrace.kernels.cross_entropy_objective import WithZLoss
from headrace.model.head import IGNORED
from headrace.plan.symptoms import LoopChange
from headrace.plan.technique import Card, Context, Doubt, Evidence, Stage, Supported, Technique

STRONG = 1e-2
"""Weight above which the term may outweigh cross-entropy: ten times the most that a tuner tries.
Chosen, not measured."""
PASSES: Mapping[str, tuple[float, float]] = {"forward": (24, 4), "backward": (36, 4)}
"""Bytes of a fp32 logit that eager torch moves, and its kernels: largest, difference, exponential,
sum; and the last three again for their gradient, which is added to the loss's."""


class ZLoss(Technique[Build]):
    """Pull the softmax's normaliser towards one, so that logits cannot drift."""

    weight: float = Field(default=1e-4, gt=0, le=1)
    """Nats per squared logsumexp of a target; tuner range 1e-5 to 1e-3."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "loss"
    stage: ClassVar[Stage] = Stage.STEP
    composes: ClassVar[tuple[str, ...]] = ("objective",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("instability",)
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("log-sum-exp penalty",)
    card: ClassVar[Card] = Card(
        buys="logits that stay small, where a run's loss spikes (arXiv 2204.02311)",
        costs=(
            "8 bytes more per logit that the head holds: the kept logits and a second "
            "gradient of them, unless kernels make the loss (derived)"
        ),
        helps="long runs in half precision with a large vocabulary",
        hurts="short runs, which end before logits drift",
        source="arXiv 2204.02311, section 5",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a weight with which the normaliser's term outweighs the loss of the text."""
        if self.weight <= STRONG:
            return None
        usual = f"techniques.{self.name()}.weight=1e-4"
        return Doubt(
            f"techniques.{self.name()}.weight = {self.weight:g} is {self.weight / 1e-4:,.0f} times "
            "the usual: the term of the normaliser outweighs what the text teaches",
            mend(usual),
            changes=(usual,),
        )

    def supports(self, context: Context) -> Supported:
        """Support every device."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep logits and their second gradient: two more fp32 tensors of the logits' size.

        Scaling the line that it finds, it is right for a chunk and for a slice of them too. A chunk
        of all columns whose logits are fp32 and not capped keeps them already. Kernels that make
        the loss make it in passing.
        """
        if ledger.sizes.get("loss_by_kernels"):
            return ledger
        sizes, ledger = ledger.sizes, self._worked(ledger)
        if sizes.get("compiled_loss"):
            # torch 2.11's inductor rounds the first gradient, so that the sum goes beside the
            # logits; 2.13's goes over them. The weights' gradient comes when the logits have left.
            ledger = ledger.without(["head_gradients"])
            return ledger.scaled(lambda name: name == "logits", 2)
        if sizes.get("logits_kept"):  # by another term, whose own gradients are more
            return ledger
        parts, leaf = sizes.get("tensor_ranks", 1), sizes.get("logits_leaf", 0.0)
        own, kept = sizes["vocab"] / parts, sizes["logits_per_token"] + leaf  # without it
        keeps = parts == 1 and leaf >= FP32 * own and not sizes["capped"]
        more = FP32 * own * (1 if keeps else 2)
        return ledger.scaled(lambda name: name == "logits", 1 + more / kept)

    def _worked(self, ledger: Ledger) -> Ledger:
        """Add its passes over the logits, fused where the loss's are."""
        sizes, more = ledger.sizes, dict[str, Work]()
        logits = sizes["tokens"] * sizes["vocab"] / sizes.get("tensor_ranks", 1)
        for part, (bytes, kernels) in PASSES.items():
            if isinstance(loss := ledger.work.get(f"loss/{part}"), Stream):
                one = logits / loss.count
                piece = replace(
                    loss, bytes=bytes * one, kernels=kernels, fused=sizes["activation_bytes"] * one
                )
                more[f"loss/z_{part}"] = piece.compiled() if loss.fused is None else piece
        return replace(ledger, work={**ledger.work, **more})

    def apply(self, build: Build) -> None:
        """Add it to the objective."""
        added = build.notes[self.name()] = torch.zeros((), device=build.device)
        build.objective = WithZLoss(build.objective, self.weight, added, IGNORED)

    def active(self, build: Build) -> Evidence:
        """Read what it has added to the loss so far."""
        if build.model.head is None:
            return Evidence(None, "this stage of a pipeline computes no loss")
        nats = build.notes[self.name()].item()
        return Evidence(nats > 0, f"added {nats:.3g} nats", {"added_nats": nats})
