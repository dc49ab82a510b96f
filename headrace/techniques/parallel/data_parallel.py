"""Sum replicas' gradients bucket by bucket, while the backward pass still makes others.

Ranks along `shard` (data x context) that hold the same weights read other tokens and sum their
gradients. The plain trainer does it after the backward pass, when nothing hides it. Here gradients
are gathered in buckets of about `bucket_mb`, from the last block to the first, and the sum of a
bucket travels while the blocks before it are computed (PyTorch DDP, arXiv 2006.15704). Over several
micro-batches gradients add up on each rank, and are sent in the last one.

Cost: the buckets that arrive last, the embedding's among them, travel when nothing is left to
compute. `reduce = "bf16"` compresses gradients to half of the bytes, and rounds their sums to bf16.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.costs.links import MIB
from headrace.costs.work import Collective, Stream, Work
from headrace.optim.roles import role_of
from headrace.parallel.buckets import GradientBuckets, in_buckets
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

SUMS, COPIES = "reduce/gradients", "reduce/copy"
"""Pieces of work of the plain trainer's sum."""


class DataParallel(Technique[Build]):
    """Sum replicas' gradients bucket by bucket, while the backward pass still makes others."""

    bucket_mb: int = Field(default=25, ge=1, le=1024)
    """Least size of a bucket in MiB; tuner range 10 to 100."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """What gradients are summed in; bf16 is half of the traffic."""

    room: ClassVar[str] = "parallel"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    claims: ClassVar[tuple[str, ...]] = ("sync", "reduce")
    composes: ClassVar[tuple[str, ...]] = ("layouts",)
    symptoms: ClassVar[tuple[str, ...]] = ("interconnect",)
    timed: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        buys="the time of the gradients' sum, but for the last buckets, hidden behind the backward "
        "pass (arXiv 2006.15704)",
        costs="one bucket beside the gradients, and a launch for each (derived)",
        helps="replicas whose gradients take long to sum beside their backward pass",
        hurts="tiny models, which are one bucket; many micro-batches, where the sum is rare",
        source="arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require several ranks with the same weights."""
        mesh = context.plan.mesh
        if mesh.data * mesh.context < 2:
            return Unsupported(
                "one process has nothing to sum",
                mend("mesh.data=2", text="mesh.data=2 under torchrun"),
            )
        if self.reduce == "bf16" and context.precision != "bf16":
            return Unsupported(
                f"the run computes in {context.precision}; sums in bf16 would round its gradients",
                mend("model.precision=bf16") | mend(f"techniques.{self.name()}.reduce=fp32"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Put the sums beside the backward pass, but for the last bucket and the embedding's."""
        return replace(ledger, work=dict(self._worked(ledger)))

    def _worked(self, ledger: Ledger) -> Iterator[tuple[str, Work]]:
        narrower = 0.5 if self.reduce == "bf16" else 1.0
        for name, piece in ledger.work.items():
            if name == SUMS and isinstance(piece, Collective):
                whole = narrower * piece.bytes
                bucket = narrower * self.bucket_mb * MIB
                outside = narrower * piece.bytes * self._outside(ledger)
                last = min(whole, max(bucket, outside))
                for what, bytes in (("", whole - last), ("_last", last)):
                    if bytes:
                        yield (
                            f"{SUMS}{what}",
                            replace(
                                piece,
                                phase="backward",
                                bytes=bytes,
                                kernels=max(1.0, bytes // bucket),
                                beside="" if what else "blocks",
                                last=True,
                            ),
                        )
            elif name == COPIES and isinstance(piece, Stream):
                yield name, piece.with_bytes(lambda bytes: bytes / 2)
            else:
                yield name, piece

    def _outside(self, ledger: Ledger) -> float:
        """Return the share of the learned numbers that is in tables, whose gradients come last."""
        learns = ledger.updates()
        whole = sum(m.numbers for m in learns.values())
        roles = {name: role_of(name, len(matrix.shape)) for name, matrix in learns.items()}
        tables = sum(m.numbers for n, m in learns.items() if roles[n] == "embeddings")
        return tables / whole if whole else 0.0

    def apply(self, build: Build) -> None:
        """Watch the parameters whose gradients are partial; send each bucket when it is full."""
        learned = {
            name: p
            for name, p in build.model.named_parameters()
            if p.requires_grad and "shard" in build.layouts[name].partial
        }
        buckets = GradientBuckets(
            build.world.group("shard"),
            in_buckets(learned, self.bucket_mb * MIB),
            torch.bfloat16 if self.reduce == "bf16" else None,
        )
        buckets.watch()
        for name in learned:
            layout = build.layouts[name]
            layout.partial = layout.partial - {"shard"}
        others = build.reduce

        def reduce(build: Build) -> None:
            buckets.finish()
            others(build)

        build.sync, build.reduce = lambda build, last: buckets.begin(last), reduce
        build.notes[self.name()] = buckets

    def active(self, build: Build) -> Evidence:
        """Report the buckets of the newest step, and how many were sent before its end."""
        buckets: GradientBuckets = build.notes[self.name()]
        return Evidence(
            active=buckets.early > 0 and buckets.sent_bytes > 0,
            detail=f"{buckets.early} of {len(buckets.buckets)} buckets, in all "
            f"{buckets.sent_bytes:,} bytes, were sent within the backward pass",
            numbers={
                "early": buckets.early,
                "buckets": len(buckets.buckets),
                "bytes": buckets.sent_bytes,
            },
        )
