"""Compute the loss and its gradient in two kernels, over the logits that the output matrix made.

The default head casts logits to fp32, and torch's cross-entropy makes log-probabilities, their
gradient and that of the logits: 12 bytes of each of tokens x vocabulary numbers in fp32, 14 in
bf16, and as many times through memory. Here the logits stay as the matmul made them. One kernel
reads them for the loss, one reads them a second time and writes the gradient over them
(kernels/fused_cross_entropy): 4 bytes in fp32, 2 in bf16, and nothing else of that size. Each
token's numbers are those of the default head: the same logits, fp32 arithmetic, one rounding of the
gradient.

The logits of all tokens are there at once, so this is for memory that holds them; the chunked loss
holds a part of them and owns the same head. Under tensor parallelism each rank's kernels read the
columns that it has, and ranks merge three numbers of a token between both. What is computed of the
logits must be cross-entropy, plain, with label smoothing or with a z-loss: the kernels compute all
of these in the same two readings. They cap the logits in passing where `model.logit_cap` asks for
it. A term of another technique reads logits in its own backward pass, when they are written over,
and is refused. An objective of another sweep, as Sophia's, gets fp32 logits and the gradient in
memory of its own. The head stays out of the compiler: there is nothing to fuse between a matmul and
a kernel, and compiled code would not write over logits. Source: Liger Kernel (arXiv 2410.10989).
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger, Line
from headrace.kernels.cross_entropy_objective import kernel_arguments
from headrace.kernels.fused_cross_entropy import fused_cross_entropy
from headrace.kernels.launches import COUNTS, since
from headrace.model.head import IGNORED, Head, Objective, Vocabulary, cross_entropy
from headrace.model.sharded_vocabulary import ShardedVocabulary
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

OLDEST = (8, 0)
"""Compute capability of the oldest GPUs that Triton supports: Ampere's."""


class FusedVocabulary(Vocabulary):
    """It computes the likelihood over a whole vocabulary by the kernels."""

    def nll(self, logits_NV: Tensor, targets_N: Tensor, smoothing: float = 0.0) -> Tensor:
        """Sum the negative log likelihood of the targets that are not `IGNORED`; a scalar."""
        how: dict[str, Any] = {"ignored": IGNORED, "label_smoothing": smoothing}
        return fused_cross_entropy(logits_NV, targets_N, **how)


class FusedHead(Head):
    """A head computes cross-entropy from the matmul's own logits and writes over them."""

    compilable = False
    """Compiled, the gradient would take memory of its own beside the logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.vocabulary: Vocabulary = FusedVocabulary()

    def forward(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        extras: Any,
        objective: Objective,
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Return the objective's sum over all tokens, times `scale`; a scalar."""
        asked = kernel_arguments(objective, cross_entropy)
        if asked is not None:
            logits_NV = F.linear(hidden_ND, weight_VD)
            how = {"softcap": self.cap, **asked}
            if isinstance(self.vocabulary, ShardedVocabulary):
                return self.vocabulary.nll_by_kernels(logits_NV, targets_N, **how) * scale
            how |= {"ignored": IGNORED, "in_place": True}
            return fused_cross_entropy(logits_NV, targets_N, **how) * scale
        return super().forward(hidden_ND, weight_VD, targets_N, extras, objective, scale)


class FusedCrossEntropy(Technique[Build]):
    """Compute the loss and its gradient in two kernels, written over the logits."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "loss"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.head",)
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:logits", "memory bandwidth:logits")
    card: ClassVar[Card] = Card(
        buys="8 of 12 bytes per token and vocabulary entry in fp32, 10 of 12 in bf16 (derived)",
        costs=(
            "the head runs uncompiled",
            "no terms of the loss but z_loss and label_smoothing",
        ),
        helps="large vocabularies, when memory holds the logits once: one whole product is faster "
        "than chunks of it",
        hurts="batches whose logits do not fit: chunks hold a part of them",
        source="arXiv 2410.10989",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support Triton on an NVIDIA GPU, whole logits, and no other technique that reads them."""
        if (lacks := context.lacks_triton()) is not None:
            return lacks
        if (context.capability or (0, 0)) < OLDEST:
            return Unsupported(
                f"{context.device_name} is older than Ampere", "leave it out", RefusalKind.DEVICE
            )
        plan = context.plan
        others = plan.techniques.values() if plan is not None else ()
        terms = [t.name() for t in others if "terms" in t.composes]
        if terms:
            return Unsupported(
                f"its backward pass writes over the logits, which {' and '.join(terms)} reads",
                mend(*(f"-{name}" for name in terms)),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep the matmul's own logits alone, and the output matrix's gradient beside them."""
        sizes = ledger.sizes
        own = sizes["logits_fused"] / 3  # what one tensor of logits is in the run's arithmetic
        kept = min(ledger.memory["logits"].bytes, own)
        ledger = ledger.with_line("logits", Line(kept, ("loss",)))
        both = sizes["activation_bytes"] * sizes["dim"] * (sizes["vocab"] + sizes["tokens"])
        ledger = ledger.with_line("head_gradients", Line(both, ("loss",)))
        ledger = replace(ledger, sizes={**sizes, "loss_by_kernels": 1.0})
        # Logits are read once and a half (its exponentials take as long), then read and written:
        # 3.0 and 4.4 ms for 8.4 GB of them (kernels.jsonl, 1b).
        return ledger.made_one("loss", forward=0.5, backward=0.74)

    def apply(self, build: Build) -> None:
        """Fill the head, and note what was launched before."""
        build.parts.head = FusedHead
        build.notes[self.name()] = COUNTS.copy()

    def active(self, build: Build) -> Evidence:
        """Read which kernels the run has launched."""
        if build.model.head is None:
            return Evidence(None, "the head is on another rank")
        launched = since(build.notes[self.name()], "cross_entropy_")
        counts = {p: launched.get(f"cross_entropy_{p}", 0) for p in ("forward", "backward")}
        return Evidence(
            active=isinstance(build.model.head, FusedHead) and all(counts.values()),
            detail="launched its kernels "
            + " and ".join(f"{count} times {phase}" for phase, count in counts.items()),
            numbers={f"{phase}_launches": count for phase, count in counts.items()},
        )
