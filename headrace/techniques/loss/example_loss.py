"""Count every text of a batch alike in the loss, whether it has few targets or many.

The baseline's loss is a mean over targets, in which a long answer weighs more than a short one.
Here it is a mean over texts of the mean of each: a target weighs N / (E x n), where its text has n
targets, and the step N targets in E texts. So the weights of a step have the mean 1, and the loss
has its usual size. A text is what stands in one piece in one row: `best_fit_packing` keeps whole
what fits a row, and of a longer text each part counts as one.

Validation measures the plain mean over targets. Source: the choice between the two means is that of
`num_items_in_batch` in transformers 4.46 (github.com/huggingface/transformers/pull/34198).

Shapes: B rows, T tokens, N tokens of a micro-batch, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.model.head import IGNORED, Vocabulary
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

APART = ("best_fit_packing", "document_packing")
"""Techniques whose mask keeps the texts of a row apart."""
EXTRA = "example"
"""Name of a target's weight among what the objective is given."""


def shares(work: MicroBatch) -> Tensor:
    """Return one over the targets of each target's text, fp32 [B, T]; 0 where none counts."""
    segments_BT = work.rows.segments_BT
    assert segments_BT is not None
    # A row that was cut out of a longer one goes on with the longer one's numbers.
    texts_BT = (segments_BT - segments_BT[:, :1]).long()
    counted_BT = (work.targets_BT != IGNORED).float()
    targets_BT = torch.zeros_like(counted_BT).scatter_add_(1, texts_BT, counted_BT)
    return counted_BT / targets_BT.gather(1, texts_BT).clamp(min=1)


def by_example(logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary) -> Tensor:
    """Return the sum over targets in nats, each by its weight; unweighted where none is given."""
    nats_N = vocabulary.nll_of_each(logits_NV, targets_N)
    return (nats_N * extras[EXTRA]).sum() if extras and EXTRA in extras else nats_N.sum()


class ExampleLoss(Technique[Build]):
    """Count every text of a batch alike in the loss, whether it has few targets or many."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "loss"
    stage: ClassVar[Stage] = Stage.STEP
    composes: ClassVar[tuple[str, ...]] = ("objective", "enrich")
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    excludes: ClassVar[Mapping[str, str]] = {
        "label_smoothing": "both say what the loss of a target is (arXiv 1512.00567)",
        "z_loss": "its term is a mean over targets (arXiv 2204.02311)",
        "distillation": "its term is a mean over targets (arXiv 1503.02531)",
    }
    card: ClassVar[Card] = Card(
        buys="short answers that count as much as long ones",
        costs="nothing that shows: two passes over the targets (derived)",
        helps="conversations whose answers differ much in length, where each is an example",
        hurts="plain text, and answers whose length is their worth, as long reasoning",
        source="github.com/huggingface/transformers/pull/34198",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require texts that are kept apart, and whole rows on one rank."""
        plan = context.plan
        if not any(name in plan.techniques for name in APART):
            return Unsupported(
                "nothing keeps the texts of a row apart, so that a text is none of its own",
                mend("+best_fit_packing") | mend("+document_packing"),
                RefusalKind.COMBINATION,
            )
        if plan.mesh.context > 1:
            return Unsupported(
                f"mesh.context = {plan.mesh.context} ranks have a part of each text, and count its "
                "targets apart",
                context.whole("context"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Leave memory and work as they are: weights are a number for each token."""
        return ledger

    def apply(self, build: Build) -> None:
        """Weigh the targets of each step, and the objective by them."""
        spread = build.notes[self.name()] = torch.zeros((), device=build.device)

        def weighed(build: Build, works: Sequence[MicroBatch]) -> list[MicroBatch]:
            shares_BT = [shares(work) for work in works]
            sums = torch.stack(
                [torch.stack([(s > 0).sum(), s.sum()]).float() for s in shares_BT]
            ).sum(dim=0)
            targets, texts = build.world.sum_(sums, "shard")
            weights_BT = [share * (targets / texts.clamp(min=1e-9)) for share in shares_BT]
            spread.copy_(torch.stack([w.max() for w in weights_BT]).max())
            return [
                work._replace(extras={**(work.extras or {}), EXTRA: weight.flatten()})
                for work, weight in zip(works, weights_BT, strict=True)
            ]

        build.enrich.append(weighed)
        build.objective = by_example

    def active(self, build: Build) -> Evidence:
        """Read the largest weight of the last step, and weigh two texts of one row."""
        if build.model.head is None:
            return Evidence(None, "this stage of a pipeline computes no loss")
        largest = build.notes[self.name()].item()
        alike = build.objective is by_example
        return Evidence(
            active=alike and largest > 0,
            detail=f"the largest weight of a target in the last step is {largest:.3g}",
            numbers={"largest_weight": largest},
        )
