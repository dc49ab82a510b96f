"""Let a token see a pattern of blocks: near ones, every n-th, the first ones, and a few by chance.

Attention's work grows with the square of the row. Here a block of queries sees the `local` blocks
up to its own, every `stride`-th block before it, the `first` blocks of the row, and `random` others
of those before it, so that any two tokens are a few layers apart (BigBird). Work grows with the
blocks that are visited, if the backend skips the others: `flex_attention` does, in units of 128
tokens. torch's SDPA takes a dense mask instead, computes every score and loses its causal kernel.

The pattern is one part of the mask description: it is laid on rows, and packed documents cut it
further, so that a document which does not begin the row has no first blocks. The draw is a hash of
the two blocks' places and `seed`, the same in every layer, on every device, and in every longer
row. Sampling computes rows whole. Sources: arXiv 2007.14062 (BigBird), 2004.05150 (Longformer),
1904.10509 (strides).
"""

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.count import instants_of
from headrace.costs.decoder_work import masked
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import TILE
from headrace.model.attention import weights
from headrace.model.mask import BlockPattern, Rows
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)


def skipped(pattern: BlockPattern, length: int) -> tuple[float | None, int]:
    """Return what a kernel that skips blocks of `TILE` tokens leaves of a pattern in a row.

    Returns:
        The share of causal blocks that are left, None where blocks of the pattern are no whole
        number of the kernel's; and the most of queries that see one of keys.
    """
    if pattern.block % TILE:
        return None, 0
    count, times = -(-length // TILE), pattern.block // TILE
    seen_ZZ = pattern.seen(-(-length // pattern.block))
    seen_ZZ = seen_ZZ.repeat_interleave(times, 0).repeat_interleave(times, 1)[:count, :count].tril()
    return 2 * seen_ZZ.sum().item() / (count * (count + 1)), int(seen_ZZ.sum(0).max())


class SparseAttention(Technique[Build]):
    """Let a token see a pattern of blocks: near ones, every n-th, the first, a few by chance."""

    block: int = Field(default=128, ge=1, le=1 << 24)
    """Tokens of a block; flex_attention skips multiples of 128 whole; tuner range 128 to 512."""
    local: int = Field(default=3, ge=1, le=1 << 24)
    """Blocks up to the query's own that it sees, its own included; tuner range 1 to 8."""
    stride: int = Field(default=0, ge=0, le=1 << 24)
    """Distance in blocks of those that it sees before it; 0 is none; tuner range 4 to 16."""
    first: int = Field(default=1, ge=0, le=1 << 24)
    """Blocks at the row's beginning that all see (global blocks); tuner range 0 to 2."""
    random: int = Field(default=2, ge=0, le=1 << 24)
    """Other blocks before its own that each block of queries draws; tuner range 0 to 3."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the draw; it is part of the model, as its sizes are."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    composes: ClassVar[tuple[str, ...]] = ("mask",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("computation:attention",)
    card: ClassVar[Card] = Card(
        buys=(
            "attention's work in proportion to the visited blocks, with a backend that skips "
            "the others (derived)"
        ),
        costs=(
            "what no visited block holds is heard through other tokens only",
            "under SDPA a dense mask of length^2 and its copy in every layer on a CPU (derived)",
        ),
        helps="rows of many times block x (local + first + random) tokens, with flex_attention",
        hurts="short rows, and SDPA, which computes what it masks",
        source="arXiv 2007.14062; arXiv 2004.05150; arXiv 1904.10509",
    )

    @property
    def pattern(self) -> BlockPattern:
        """Return the knobs as the mask's pattern."""
        return BlockPattern(self.block, self.local, self.stride, self.first, self.random, self.seed)

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support patterns that leave blocks out, with whole rows on one rank."""
        plan = context.plan
        length = plan.data.sequence_length
        if context.has_ring:
            return Unsupported(
                f"the ring of mesh.context = {plan.mesh.context} ranks has no pattern of blocks",
                context.whole("context"),
                RefusalKind.COMBINATION,
            )
        if self.pattern.density(length) == 1:
            known = self.local + self.first + self.random
            fewer = "techniques.sparse_attention.stride=0" if self.stride else ""
            return Unsupported(
                f"the pattern leaves out none of the blocks of rows of {length} tokens",
                mend(f"data.sequence_length={self.block * 4 * known}", fewer),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add a dense mask, shared by all layers, and the copy that SDPA makes of it in each.

        With documents masked the mask is theirs, and the pattern lies in it.
        """
        seen, column = skipped(self.pattern, int(ledger.sizes["length"]))
        ledger = masked(ledger, 1.0, seen, column=column)
        if "mask" in ledger.memory:
            return ledger
        sizes = ledger.sizes
        line = Line(sizes["mask"] / sizes["rows"], ("loss", "turn", "backward"))
        ledger = ledger.with_line("mask", line)
        for layer in range(int(sizes["layers"])):
            copied = Line(sizes["mask_copy"] / sizes["rows"], instants_of(layer), layer)
            ledger = ledger.with_line(f"{layer}/mask_copy", copied)
        return ledger

    def apply(self, build: Build) -> None:
        """Compose the mask."""
        build.mask = replace(build.mask, blocks=self.pattern)

    def active(self, build: Build) -> Evidence:
        """Read which blocks the run's backend visits: those that get weight from equal scores."""
        length, width = build.plan.data.sequence_length, build.config.resolved_head_dim
        places = torch.arange(length, device=build.device)
        group = places // self.block
        like = torch.zeros(1, length, 1, width, dtype=build.dtype, device=build.device)
        attend = build.model.attend
        with torch.no_grad():
            spec = replace(build.model.mask, alibi=0, soft_cap=0.0)
            mask = attend.prepare(spec, Rows(places[None]), length)
            weight_TZ = weights(attend, mask, like, like, group)[0, :, 0]
        count = int(group[-1]) + 1
        mine_ZT = torch.arange(count, device=build.device)[:, None] == group
        visited_ZZ = mine_ZT.float() @ (weight_TZ > 0).float() > 0
        pattern_ZZ = self.pattern.seen(count, build.device).tril()
        extra = int((visited_ZZ & ~pattern_ZZ).sum())
        near_ZZ = self.block * (places[:count, None] - places[:count]) - self.block < (
            spec.window or length
        )
        missed = int((pattern_ZZ & near_ZZ & ~visited_ZZ).sum())
        visits = int(visited_ZZ.sum())
        density = 2 * visits / (count * (count + 1))
        return Evidence(
            active=extra == missed == 0 < visits,
            detail=f"queries visit {visits} of {count * (count + 1) // 2} blocks of "
            f"{self.block} tokens, {extra} of them outside of the pattern and {missed} of its "
            "own left out",
            numbers={"density": density, "outside_of_the_pattern": extra, "left_out": missed},
        )
