"""Divide the momentum by a cheap estimate of the curvature, and clip every step by element.

Every `every` steps a second sweep over the same micro-batches measures how curved the loss is in
each weight (Gauss-Newton-Bartlett): labels are drawn from the model's own distribution, and the
squares of the gradients against them are, in the mean, the diagonal of the Gauss-Newton matrix. The
optimizer (optim/sophia) divides by it.

A label is a pure function of (seed, step, place in the stream, logits): the largest of logit plus
Gumbel noise, the noise a hash of (seed, step, place, vocabulary id) in 32-bit words. So no layout
of ranks, rows or vocabulary changes what is drawn, nothing is kept for a resume, and a drawn label
needs one argmax over the vocabulary. Two layouts differ only where two entries tie within fp32
rounding, about one label in a million.

Cost: one more forward and backward pass every `every` steps, on `share` of the micro-batches; two
states per weight, as AdamW. What layers add to the loss (a router's balance) is in the second sweep
too. Left out: Hutchinson's estimator, which needs second derivatives. Source: arXiv 2305.14342 and
its code (SophiaG); the hash is C. Wellons' lowbias32 family (hash-prospector).

Shapes: N tokens, V vocabulary columns that are here.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build, MicroBatch, Pass, Route
from headrace.core.remedy import mend
from headrace.costs import work as costs
from headrace.costs.ledger import Ledger
from headrace.model.head import IGNORED, Vocabulary
from headrace.optim.elementwise import FP32, predict_rest
from headrace.optim.sophia import SophiaOptimizer
from headrace.parallel.layout import local_of
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

WORD = 0xFFFFFFFF
STEPPED, ESTIMATED = (76, 8), (40, 4)
"""Bytes of a number and launches of a tensor: of an update, and of taking in an estimate."""
DRAWN = (500, 35)
"""Bytes of a logit and launches of a chunk in eager torch, as a label is drawn."""
SENT = ("reduce/", "count/")
"""How the names of pieces begin that ranks send each other after each sweep."""
CHUNK_TOKENS = 32
"""Tokens whose noise is held at once: about 33 bytes x chunk x vocabulary (measured), which hides
behind the logits. Not a number of elements: all shards of a vocabulary reduce the same chunks."""


def mix(x: Any) -> Any:
    """Mix the bits of 32-bit words, one-to-one; `x` is an int or an int64 tensor.

    Both factors are below 2^31, so no product leaves 63 bits: every device has the same result.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def noise_keys(seed: int, step: int, index_N: Tensor) -> Tensor:
    """Return two words per token that its noise is made from, int64 [N, 2]."""
    lanes = []
    for lane in (1, 2):
        word: Any = lane
        for part in (seed & WORD, seed >> 32 & WORD, step, index_N & WORD, index_N >> 32):
            word = mix((word + part + 0x9E3779B9) & WORD)
        lanes.append(word)
    return torch.stack(lanes, dim=-1)


def gumbel(keys_N2: Tensor, ids_V: Tensor) -> Tensor:
    """Return Gumbel noise fp32 [N, V] of each (token, vocabulary id)."""
    words_NV = mix(ids_V[None] ^ keys_N2[:, :1])
    words_NV = mix((words_NV + keys_N2[:, 1:]) & WORD)
    # The large noises, which decide, come from small shares: those keep all 24 bits of fp32.
    share_NV = ((words_NV.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-share_NV))


