"""Keep documents of a row apart: what every packing of documents shares, and its proof.

Techniques never import each other, so those that separate documents share this: what a mask costs,
and a probe that changes one document of a row and looks at the loss of the next one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.costs.count import instants_of
from headrace.costs.decoder_work import masked
from headrace.costs.ledger import Ledger, Line
from headrace.data.loader import Micro
from headrace.model.head import IGNORED, cross_entropy

ROUNDED = 2.0**-20
"""Share of a loss that may move beside another document where tokens are routed: 8 units in the
last place of fp32. Experts multiply the tokens of all documents in one matmul, whose size decides
how it is summed. Elsewhere nothing may move."""


@dataclass(frozen=True)
class Leak:
    """Hold what changing a document moved."""

    own: float
    """Nats by which its own loss moved."""
    leaked: float
    """Nats by which the loss of the next document in its row moved."""
    separate: bool
    """Whether documents carry segments and do not see each other."""

    @property
    def detail(self) -> str:
        """Return it in words."""
        return (
            f"changing a document moved its own loss by {self.own:.3g}, the next one's "
            f"by {self.leaked:.3g}"
        )

    @property
    def numbers(self) -> dict[str, float]:
        """Return both numbers as evidence has them."""
        return {"own": self.own, "leak": self.leaked}


def with_document_mask(ledger: Ledger) -> Ledger:
    """Add a dense mask, shared by all layers, and the copy that SDPA makes of it in each."""
    sizes = ledger.sizes
    ledger = ledger.with_line("mask", Line(sizes["mask"], ("loss", "turn", "backward")))
    for layer in range(int(sizes["layers"])):
        line = Line(sizes["mask_copy"], instants_of(layer), layer)
        ledger = ledger.with_line(f"{layer}/mask_copy", line)
    return masked(ledger, 1.0, None)


def leak_between_documents(build: Build) -> Leak:
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
    leaked = abs(before - loss(other, second))
    room = ROUNDED * abs(before) if build.auxiliary else 0.0
    return Leak(own, leaked, build.loader.segments and leaked <= room and own > leaked)
