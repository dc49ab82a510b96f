"""Let tokens of a row see their own document only, with positions that restart in each.

The baseline cuts one stream of documents into rows, so a row holds the end of one text and the
beginning of others, and plain causal attention lets them look at each other. This composes the mask
with `document` and restarts positions: what a document computes no longer depends on its
neighbours. No token is padded or dropped. Source: arXiv 2107.02027; Llama 3 (arXiv 2407.21783,
3.2).

Cost: SDPA takes the mask as a dense tensor and loses its causal kernel; a backend that skips blocks
of foreign documents turns the mask into a saving.
"""

from typing import ClassVar

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.costs.count import instants_of
from headrace.costs.decoder_work import masked
from headrace.costs.ledger import Ledger, Line
from headrace.data.loader import Micro
from headrace.model.head import IGNORED, cross_entropy
from headrace.plan.technique import Card, Context, Evidence, Stage, Supported, Technique

ROUNDED = 2.0**-20
"""Share of a loss that may move beside another document where tokens are routed: 8 units in the
last place of fp32. Experts multiply the tokens of all documents in one matmul, whose size decides
how it is summed. Elsewhere nothing may move."""


class DocumentPacking(Technique[Build]):
    """Let tokens of a row see their own document only, with positions that restart in each."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "data"
    stage: ClassVar[Stage] = Stage.PARTS
    composes: ClassVar[tuple[str, ...]] = ("mask",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("wasted tokens",)
    card: ClassVar[Card] = Card(
        buys="rows without padding whose documents do not see each other",
        costs="the causal kernel, under SDPA: a dense mask of rows x length^2 (derived)",
        helps="short documents, fine-tuning, long rows",
        hurts="long documents, where there is nothing to separate (nanochat measured no gain at "
        "2,048 tokens)",
        source="arXiv 2107.02027; arXiv 2407.21783, section 3.2",
    )

    def supports(self, context: Context) -> Supported:
        """Run everywhere: any backend takes the mask."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add a dense mask, shared by all layers, and the copy that SDPA makes of it in each."""
        sizes = ledger.sizes
        ledger = ledger.with_line("mask", Line(sizes["mask"], ("loss", "turn", "backward")))
        for layer in range(int(sizes["layers"])):
            line = Line(sizes["mask_copy"], instants_of(layer), layer)
            ledger = ledger.with_line(f"{layer}/mask_copy", line)
        return masked(ledger, 1.0, None)

    def apply(self, build: Build) -> None:
        """Compose the mask; the loader then makes documents and positions."""
        build.mask = build.mask.with_document()

    def active(self, build: Build) -> Evidence:
        """Change one document, and look at its own loss and at the next one's."""
        rows, length = build.plan.micro_rows, build.plan.data.sequence_length
        half = max(1, length // 2)
        place = torch.arange(length).expand(rows, -1)
        second = place >= half
        ids = place % build.config.vocab
        other = ids.where(second, (ids + 1) % build.config.vocab)
        segments, positions = second.int(), place - half * second
        one = torch.ones((), device=build.device)

        def loss(ids_BT: Tensor, of: Tensor) -> float:
            micro = Micro(ids_BT, ids.where(of, IGNORED), segments, positions)
            work = build.place(build, micro)
            # A prefix leaves out targets that it shows, which may be all of this probe's.
            targets_N = micro.targets_BT.flatten().to(build.device)
            work = work._replace(targets_BT=targets_N[work.index_BT])
            with torch.no_grad():
                total = build.engine(build, [work], cross_entropy, one)
            for axis in ("shard", "pipeline"):
                build.world.sum_(total, axis)
            return float(total)

        own = abs(loss(ids, ~second) - loss(other, ~second))
        before = loss(ids, second)
        leak = abs(before - loss(other, second))
        room = ROUNDED * abs(before) if build.auxiliary else 0.0
        return Evidence(
            active=build.loader.segments and leak <= room and own > leak,
            detail=f"changing a document moved its own loss by {own:.3g}, the next one's "
            f"by {leak:.3g}",
            numbers={"own": own, "leak": leak},
        )
