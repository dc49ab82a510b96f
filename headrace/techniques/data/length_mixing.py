"""Train on short and long sequences in every batch: a share of the rows is cut into short pieces.

A row of T tokens that is given the length L holds T / L pieces that do not see each other and whose
positions restart, as sequences of L tokens of their own do. The batch keeps its shape, every token
stays once an epoch, and every target stays: the last one of a piece is the first token of the next,
as at the border of two rows. The loss is that of the same pieces trained as separate sequences.
Short pieces make attention cheaper in every step, where `sequence_length_schedule` does so in the
first ones alone, and long ones keep what the model has learned of far tokens.

Which length a row has depends on its number in the stream alone. Of the first n rows, floor(n x
share) have the first length; those that are left are dealt to the next lengths likewise. So any
rows that follow each other, and with them every step, every rank's part and every micro-batch, have
the shares of two lengths to less than one row (of n lengths to less than n - 1), and no rank has
many more long rows than another. What stands in a row is drawn by the keyed order: a text has
another length in each epoch.

Left out: pieces that do not divide a row, and lengths by the documents' own (bucketing as in
Dataset Decomposition, arXiv 2405.13226, where a sequence never spans two documents).
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.core.units import divisors
from headrace.costs.ledger import Ledger
from headrace.costs.work import Attention, Work
from headrace.data.loader import Micro
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

MASKS = "document_packing"
"""Technique whose mask keeps pieces apart."""


def deal_lengths(row: int, shares: Sequence[Fraction]) -> int:
    """Return which of the lengths a row of the stream has, as an index.

    Args:
        row: its number in the stream.
        shares: of each length; they add up to 1.
    """
    rest = Fraction(1)
    for index, share in enumerate(shares[:-1]):
        part, rest = share / rest, rest - share
        before = int(row * part)
        if int((row + 1) * part) > before:
            return index
        row -= before
    return len(shares) - 1


def cut_pieces(micro: Micro, lengths_B: Tensor, row_tokens: int) -> Micro:
    """Let no token see another piece of its row, and restart positions in each piece.

    Args:
        micro: with documents and positions, on the host.
        lengths_B: tokens of the pieces of each row, int64; all divide `row_tokens`.
        row_tokens: T, tokens of a row as it was read.
    """
    assert micro.segments_BT is not None and micro.positions_BT is not None
    place_BT = (_begins(micro) % row_tokens)[:, None] + torch.arange(micro.ids_BT.size(1))
    within_BT = place_BT % lengths_B[:, None]
    # A document that began before the piece is further from its beginning than the piece is long.
    positions_BT = torch.minimum(micro.positions_BT, within_BT)
    begins_BT = within_BT == 0
    begins_BT[:, 1:] |= micro.segments_BT.diff(dim=1) != 0
    begins_BT[:, 0] = False  # the row's first piece is number 0, whole or not
    segments_BT = begins_BT.cumsum(1, dtype=torch.int32)
    if micro.positions_BT.is_pinned():
        positions_BT, segments_BT = positions_BT.pin_memory(), segments_BT.pin_memory()
    return replace(micro, segments_BT=segments_BT, positions_BT=positions_BT)


def _begins(micro: Micro) -> Tensor:
    """Return the place of each row's first token in the whole stream, int64 [B]."""
    rows, length = micro.ids_BT.shape
    return micro.first_token + length * torch.arange(rows)