def draw(logits_NV: Tensor, keys_N2: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Draw a label per token from softmax(logits), [N]."""
    ids_V = vocabulary.ids(logits_NV)
    # A compiler fuses noise and argmax, and would unroll the chunks.
    size = max(1, len(logits_NV) if torch.compiler.is_compiling() else CHUNK_TOKENS)
    chunks = zip(logits_NV.split(size), keys_N2.split(size), strict=True)
    return torch.cat([vocabulary.argmax(x_nV + gumbel(k_n2, ids_V)) for x_nV, k_n2 in chunks])


def against_draws(
    logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary
) -> Tensor:
    """Return the second sweep's objective: cross-entropy against drawn labels."""
    with torch.no_grad():
        labels_N = draw(logits_NV.detach(), extras["sophia"], vocabulary)
    return vocabulary.nll(logits_NV, labels_N.masked_fill(targets_N == IGNORED, IGNORED))


class Sophia(Technique[Build]):
    """Divide the momentum by a cheap estimate of the curvature, and clip every step by element."""

    every: int = Field(default=10, ge=1, le=10**15)
    """Steps between two estimates of the curvature; tuner range 5 to 20."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of a step's micro-batches that the estimate sees, one at least."""
    rho: float = Field(default=0.05, gt=0, le=10)
    """Share of the curvature that divides: larger clips less. The paper's gamma; tuner range 0.01
    to 0.1."""
    momentum: float = Field(default=0.965, ge=0, lt=1)
    """Share of the old momentum that is kept."""
    memory: float = Field(default=0.99, ge=0, lt=1)
    """Share of the old curvature that is kept at an estimate."""

    rest: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    room: ClassVar[str] = "optim"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    claims: ClassVar[tuple[str, ...]] = ("passes",)
    composes: ClassVar[tuple[str, ...]] = ("routes",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="fewer steps to the same loss: half of AdamW's for GPT-2 sizes in its paper",
        costs=(
            "a second forward and backward pass every 10 steps: a tenth more time, and the draws "
            "of its labels, 500 bytes a logit where no compiler fuses them (derived)",
            "8 launches a tensor where fused AdamW has one for a list (derived)",
        ),
        helps="pretraining whose AdamW is already tuned; larger learning rates stay stable",
        hurts="short runs; later comparisons with tuned baselines found a smaller gain than the "
        "paper (arXiv 2509.02046)",
        source="arXiv 2305.14342; github.com/Liuhong99/Sophia",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere; a pipeline's schedule is made for all micro-batches."""
        plan = context.plan
        if plan is not None and plan.mesh.pipeline > 1 and self.share < 1:
            return Unsupported(
                "a pipeline runs all micro-batches of a step or none",
                mend("techniques.sophia.share=1.0"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add a second sweep now and then, its draws, and an update tensor by tensor.

        The states are as large as AdamW's.
        """
        work = ledger.flops["forward"] + ledger.flops["backward"]
        ledger = ledger.with_flops("curvature", work * self.share / self.every)
        traffic = STEPPED[0] + ESTIMATED[0] / self.every
        each = STEPPED[1] + ESTIMATED[1] / self.every
        ledger = predict_rest(
            ledger, self.name(), states=2, traffic=traffic, kernels=0, each=each
        ).reworked(self._swept)
        one = max((4 * m.numbers for m in ledger.updates(self.name()).values()), default=0.0)
        return self._drawn(ledger.updating(one))

    def _swept(self, name: str, piece: costs.Work) -> costs.Work:
        """Repeat what a sweep computes and sends, as often as one is due."""
        repeats = self.share if piece.phase != "optimizer" else float(name.startswith(SENT))
        if name == "clip/optimizer":  # the norm is measured, and nothing is scaled
            repeats = 1 / 3
        return replace(piece, count=piece.count * (1 + repeats / self.every))

    def _drawn(self, ledger: Ledger) -> Ledger:
        """Add the draws of labels, where the head is on this rank."""
        sizes = ledger.sizes
        if "logits" not in ledger.memory or "tokens" not in sizes:
            return ledger
        logits = sizes["tokens"] * sizes["vocab"] / sizes.get("tensor_ranks", 1.0)
        bytes, kernels = DRAWN[0] * logits, DRAWN[1] * -(-sizes["tokens"] // CHUNK_TOKENS)
        if sizes.get("compiled_loss"):  # noise and argmax are one kernel over the logits
            bytes, kernels = FP32 * logits, 1.0
        drawn = costs.Stream("forward", self.share / self.every, bytes, kernels)
        return replace(ledger, work={**ledger.work, "curvature/draws": drawn})

    def apply(self, build: Build) -> None:
        """Route all parameters that no other technique takes, and add the second sweep."""
        config = build.plan.optimizer

        def make(named: Any) -> SophiaOptimizer:
            return SophiaOptimizer(
                named,
                lr=config.lr,
                betas=(self.momentum, self.memory),
                rho=self.rho,
                weight_decay=config.weight_decay,
            )

        build.routes.append(Route(self.name(), lambda name, p: True, make, rest=self.rest))
        baseline = build.passes

        def passes(build: Build, step: int) -> Sequence[Pass]:
            due = step % self.every == 0 and self.name() in build.optimizers
            return [*baseline(build, step), *([self._sweep(build, step)] if due else [])]

        build.passes = passes

    def _sweep(self, build: Build, step: int) -> Pass:
        """Return the second sweep of a step."""
        counted: list[Tensor] = []

        def keyed(works: Sequence[MicroBatch]) -> list[MicroBatch]:
            taken = works[: max(1, math.ceil(self.share * len(works)))]
            targets = torch.stack([(w.targets_BT != IGNORED).sum() for w in taken]).sum()
            counted.append(build.world.sum_(targets, "shard"))
            return [
                w._replace(
                    extras={
                        **(w.extras or {}),
                        "sophia": noise_keys(build.plan.seed, step, w.index_BT.flatten()),
                    }
                )
                for w in taken
            ]

        def absorb(build: Build, finite: Tensor) -> None:
            optimizer = build.optimizers[self.name()]
            assert isinstance(optimizer, SophiaOptimizer)
            optimizer.found_inf = 1.0 - finite
            optimizer.estimate(counted[-1].float())

        return Pass("curvature", against_draws, keyed, absorb)

    def active(self, build: Build) -> Evidence:
        """Report weights with a measured curvature, and how many of them clipping still stops."""
        optimizer = build.optimizers.get(self.name())
        updates, total, curved, clipped = getattr(optimizer, "updates", 0), 0, 0, 0
        for state in optimizer.state.values() if optimizer is not None else ():
            m, h = local_of(state["exp_avg"]), local_of(state["hessian"])
            total += h.numel()
            curved += int((h > 0).sum())
            clipped += int((m.abs() > self.rho * h).sum())
        numbers = {
            "updates": updates,
            "curved_fraction": curved / max(1, total),
            "clipped_fraction": clipped / max(1, total),
        }
        labels = getattr(optimizer, "labels", None)
        blind = labels is not None and labels.item() == 0  # no sweep had a target to draw for
        return Evidence(
            active=updates > 0 and (curved > 0 or blind),
            detail=f"{curved} of {total} weights have a curvature; {clipped} steps are clipped"
            + ("; no sweep had a target yet, so there is none to have" if blind else ""),
            numbers=numbers,
        )