class LengthMixing(Technique[Build]):
    """Train on short and long sequences in every batch: some rows are cut into short pieces."""

    lengths: tuple[Annotated[int, Field(ge=0, le=1 << 24)], ...] = (64, 0)
    """Tokens of a piece; each divides data.sequence_length, and 0 is a whole row."""
    shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.5, 0.5)
    """Share of the tokens in pieces of each length; they add up to 1."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "data"
    stage: ClassVar[Stage] = Stage.DATA
    composes: ClassVar[tuple[str, ...]] = ("recut",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("computation:attention",)
    card: ClassVar[Card] = Card(
        buys="attention of short sequences in a share of each batch, in unchanged shapes (derived)",
        costs="fewer far tokens: a piece sees none before its beginning",
        helps="long rows, where attention is a large share of the work and its kernel skips what "
        "the mask hides (flex_attention, varlen_attention)",
        hurts="text whose far tokens matter; SDPA, whose dense mask skips nothing",
        source="arXiv 2405.13226, section 3 (lengths mixed in every stage of training)",
    )

    def parts(self) -> list[Fraction]:
        """Return the shares as fractions that add up to 1."""
        shares = [Fraction(str(share)) for share in self.shares]
        return [share / sum(shares) for share in shares]

    def tokens(self, row_tokens: int) -> list[int]:
        """Return the lengths in tokens, where a whole row has so many."""
        return [length or row_tokens for length in self.lengths]

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require the mask of documents, lengths that divide a row, and rows of each in a step."""
        plan, name = context.plan, self.name()
        if plan is None:
            return Supported()
        if MASKS not in plan.techniques:
            return Unsupported(
                f"pieces of a row are kept apart by the mask of {MASKS}, which is not on",
                mend(f"+{MASKS}"),
            )
        if len(self.lengths) != len(self.shares) or abs(sum(self.shares) - 1) > 1e-6:
            each = [round(1 / len(self.lengths), 4)] * len(self.lengths)
            even = [*each[1:], round(1 - sum(each[1:]), 4)]
            return Unsupported(
                f"{len(self.lengths)} lengths need as many shares that add up to 1, not "
                f"{[*self.shares]}",
                mend(f"techniques.{name}.shares={even}".replace(" ", "")),
            )
        whole = plan.data.sequence_length
        fits = [n for n in divisors(whole) if n > 1]
        near = [min(fits, key=lambda n: abs(n - one)) for one in self.tokens(whole)]
        if near != self.tokens(whole):
            return Unsupported(
                f"lengths = {[*self.lengths]} do not all cut a row of {whole} tokens evenly",
                mend(f"techniques.{name}.lengths={near}".replace(" ", "")),
            )
        least = min(count for _, count in plan.batches.stages) // whole // plan.mesh.data
        needed = -(-max(1, len(self.shares) - 1) // min(self.parts()))
        if least < needed:
            unit = whole * plan.mesh.data * (plan.batch.micro_sequences or 1)
            grown = plan.batch.tokens * -(-needed // least)
            return Unsupported(
                f"the {least} rows of a rank's step do not hold each length: a share of "
                f"{min(self.shares):g} needs {needed}",
                mend(f"batch.tokens={-(-grown // unit) * unit}"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Leave of attention's scores those within pieces, which shorter documents make fewer."""
        whole = int(ledger.sizes["length"])
        pairs = zip(self.parts(), self.tokens(whole), strict=True)
        seen = float(sum(share * (length + 1) / (whole + 1) for share, length in pairs))

        def edit(_: str, piece: Work) -> Work:
            if not isinstance(piece, Attention):
                return piece
            left = 1.0 if piece.mask.seen is None else piece.mask.seen
            return replace(piece, mask=replace(piece.mask, layers=1.0, seen=seen * left))

        return ledger.reworked(edit)

    def apply(self, build: Build) -> None:
        """Cut the rows of each micro-batch, and count those of each length."""
        row_tokens, shares = build.plan.data.sequence_length, self.parts()
        lengths = torch.tensor(self.tokens(row_tokens))
        seen = [[0, 0] for _ in shares]  # tokens, and the longest piece, of each length
        build.notes[self.name()] = seen

        def recut(build: Build, micro: Micro) -> Micro:
            # Of a row of the stream, which a schedule of lengths may have cut: all on the host.
            rows_B = (_begins(micro) // row_tokens).numpy().tolist()
            which_B = torch.tensor([deal_lengths(row, shares) for row in rows_B])
            micro = cut_pieces(micro, lengths[which_B], row_tokens)
            assert micro.positions_BT is not None
            longest = (micro.positions_BT.amax(1) + 1).numpy().tolist()
            for number, longest_of_row in zip(which_B.numpy().tolist(), longest, strict=True):
                seen[number][0] += micro.ids_BT.size(1)
                seen[number][1] = max(seen[number][1], longest_of_row)
            return micro

        build.recut.append(recut)

    def active(self, build: Build) -> Evidence:
        """Report the share of the tokens in pieces of each length, and the longest piece of each.

        In each step they may be off by as many of a rank's rows as there are lengths.
        """
        plan, seen = build.plan, build.notes[self.name()]
        row_tokens, total = plan.data.sequence_length, max(1, sum(tokens for tokens, _ in seen))
        off = len(seen) * row_tokens * plan.mesh.data / plan.batches.at(0)
        numbers: dict[str, Any] = {}
        right, words = [build.loader.segments], list[str]()
        for length, asked, (tokens, longest) in zip(
            self.tokens(row_tokens), self.parts(), seen, strict=True
        ):
            share = tokens / total
            numbers |= {f"share_of_{length}": share, f"longest_of_{length}": longest}
            right += [abs(share - asked) <= off, 0 < longest <= length]
            words.append(f"{share:.0%} in pieces of {length}, the longest of {longest}")
        return Evidence(active=all(right), detail=f"tokens: {'; '.join(words)}", numbers=numbers)
